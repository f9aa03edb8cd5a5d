"""The executor of the real Nix, on chroot stores and binary caches of the tests' own."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import trio

from actors.nix.settings import Nix
from actors.worker.executors import nix_run
from actors.worker.executors.base import Built, Failed
from actors.worker.executors.nix import NixExecutor
from tests.nix.real import ChrootStore, build, needs_nix
from tests.nix.webcache import WebCache
from tests.worker.test_process_executor import Context
from transport import messages as m

pytestmark = needs_nix

DIAMOND = f"""
let
  lib = {build("lib", "echo lib > $out")};
  left = {build("left", "{ echo left; read x < $lib; echo $x; } > $out", "inherit lib;")};
  right = {build("right", "{ echo right; read x < $lib; echo $x; } > $out", "inherit lib;")};
  main = {build("main", "cat $left $right > $out", "inherit left right;")};
in main
"""
NIX32 = "159shdmpfd9wyjlb2vwn2dq9f2a4jn4lfy8ak5j7bk92kayf6fpk"
ZERO_HASH = 'outputHash = "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";'


@pytest.fixture
async def start(nix_env, monkeypatch):
    """Makes started executors, and closes them."""
    for name in ("HOME", "NIX_CONFIG"):
        monkeypatch.setenv(name, nix_env[name])
    started = []

    def of(store: ChrootStore | str, **nix) -> NixExecutor:
        uri = store if isinstance(store, str) else store.uri
        executor = NixExecutor(Nix(uri, **nix))
        executor.start()
        started.append(executor)
        return executor

    yield of
    for executor in started:
        await executor.close()


def inputs_first(store: ChrootStore, drv_path: str) -> list[str]:
    found: dict[str, None] = {}

    def visit(path: str) -> None:
        for needed in store.derivation(path).input_drvs:
            visit(needed)
        found.setdefault(path)

    visit(drv_path)
    return list(found)


def builders(mark: str) -> list[psutil.Process]:
    """Processes that were started with this argument."""
    return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


async def until(check, seconds: float = 20):
    with trio.fail_after(seconds):
        while not (value := check()):
            await trio.sleep(0.02)
    return value


# -- one store -------------------------------------------------------------------------------------


async def test_a_build_reports_its_outputs_its_log_and_what_it_took(chroot, start):
    store = chroot("w1")
    script = "echo to the log; echo made > $out; echo $out > $dev"
    job = store.job(store.instantiate(build("two", script, 'outputs = [ "out" "dev" ];')))
    context = Context()
    done = await start(store).run_build(job, context)
    assert isinstance(done, Built)
    assert context.output == b"to the log\n"
    assert {name: output.path for name, output in done.outputs.items()} == job.outputs
    for output in done.outputs.values():
        assert store.run("nix-store", "-q", "--hash", output.path).stdout[:-1] == output.nar_hash
        assert int(store.run("nix-store", "-q", "--size", output.path).stdout) == output.nar_size
    assert not done.substituted
    assert done.metrics.output_nar_size == sum(o.nar_size for o in done.outputs.values())
    assert done.metrics.wall_time_ms > 0
    assert [span.phase for span in done.spans] == ["build"]
    assert store.read(job.outputs["out"]) == "made\n"


async def test_a_process_serves_many_builds_and_each_has_its_own_log(chroot, start):
    store, executor = chroot("w1"), start(chroot("w1"))
    serving = set()
    for number in range(4):
        context = Context()
        drv = store.instantiate(build(f"n{number}", f"echo log {number}; echo > $out"))
        assert isinstance(await executor.run_build(store.job(drv), context), Built)
        assert context.output == f"log {number}\n".encode()
        serving |= {p.pid for p in builders("--serve") if str(store.folder) in p.cmdline()}
    assert len(serving) == 2  # one builds, one answers scoring


@pytest.mark.parametrize(
    ("expression", "limits", "kind", "complaint"),
    [
        (build("bad", "echo oh; exit 3"), {}, "Permanent", "failed with exit code 3"),
        (build("lazy", "echo oh"), {}, "Permanent", "failed to produce output path"),
        (build("slow", "sleep 60"), {"timeout": 1}, "Timeout", "timed out after 1 s"),
        (
            build("quiet", "echo oh; sleep 60"), {"silent": 1},
            "Timeout", "timed out after 1 s without output",
        ),
        (
            build("slow-silence", "while :; do sleep .1; echo oh; done"),
            {"timeout": 1, "silent": 30}, "Timeout", "timed out after 1 s",
        ),
        (
            build("mismatch", "echo > $out", ZERO_HASH), {},
            "Permanent", "hash mismatch .* got: sha256-AbpHGcgLb+",
        ),
        (
            build("feature", "echo > $out", 'requiredSystemFeatures = [ "quantum" ];'), {},
            "Permanent", "with features {quantum} is required",
        ),
        (
            build("ca", "echo > $out").replace("args", "__impure = true; args"), {},
            "Permanent", "__impure derivations are not supported",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)  # fmt: skip
async def test_what_fails_says_why(chroot, start, expression, limits, kind, complaint):
    store = chroot("w1")
    job = store.job(store.instantiate(expression.replace("__impure = true;", "")), **limits)
    if "__impure" in expression:
        job.derivation["env"]["__impure"] = "1"
    failed = await start(store).run_build(job, Context())
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert pytest.raises(AssertionError, match=complaint).matches(AssertionError(failed.error))
    assert "\n" not in failed.error
    assert "\x1b" not in failed.error


@pytest.mark.parametrize(
    "attributes",
    [
        'outputHash = "sha256-8zrjvJoizXVkmQp5R4mVRAmXcBOWb7Go9Dw1d2uDOpU=";',
        f'outputHash = "{NIX32}"; outputHashAlgo = "sha256"; outputHashMode = "flat";',
        'outputHash = "d577273ff885c3f84dadb8578bb41399"; outputHashAlgo = "md5";',
        'outputHashMode = "recursive"; outputHashAlgo = "sha256"; outputHash = "";',
    ],
    ids=["sri", "nix32", "hex", "empty"],
)
async def test_a_fixed_output_is_checked_as_nix_checks_it(chroot, start, attributes):
    """Built with its hash in any notation; without one refused with the words of Nix."""
    store, plain = chroot("w1"), chroot("plain")
    job = store.job(store.instantiate(build("fixed", "echo 12345 > $out", attributes)))
    plain.instantiate(build("fixed", "echo 12345 > $out", attributes))
    by_nix = plain.run("nix-store", "--realise", job.drv_path, check=False)
    ours = await start(store).run_build(job, Context())
    if 'outputHash = "";' not in attributes:
        assert by_nix.returncode == 0
        assert isinstance(ours, Built), ours
        assert store.read(job.outputs["out"]) == "12345\n"
    else:
        assert "hash mismatch" in by_nix.stderr
        assert ours.kind == "Permanent"
        got = by_nix.stderr.split("got:")[1].split()[0]
        assert got in ours.error


async def test_structured_attributes_reach_the_builder(chroot, start):
    store = chroot("w1")
    # busybox has no arrays, so the builder only looks at the JSON.
    script = 'cat .attrs.json; echo > $(sed -n \'s/.*"out":"\\([^"]*\\)".*/\\1/p\' .attrs.json)'
    expression = build("attrs", script, "__structuredAttrs = true; list = [ 1 2 ];")
    context = Context()
    done = await start(store).run_build(store.job(store.instantiate(expression)), context)
    assert isinstance(done, Built), done
    assert b'"list":[1,2]' in context.output


async def test_valid_outputs_end_a_job_without_a_build(chroot, start):
    store = chroot("w1")
    job = store.job(store.instantiate(build("once", "echo > $out")))
    executor = start(store)
    assert not (await executor.run_build(job, Context())).substituted
    context = Context()
    again = await executor.run_build(job, context)
    assert again.substituted
    assert again.outputs["out"].nar_size == 120
    assert again.metrics is None
    assert context.output == b""


async def test_a_job_without_contents_is_built_from_its_drv_file(chroot, start):
    store = chroot("w1")
    job = store.job(store.instantiate(build("bare", "echo > $out")))
    bare = m.BuildJob(**{f: getattr(job, f) for f in job.__struct_fields__} | {"derivation": None})
    assert isinstance(await start(store).run_build(bare, Context()), Built)
    elsewhere = await start(chroot("w2")).run_build(bare, Context())
    assert elsewhere.kind == "InputsUnavailable"
    assert elsewhere.missing_paths == [job.drv_path]


async def test_missing_inputs_are_named_and_nothing_is_built(chroot, start):
    store = chroot("w1")
    top = store.job(store.instantiate(DIAMOND))
    failed = await start(store).run_build(top, Context())
    assert failed.kind == "InputsUnavailable"
    assert sorted(failed.missing_paths) == sorted(r.path for r in top.required_paths)
    assert not store.is_valid(top.outputs["out"])


async def test_a_builder_that_is_part_of_nix_runs_anywhere(chroot, start, tmp_path):
    digest = "8zrjvJoizXVkmQp5R4mVRAmXcBOWb7Go9Dw1d2uDOpU="
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "five").write_text("12345\n")
    store = chroot("w1")
    with WebCache(tmp_path / "files") as web:
        expression = f"""derivation {{
            name = "five"; system = "builtin"; builder = "builtin:fetchurl";
            url = "{web.url}/five"; outputHash = "sha256-{digest}"; outputHashMode = "flat";
            preferLocalBuild = true;
        }}"""
        job = store.job(store.instantiate(expression))
        done = await start(store).run_build(job, Context())
    assert isinstance(done, Built), done
    assert store.read(job.outputs["out"]) == "12345\n"


async def test_inputs_taken_as_built_are_found_in_the_text(chroot, start, tmp_path):
    uri, evaluated = f"file://{tmp_path}/cache", chroot("eval")
    drvs = inputs_first(evaluated, evaluated.instantiate(DIAMOND))
    top = drvs[-1]
    first = start(chroot("w1"), cache=uri)
    for drv_path in drvs[:-1]:
        assert isinstance(await first.run_build(evaluated.job(drv_path), Context()), Built)
    job = msgspec.structs.replace(evaluated.job(top), required_paths=[])
    for name in ("w1", "w2"):
        done = await start(chroot(name), cache=uri).run_build(job, Context())
        assert isinstance(done, Built), done
    # Without them the builder is tried, and says what it lacks.
    failed = await start(chroot("w3")).run_build(job, Context())
    assert failed.kind == "Permanent"


# -- the end of processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "script", ["exec sleep {}", "sleep {} & sleep {}", "trap '' TERM; sleep {}; sleep {}"]
)
async def test_a_stopped_job_leaves_no_builder(chroot, start, script):
    store, executor = chroot("w1"), start(chroot("w1"))
    mark = f"{10_000 + os.getpid()}"
    job = store.job(store.instantiate(build("long", script.replace("{}", mark))))
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(executor.run_build, job, Context())
            await until(lambda: builders(mark))
            scope.cancel()
    assert builders(mark) == []
    # The slot is as good as new.
    next_job = store.job(store.instantiate(build("next", "echo > $out")))
    assert isinstance(await executor.run_build(next_job, Context()), Built)


async def test_a_serve_process_that_dies_takes_its_builder_along(chroot, start):
    store, executor = chroot("w1"), start(chroot("w1"))
    mark = f"{20_000 + os.getpid()}"
    job = store.job(store.instantiate(build("long", f"sleep {mark}")))
    outcome, context = [], Context()

    async def run():
        outcome.append(await executor.run_build(job, context))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await until(lambda: context.peaks)
        for process in builders(store.uri):
            process.kill()
    assert outcome[0].kind == "Transient"
    assert builders(mark) == []


async def test_processes_that_died_while_idle_are_replaced(chroot, start):
    store, executor = chroot("w1"), start(chroot("w1"))
    jobs = [store.job(store.instantiate(build(f"n{n}", "echo > $out"))) for n in range(2)]
    assert isinstance(await executor.run_build(jobs[0], Context()), Built)
    for process in builders(store.uri):
        process.kill()
    await until(lambda: not builders(store.uri))
    assert isinstance(await executor.run_build(jobs[1], Context()), Built)
    candidate = m.JobCandidate("j", "build", "p", [m.RequiredPath(jobs[1].outputs["out"])], [], [])
    (score,) = await trio.to_thread.run_sync(executor.score, [candidate])
    assert score.missing_count == 0


async def test_what_runs_is_kept_from_the_garbage_collector(chroot, start):
    store, executor = chroot("w1"), start(chroot("w1"))
    mark = f"2.{os.getpid()}"
    first, *_ = inputs_first(store, store.instantiate(DIAMOND))
    lib = store.job(first)
    assert isinstance(await executor.run_build(lib, Context()), Built)
    expression = f"let lib = {build('lib', 'echo lib > $out')}; in " + build(
        "user", f"sleep {mark}; cat $lib > $out",
        "inherit lib;",
    )  # fmt: skip
    job = store.job(store.instantiate(expression))
    outcome = []

    async def run():
        outcome.append(await executor.run_build(job, Context()))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await until(lambda: builders(mark))
        await trio.to_thread.run_sync(store.run, "nix-store", "--gc")
    assert isinstance(outcome[0], Built), outcome
    assert store.read(job.outputs["out"]) == "lib\n"


# -- a daemon --------------------------------------------------------------------------------------


@pytest.fixture
def daemon(tmp_path, chroot, nix_env):
    """The store of a Nix daemon, and its address."""
    store, socket = chroot("w1"), tmp_path / "socket"
    env = {
        **nix_env,
        "NIX_DAEMON_SOCKET_PATH": str(socket),
        "NIX_REMOTE": f"local?root={store.uri}",
    }
    process = subprocess.Popen(["nix-daemon", "--daemon"], env=env, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not socket.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    yield store, f"unix://{socket}?root={store.uri}"
    process.terminate()
    process.wait()


async def test_a_daemon_builds_within_the_limits_it_is_not_told(
    daemon, start, tmp_path, monkeypatch
):
    monkeypatch.setattr(nix_run, "OVERTIME_SECS", 0.2)
    store, uri = daemon
    executor = start(uri, cache=f"file://{tmp_path}/cache")
    context = Context()
    job = store.job(store.instantiate(build("good", "echo a log; echo > $out")))
    assert isinstance(await executor.run_build(job, context), Built)
    assert context.output == b"a log\n"
    assert len(list((tmp_path / "cache").glob("*.narinfo"))) == 1
    bad = store.job(store.instantiate(build("bad", "echo a log; exit 3")))
    failed = await executor.run_build(bad, Context())
    assert (failed.kind, failed.error.endswith("failed with exit code 3")) == ("Permanent", True)
    mark = f"{30_000 + os.getpid()}"
    for limits, words in (({"timeout": 1}, "1 s"), ({"silent": 1}, "1 s without output")):
        slow = store.job(store.instantiate(build("slow", f"echo; sleep {mark}")), **limits)
        failed = await executor.run_build(slow, Context())
        assert (failed.kind, failed.error) == ("Timeout", f"timed out after {words}")
        await until(lambda: not builders(mark), 5)


# -- two stores and a cache ------------------------------------------------------------------------


@pytest.fixture(params=["file", "http"])
def cache(request, tmp_path):
    """The address of an empty cache and the folder of its files."""
    folder = tmp_path / "cache"
    if request.param == "file":
        yield f"file://{folder}?compression=none", folder
    else:
        with WebCache(folder) as web:
            yield f"{web.url}?compression=none", folder


async def test_workers_share_through_a_cache_what_they_built(chroot, start, cache):
    uri, _ = cache
    evaluated, plain = chroot("eval"), chroot("plain")
    drv_paths = inputs_first(evaluated, evaluated.instantiate(DIAMOND))
    workers = [(chroot(n), start(chroot(n), cache=uri)) for n in ("w1", "w2")]
    made = {}
    for number, drv_path in enumerate(drv_paths):
        context = Context()
        done = await workers[number % 2][1].run_build(evaluated.job(drv_path), context)
        assert isinstance(done, Built), done
        assert not done.substituted
        made |= {output.path: output.nar_hash for output in done.outputs.values()}
    top = evaluated.job(drv_paths[-1]).outputs["out"]
    plain.run("nix-store", "--realise", plain.instantiate(DIAMOND))
    for path, nar_hash in made.items():
        assert plain.run("nix-store", "-q", "--hash", path).stdout.strip() == nar_hash
    # A third one has nothing, and need not build.
    third = chroot("w3")
    again = await start(third, cache=uri).run_build(evaluated.job(drv_paths[-1]), Context())
    assert again.substituted
    assert third.read(top) == "left\nlib\nright\nlib\n"


@pytest.mark.parametrize("is_signed", [False, True])
async def test_a_cache_can_be_another_machines_store(chroot, start, tmp_path, is_signed):
    # With the host name localhost Nix runs the other side itself, without ssh.
    uri = f"ssh-ng://localhost?remote-store={tmp_path}/cache"
    key = None
    if is_signed:
        key = tmp_path / "secret"
        chroot("w1").run(
            "nix-store", "--generate-binary-cache-key", "farm", str(key), str(tmp_path / "public")
        )
    evaluated = chroot("eval")
    job = evaluated.job(evaluated.instantiate(build("shared", "echo > $out")))
    first = start(chroot("w1"), cache=uri, key_file=key)
    assert isinstance(await first.run_build(job, Context()), Built)
    again = await start(chroot("w2"), cache=uri, key_file=key).run_build(job, Context())
    assert isinstance(again, Built), again
    assert again.substituted


PAIR = build("pair", "echo $dev > $out; echo > $dev", 'outputs = [ "out" "dev" ];')


async def test_outputs_go_to_the_cache_without_a_program_for_each(chroot, start, cache):
    """Also outputs that refer to each other, and a large one."""
    uri, _ = cache
    store = chroot("w1")
    executor = start(store, cache=uri)
    executor._run = None  # there is no `nix copy`
    large = build("large", "head -c 3000000 /dev/zero > $out")
    for expression in (PAIR, large):
        job = store.job(store.instantiate(expression))
        assert isinstance(await executor.run_build(job, Context()), Built)
        other = start(chroot("w2"), cache=uri)
        assert (await other.run_build(job, Context())).substituted
    assert chroot("w2").path(job.outputs["out"]).stat().st_size == 3_000_000


async def test_what_an_output_refers_to_goes_to_the_cache_with_it(chroot, start, tmp_path):
    uri, store = f"file://{tmp_path}/cache", chroot("w1")
    library = build("library", "echo > $out")
    job = store.job(store.instantiate(library))
    # Built before there was a cache.
    assert isinstance(await start(store).run_build(job, Context()), Built)
    program = f"let library = {library}; in " + build(
        "program", "echo $library > $out", "inherit library;"
    )
    executor = start(store, cache=uri)
    user = store.job(store.instantiate(program))
    assert isinstance(await executor.run_build(user, Context()), Built)
    other = chroot("w2")
    assert (await start(other, cache=uri).run_build(user, Context())).substituted
    assert other.is_valid(job.outputs["out"])
    # The process that did not take it is replaced.
    executor._run = None
    more = store.job(store.instantiate(build("more", "echo > $out")))
    assert isinstance(await executor.run_build(more, Context()), Built)


async def test_what_two_builds_need_is_fetched_at_once_and_by_one_of_them(chroot, start, tmp_path):
    evaluated = chroot("eval")
    with WebCache(tmp_path / "cache") as web:
        uri = f"{web.url}?compression=none"
        drvs = inputs_first(evaluated, evaluated.instantiate(DIAMOND))
        jobs = [evaluated.job(drv) for drv in drvs]
        first = start(chroot("w1"), cache=uri)
        for job in jobs[:-1]:
            assert isinstance(await first.run_build(job, Context()), Built)
        second, contexts = start(chroot("w2"), cache=uri), [Context(), Context()]
        twin = evaluated.instantiate(DIAMOND.replace('name = "main"', 'name = "twin"'))
        web.requests.clear()
        async with trio.open_nursery() as nursery:
            for drv, context in zip((drvs[-1], twin), contexts, strict=True):
                nursery.start_soon(second.run_build, evaluated.job(drv), context)
    fetched = [path for method, path in web.requests if method == "GET" and "/nar/" in path]
    assert len(fetched) == len(set(fetched)) == 2
    for context in contexts:
        prefetch = [fields for phase, fields in context.progress if phase == "prefetch"]
        assert prefetch[0] == {"paths_done": 0, "paths_total": 2}
        assert prefetch[-1] == {"paths_done": 2, "paths_total": 2}


async def test_a_path_that_the_cache_lost_is_named(chroot, start, cache):
    uri, folder = cache
    evaluated = chroot("eval")
    drvs = inputs_first(evaluated, evaluated.instantiate(DIAMOND))
    top = drvs[-1]
    first = start(chroot("w1"), cache=uri)
    for drv_path in drvs[:-1]:
        assert isinstance(await first.run_build(evaluated.job(drv_path), Context()), Built)
    lost = evaluated.job(drvs[1]).outputs["out"]
    (folder / f"{Path(lost).name[:32]}.narinfo").unlink()
    second = start(chroot("w2"), cache=uri)
    failed = await second.run_build(evaluated.job(top), Context())
    assert failed.kind == "InputsUnavailable"
    assert failed.missing_paths == [lost]
    # Whoever has it puts it back, without building.
    again = await first.run_build(evaluated.job(drvs[1]), Context())
    assert again.substituted
    assert isinstance(await second.run_build(evaluated.job(top), Context()), Built)


async def test_a_file_that_the_cache_lost_is_put_back_too(chroot, start, cache):
    """The entry is there, and what it promises is not."""
    uri, folder = cache
    evaluated = chroot("eval")
    drvs = inputs_first(evaluated, evaluated.instantiate(DIAMOND))
    first = start(chroot("w1"), cache=uri)
    for drv_path in drvs[:-1]:
        assert isinstance(await first.run_build(evaluated.job(drv_path), Context()), Built)
    lost = evaluated.job(drvs[1]).outputs["out"]
    entry = (folder / f"{Path(lost).name[:32]}.narinfo").read_text()
    (url,) = (line[5:] for line in entry.splitlines() if line.startswith("URL: "))
    (folder / url).unlink()
    second = start(chroot("w2"), cache=uri)
    failed = await second.run_build(evaluated.job(drvs[-1]), Context())
    assert failed.kind == "InputsUnavailable"
    assert failed.missing_paths == [lost]
    assert isinstance(await first.run_build(evaluated.job(drvs[1]), Context()), Built)
    assert isinstance(await second.run_build(evaluated.job(drvs[-1]), Context()), Built)


async def test_a_cache_that_cannot_be_reached_is_not_a_lost_path(chroot, start, tmp_path):
    evaluated = chroot("eval")
    job = evaluated.job(evaluated.instantiate(DIAMOND))
    with WebCache(tmp_path / "cache") as web:
        executor = start(chroot("w1"), cache=web.url)
    failed = await executor.run_build(job, Context())
    assert failed.kind == "Transient"
    assert web.url in failed.error
    assert not failed.missing_paths


async def test_what_is_signed_is_checked(chroot, start, tmp_path):
    keys = [tmp_path / name for name in ("farm", "farm.pub", "other", "other.pub")]
    store = chroot("w1")
    for secret, public in (keys[:2], keys[2:]):
        store.run("nix-store", "--generate-binary-cache-key", secret.name, str(secret), str(public))
    uri = f"file://{tmp_path}/cache"
    job = store.job(store.instantiate(build("signed", "echo > $out")))
    assert isinstance(
        await start(store, cache=uri, key_file=keys[0]).run_build(job, Context()), Built
    )
    (entry,) = (tmp_path / "cache").glob("*.narinfo")
    assert "\nSig: farm:" in entry.read_text()
    friend = await start(chroot("w2"), cache=uri, key_file=keys[0]).run_build(job, Context())
    assert friend.substituted
    stranger = await start(chroot("w3"), cache=uri, key_file=keys[2]).run_build(job, Context())
    assert isinstance(stranger, Built)
    assert not stranger.substituted
