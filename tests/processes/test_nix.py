"""A farm of real processes that build with the real Nix, and plain Nix beside it."""

from __future__ import annotations

import gzip
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.nix.real import ChrootStore, build, needs_nix
from tests.nix.webcache import WebCache
from tests.processes.beside_nix import assert_equal_to_plain
from tests.processes.conftest import until

pytestmark = [needs_nix, pytest.mark.processes]

GRAPHS = os.environ.get("HEADRACE_REAL_GRAPHS", "hello").split()
"""`firefox` with its 1 138 derivations takes minutes."""

# The default policy spares machines that are busy, which one that runs tests may well be.
SIMPLE = ("--policy", "simple")

# A library, two programs that are linked against it, and a test that runs both.
PROJECT = {
    "greet.lib": 'greet() { echo "$1, $2"; }\n',
    "hello.in": "greet Hello world\n",
    "bye.in": "greet Bye world\n",
}  # fmt: skip
COMPILE = "{ cat $library; cat $source; } > $out"
CHECK = "{ sh $hello; sh $bye; } > $out; grep -q 'Bye, world' $out"


def project(folder: Path) -> str:
    """Writes the sources; the expression of the test's derivation."""
    for name, text in PROJECT.items():
        (folder / name).write_text(text)
    source = f'name: builtins.path {{ inherit name; path = "{folder}/${{name}}"; }}'
    library = build("greet", "cat $source > $out", 'source = source "greet.lib";')
    hello, bye = (
        build(name, COMPILE, f'inherit library; source = source "{name}.in";')
        for name in ("hello", "bye")
    )
    check = build("check", CHECK, "inherit hello bye;")
    return f"let source = {source}; library = {library}; hello = {hello}; bye = {bye}; in {check}"


@pytest.fixture
def plain(chroot, nix_env, monkeypatch) -> ChrootStore:
    """Where expressions are evaluated and what is built by plain Nix; sets up the environment."""
    for name in ("HOME", "NIX_CONFIG"):
        monkeypatch.setenv(name, nix_env[name])
    return chroot("plain")


def submit(farm, plain: ChrootStore, expression: str, cache: str | None = None) -> str:
    """Gives the farm a derivation with all it needs, sources in the cache; its drv path."""
    drv_path = plain.instantiate(expression)
    give(farm, plain, [drv_path], cache)
    return drv_path


def give(farm, plain: ChrootStore, drv_paths: list[str], cache: str | None) -> None:
    if cache is not None:
        closure = plain.run("nix-store", "-qR", *drv_paths).stdout.split()
        sources = [path for path in closure if not path.endswith(".drv")]
        if sources:
            plain.run("nix", "copy", "--to", cache, *sources)
    graph = plain.run("nix", "show-derivation", "-r", *drv_paths).stdout
    done = farm.run("submit", "-", stdin=graph)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["file", "http"])
def cache(request, tmp_path):
    folder = tmp_path / "cache"
    if request.param == "file":
        yield f"file://{folder}?compression=none"
    else:
        with WebCache(folder) as web:
            yield f"{web.url}?compression=none"


def test_two_workers_build_a_project_as_plain_nix_does(farm, plain, tmp_path, cache):
    farm.server(*SIMPLE)
    workers = ["w1", "w2"]
    for name in workers:
        farm.nix_worker(name, "--cache", cache)
    top = submit(farm, plain, project(tmp_path), cache)
    assert farm.run("wait").returncode == 0, farm.json("jobs")
    assert_equal_to_plain(farm, plain, [top])
    out = plain.derivation(top).outputs["out"].path
    assert plain.read(out) == "Hello, world\nBye, world\n"
    stores = [ChrootStore(tmp_path / name, plain._env) for name in workers]
    assert any(store.is_valid(out) for store in stores)


def test_what_fails_is_told_apart(farm, plain):
    farm.server(*SIMPLE)
    farm.nix_worker("w1", slots=4)
    zeros = 'outputHash = "sha256-AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";'
    fails = {
        "bad": (build("bad", "echo this went wrong; exit 3"), {}, "Failed", "exit code 3"),
        "slow": (build("slow", "sleep 300"), {"timeout_secs": 1}, "TimedOut", "after 1 s"),
        "quiet": (
            build("quiet", "sleep 300"), {"max_silent_secs": 1}, "TimedOut", "without output",
        ),
        "other": (build("other", "echo > $out", zeros), {}, "Failed", "hash mismatch"),
    }  # fmt: skip
    jobs = []
    for expression, limits, _, _ in fails.values():
        job = plain.job(plain.instantiate(expression))
        derivation = job.derivation
        jobs.append({
            "drv_path": job.drv_path, "name": job.name, "system": job.requirement.system,
            "required_features": [], "outputs": job.outputs, **derivation, **limits,
        })  # fmt: skip
    farm.submit(*jobs)
    assert farm.run("wait", "--timeout", "60").returncode == 1
    told = farm.jobs()
    for name, (_, _, status, words) in fails.items():
        assert told[name]["status"] == status, told[name]
        assert words in told[name]["error"]
    assert "this went wrong" in farm.run("logs", "bad").stdout


def running(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


def test_a_worker_that_is_killed_leaves_no_builder_and_another_builds(farm, plain, tmp_path):
    cache = f"file://{tmp_path}/cache"
    mark = f"3.{time.monotonic_ns() % 10**9:09}"
    farm.server(*SIMPLE, "--reconnect-grace", "1")
    first = farm.nix_worker("w1", "--cache", cache)
    library = build("library", "echo library > $out")
    expression = f"let library = {library}; in " + build(
        "long", f"sleep {mark}; cat $library > $out", "inherit library;"
    )
    top = submit(farm, plain, expression, cache)
    until(lambda: running(mark), "long runs")
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=10)
    until(lambda: not running(mark), "its builder is gone", 5)
    farm.nix_worker("w2", "--cache", cache)
    assert farm.run("wait").returncode == 0, farm.json("jobs")
    assert farm.jobs()["long"]["worker"] == "w2"
    assert_equal_to_plain(farm, plain, [top])


def test_a_cancelled_build_is_stopped_at_once(farm, plain):
    mark = f"300.{time.monotonic_ns() % 10**9:09}"
    farm.server(*SIMPLE)
    farm.nix_worker("w1", slots=1)
    submit(farm, plain, build("long", f"sleep {mark}; echo > $out"))
    until(lambda: running(mark), "long runs")
    assert farm.run("cancel", "long").returncode == 0
    until(lambda: farm.jobs()["long"]["status"] == "Aborted", "long is aborted", 10)
    assert running(mark) == []


def test_what_the_cache_lost_is_built_again(farm, plain, tmp_path):
    cache = f"file://{tmp_path}/cache"
    farm.server(*SIMPLE)
    first = farm.nix_worker("w1", "--cache", cache)
    library = build("library", "echo library > $out")
    submit(farm, plain, library, cache)
    assert farm.run("wait").returncode == 0
    first.terminate()
    first.wait(timeout=15)
    (entry,) = (tmp_path / "cache").glob("*.narinfo")
    entry.unlink()
    expression = f"let library = {library}; in " + build(
        "program", "cat $library > $out", "inherit library;"
    )
    farm.nix_worker("w2", "--cache", cache)
    top = submit(farm, plain, expression, cache)
    assert farm.run("wait").returncode == 0, farm.json("jobs")
    store = ChrootStore(tmp_path / "w2", plain._env)
    assert store.read(plain.derivation(top).outputs["out"].path) == "library\n"
    ends = farm.rows("select outcome from dispatched_job order by claimed_at")
    assert [outcome for (outcome,) in ends] == [
        "Completed", "InputsUnavailable", "Completed", "Completed",
    ]  # fmt: skip


@pytest.mark.shared_data
@pytest.mark.parametrize("name", GRAPHS)
def test_a_real_graph_is_built_as_plain_nix_builds_it(farm, plain, tmp_path, shared_data, name):
    cache = f"file://{tmp_path}/cache?compression=none"
    graph = tmp_path / "graph.json"
    graph.write_bytes(gzip.decompress((shared_data / f"{name}-20.09.json.gz").read_bytes()))
    expression = f"import {shared_data}/replay.nix {{ graph = {graph}; keepFeatures = false; }}"
    roots = plain.run("nix-instantiate", "-E", expression).stdout.split()
    farm.server(*SIMPLE)
    for worker in ("w1", "w2"):
        farm.nix_worker(worker, "--cache", cache)
    give(farm, plain, roots, cache)
    assert farm.run("wait", seconds=600).returncode == 0, farm.json("jobs", "--status", "Failed")
    assert_equal_to_plain(farm, plain, roots)
    by_worker = farm.rows("select worker, count(*) from dispatched_job group by worker")
    assert {worker for worker, _ in by_worker} == {"w1", "w2"}
