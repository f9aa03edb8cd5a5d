"""Talking to the real `nix-store --serve`, and to what only pretends to be one."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import trio
import trio.lowlevel

from actors.nix import serve, wire
from actors.nix.serve import BlockingServe, ServeFailed, ServeProcess
from actors.nix.wire import Writer
from tests.nix.real import build, needs_nix


@needs_nix
async def test_a_store_tells_what_is_valid_and_all_about_it(chroot, nix_env):
    store = chroot("w1")
    expression = (
        f"let a = {build('a', 'echo > $out')}; in {build('b', 'echo $a > $out', 'inherit a;')}"
    )
    drv = store.instantiate(expression)
    out = store.run("nix-store", "--realise", drv).stdout.strip()
    absent = f"{out[:-1]}x"
    process = await ServeProcess.start(serve.command(store.uri), nix_env)
    asked = serve.query_valid_paths([out, absent], lock=True, substitute=False)
    assert await process.ask(asked, wire.strings()) == [out]
    (info,) = await process.ask(serve.query_path_infos([absent, out]), serve.path_infos())
    references = store.run("nix-store", "-q", "--references", out).stdout.split()
    assert (info.path, info.references, info.deriver) == (out, references, drv)
    assert info.nar_size == int(store.run("nix-store", "-q", "--size", out).stdout)
    assert process.is_alive
    await process.close()
    assert not process.is_alive


@needs_nix
def test_threads_take_turns_and_an_ended_process_is_replaced(chroot, nix_env):
    store = chroot("w1")
    drv = store.instantiate(build("a", "echo > $out"))
    asked = serve.query_valid_paths([drv], lock=False, substitute=False)
    blocking = BlockingServe(serve.command(store.uri), nix_env)
    assert blocking.ask(asked, wire.strings) == [drv]
    blocking._process.kill()
    blocking._process.wait()
    assert blocking.ask(asked, wire.strings) == [drv]
    found = []
    thread = threading.Thread(target=lambda: found.append(blocking.ask(asked, wire.strings)))
    thread.start()
    thread.join()
    assert found == [[drv]]
    blocking.close()


def pretender(script: str) -> list[str]:
    return [sys.executable, "-c", f"import sys, time; w = sys.stdout.buffer; {script}; w.flush()"]


HELLO = Writer().integer(serve.ANSWER).integer(0x207).done()


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("pass", "it has ended"),
        ("sys.stderr.write('error: no such store\\n')", "error: no such store"),
        ("w.write(b'<html> a page <html>')", "answered something else"),
        (f"w.write({Writer().integer(serve.ANSWER).integer(0x100).done()!r})", "version 1 of"),
    ],
)
async def test_what_is_no_store_is_named(script, complaint):
    with pytest.raises(ServeFailed, match=complaint):
        await ServeProcess.start(pretender(script), os.environ)


async def test_a_program_that_is_not_there_is_named():
    with pytest.raises(ServeFailed, match="cannot run /nonexistent"):
        await ServeProcess.start(["/nonexistent"], os.environ)
    with pytest.raises(ServeFailed, match="/nonexistent"):
        BlockingServe(["/nonexistent"], os.environ).ask(b"", wire.strings)


async def test_the_whole_log_comes_before_the_answer():
    script = f"w.write({HELLO!r}); w.flush(); sys.stdin.buffer.read(24); "
    script += "sys.stderr.write('x' * 500000); w.write(bytes(8)); w.flush(); time.sleep(60)"
    process = await ServeProcess.start(pretender(script), os.environ)
    log = bytearray()

    async def slow(data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        log.extend(data)

    assert await process.ask(bytes(8), wire.strings(), slow) == []
    assert len(log) == 500_000
    await process.close()
