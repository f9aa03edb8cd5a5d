"""What builders and caches do that is out of the ordinary, with the real Nix."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from actors.nix import settings
from actors.nix.settings import Nix
from actors.worker.executors.base import Built
from actors.worker.executors.nix import NixExecutor
from tests.nix.real import build, needs_nix
from tests.nix.webcache import WebCache
from tests.worker.test_process_executor import Context

pytestmark = needs_nix


@pytest.fixture
async def worker(chroot, nix_env, monkeypatch):
    """Makes a store by name and its started executor; closes them all."""
    for name in ("HOME", "NIX_CONFIG"):
        monkeypatch.setenv(name, nix_env[name])
    started = []

    def of(name, cache=None):
        store = chroot(name)
        executor = NixExecutor(Nix(store.uri, cache))
        executor.start()
        started.append(executor)
        return store, executor

    yield of
    for executor in started:
        await executor.close()


async def run(worker, script, attributes=""):
    """A build on a store of its own: the store, the job, its outcome and its log."""
    store, executor = worker("w1")
    job = store.job(store.instantiate(build("odd", script, attributes)))
    context = Context()
    return store, job, await executor.run_build(job, context), context.output


# -- builders --------------------------------------------------------------------------------------


async def test_a_log_need_not_be_text_nor_end_with_a_line(worker):
    script = (
        r"printf '\377\376\000'; head -c 300000 /dev/zero | tr '\000' y; printf end; echo >$out"
    )
    _, _, done, log = await run(worker, script)
    assert isinstance(done, Built), done
    assert log == b"\xff\xfe\x00" + b"y" * 300_000 + b"end\n"


async def test_there_is_nothing_to_read_on_standard_input(worker):
    _, _, done, log = await run(worker, "read x || echo nothing; cat > $out")
    assert isinstance(done, Built), done
    assert log == b"nothing\n"


async def test_what_a_builder_leaves_behind_ends_with_it(worker):
    mark = f"{40_000 + os.getpid()}"
    _, _, done, _ = await run(
        worker, f"sleep {mark} & (setsid sleep {mark} >&- 2>&- &); echo >$out"
    )
    assert isinstance(done, Built), done
    left = [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    assert not left


async def test_there_may_be_many_outputs_and_none_named_out(worker):
    names = [f"o{number}" for number in range(40)]
    script = "; ".join(f"echo {name} > ${name}" for name in names)
    quoted = " ".join(f'"{name}"' for name in names)
    store, _, done, _ = await run(worker, script, f"outputs = [ {quoted} ];")
    assert isinstance(done, Built), done
    assert {name: store.read(output.path) for name, output in done.outputs.items()} == {
        name: f"{name}\n" for name in names
    }


async def test_variables_reach_the_builder_as_they_are(worker):
    attributes = r'a = "l1\nl2\tq\"uo\\te"; b = "\${x} ü→"; c = ""; "odd name" = "v";'
    script = "printf '%s' \"$a|$b|$c|\" > $out"
    store, job, done, _ = await run(worker, script, attributes)
    assert isinstance(done, Built), done
    assert store.read(job.outputs["out"]) == 'l1\nl2\tq"uo\\te|${x} ü→||'


async def test_what_no_archive_can_hold_fails_for_good(worker):
    _, _, failed, _ = await run(worker, "mkdir $out; mkfifo $out/fifo")
    assert failed.kind == "Permanent"
    assert "fifo' has an unsupported type" in failed.error
    assert not failed.error.startswith("error: ")


ODD_FILES = r"""
mkdir -p $out/d/e "$out/  blank"; cd $out
echo x > "$(printf 'a\nb')"; echo x > "$(printf '\377')"
ln -s /nowhere dangling; ln -s . loop; : > empty
echo '#!/bin/sh' > run; chmod 755 run; ln run hard
"""


@pytest.mark.parametrize("script", [ODD_FILES, "ln -s /nowhere $out", ": > $out"])
async def test_odd_files_go_through_a_cache_unchanged(worker, tmp_path, script):
    uri = f"file://{tmp_path}/cache"
    store, executor = worker("w1", uri)
    job = store.job(store.instantiate(build("odd", script)))
    done = await executor.run_build(job, Context())
    assert isinstance(done, Built), done
    other, fetching = worker("w2", uri)
    again = await fetching.run_build(job, Context())
    assert again.substituted
    assert again.outputs == done.outputs
    out = job.outputs["out"]
    told = [s.run("nix-store", "--verify-path", out, check=False) for s in (store, other)]
    assert [t.returncode for t in told] == [0, 0], told


# -- caches ----------------------------------------------------------------------------------------


@contextmanager
def broken_server(answer: bytes | None) -> Iterator[str]:
    """Answers every request so, and hangs up; None: never answers."""

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.recv(65_536)
            if answer is not None:
                connection.sendall(answer)
            else:
                is_over.wait()

    def listen() -> None:
        while True:
            connection, _ = server.accept()
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()
            if is_over.is_set():
                return

    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads = [threading.Thread(target=listen)]
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            is_over.set()
            socket.create_connection(server.getsockname()).close()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize(
    "answer", [None, b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"],
    ids=["hangs", "fails"],
)  # fmt: skip
async def test_a_cache_out_of_order_is_a_passing_fault(worker, monkeypatch, answer):
    # Nix, and with it this test, is patient else.
    patience = ("stalled-download-timeout = 1", "download-attempts = 1")
    monkeypatch.setattr(settings, "_SETTINGS", (*settings._SETTINGS, *patience))
    with broken_server(answer) as url:
        store, executor = worker("w1", url)
        library = build("library", "echo > $out")
        top = f"let library = {library}; in {build('top', 'echo > $out', 'inherit library;')}"
        job = store.job(store.instantiate(top))
        failed = await executor.run_build(job, Context())
    assert failed.kind == "Transient"
    assert failed.error.startswith(f"cannot fetch {job.required_paths[0].path} (unable to download")
    assert "\n" not in failed.error


@pytest.mark.parametrize("scheme", ["file", "http"])
async def test_a_damaged_file_in_the_cache_is_replaced_by_who_made_it(worker, tmp_path, scheme):
    folder = tmp_path / "cache"
    with WebCache(folder) as web:
        uri = f"{web.url if scheme == 'http' else f'file://{folder}'}?compression=none"
        store, first = worker("w1", uri)
        library = build("library", "echo library > $out")
        made = store.job(store.instantiate(library))
        assert isinstance(await first.run_build(made, Context()), Built)
        (nar,) = (folder / "nar").iterdir()
        whole = nar.read_bytes()
        nar.write_bytes(whole.replace(b"library", b"LIBRARY"))
        other, second = worker("w2", uri)
        top = (
            f"let library = {library}; in {build('top', 'cat $library > $out', 'inherit library;')}"
        )
        job = store.job(store.instantiate(top))
        failed = await second.run_build(job, Context())
        assert failed.kind == "InputsUnavailable"
        assert failed.missing_paths == [made.outputs["out"]]
        assert (await first.run_build(made, Context())).substituted
        assert nar.read_bytes() == whole
        assert isinstance(await second.run_build(job, Context()), Built)
    assert other.read(job.outputs["out"]) == "library\n"
