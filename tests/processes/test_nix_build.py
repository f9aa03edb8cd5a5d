"""`headrace build` and the build hook, with the real Nix: two workers with stores of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nix.real import ChrootStore, environment, needs_nix
from tests.processes.conftest import until

pytestmark = needs_nix

PROJECT = """
let
  drv = name: script: deps: derivation {
    inherit name deps;
    system = builtins.currentSystem;
    builder = "/bin/sh";
    text = ./text;
    args = [ "-c" script ];
  };
in rec {
  lib = drv "lib" "echo making lib; read x < $text; echo lib $x > $out" [ ];
  programs = {
    one = drv "one" "read x < ${lib}; echo one $x > $out" [ lib ];
    two = drv "two" "read x < ${lib}; echo two $x > $out" [ lib ];
    broken = throw "nobody makes this";
    notes = "no derivation";
  };
  all = drv "all" "read a < ${programs.one}; read b < ${programs.two}; echo $a $b > $out" [ ];
  fails = drv "fails" "echo last words; exit 7" [ ];
  slow = drv "slow" "echo slowly; while :; do :; done" [ ];
  patient = drv "patient" "echo waiting; sleep 3; echo done > $out" [ ];
  pair = derivation {
    name = "pair"; system = builtins.currentSystem; builder = "/bin/sh"; outputs = [ "out" "dev" ];
    args = [ "-c" "echo dev > $dev; echo out refers to $dev > $out" ];
  };
  far = derivation {
    name = "far"; system = "riscv64-linux"; builder = "/bin/sh"; args = [ "-c" "echo > $out" ];
  };
}
"""


@pytest.fixture
def nix_farm(request, farm, tmp_path, monkeypatch):
    """A server and two workers; they share nothing but a cache. Parameter: the key they sign with,
    by its name."""
    env = environment(tmp_path)
    monkeypatch.setenv("HOME", env["HOME"])
    monkeypatch.setenv("NIX_CONFIG", env["NIX_CONFIG"])
    project = tmp_path / "project"
    project.mkdir()
    (project / "default.nix").write_text(PROJECT)
    (project / "text").write_text("hello\n")
    farm.server()
    farm.cache = f"file://{tmp_path}/cache"
    key = getattr(request, "param", None)
    signing = ("--cache-key", make_key(tmp_path, key)) if key else ()
    for name in ("w1", "w2"):
        farm._start(
            "worker", "--id", name, "--state-dir", str(tmp_path / name), "--executor", "nix",
            "--store", str(tmp_path / f"store-{name}"), "--cache", farm.cache,
            "--cpu-core-score", "1", *signing,
        )  # fmt: skip
    farm.project = str(project)
    farm.plain = ChrootStore(tmp_path / "plain", env)
    return farm


def make_key(folder: Path, name: str) -> str:
    """A secret key of this name; the same when asked again."""
    secret = folder / f"{name}.secret"
    if not secret.exists():
        subprocess.run(
            ["nix-store", "--generate-binary-cache-key", name, secret, f"{secret}.public"],
            check=True,
        )
    return str(secret)


def plain(farm, attribute: str) -> tuple[str, str]:
    """Path and content as plain Nix builds it."""
    done = farm.plain.run("nix-build", farm.project, "-A", attribute, "--no-out-link")
    path = done.stdout.strip()
    return path, farm.plain.read(path)


def test_a_project_is_built_as_plain_nix_builds_it(nix_farm, tmp_path):
    link = str(tmp_path / "result")
    built = nix_farm.run(
        "build", nix_farm.project, "-A", "all", "--out-link", link, "--cache", nix_farm.cache
    )
    assert built.returncode == 0, built.stderr
    path, content = plain(nix_farm, "all")
    assert content == "one lib hello two lib hello\n"
    assert built.stdout == f"{path}\n"
    assert Path(link).read_text() == content
    ran = nix_farm.rows("select count(*) from dispatched_job where outcome = 'Completed'")
    assert ran == [(5,)]  # the evaluation and four builds, once each


def test_errors_of_one_attribute_leave_the_others_alone(nix_farm):
    built = nix_farm.run("build", nix_farm.project, "-A", "programs.*", "--json")
    assert built.returncode == 1
    result = json.loads(built.stdout)
    assert result["errors"] == ["programs.broken: nobody makes this"]
    assert {t["attribute"]: t["status"] for t in result["targets"]} == {
        "programs.one": "Completed", "programs.two": "Completed",
    }  # fmt: skip
    assert result["builds"] == {"Completed": 3}


def test_a_failing_build_shows_its_last_words(nix_farm):
    built = nix_farm.run("build", nix_farm.project, "-A", "fails")
    assert built.returncode == 1
    assert built.stdout == ""
    assert "failed with exit code 7" in built.stderr
    assert "  last words\n" in built.stderr


def test_what_is_not_there_is_said(nix_farm, tmp_path):
    assert nix_farm.run("build", str(tmp_path / "none")).returncode == 2
    missing = nix_farm.run("build", nix_farm.project, "-A", "nosuch")
    assert missing.returncode == 1
    assert "attribute 'nosuch' in selection path 'nosuch' not found" in missing.stderr


def test_a_known_graph_is_not_reported_twice(nix_farm):
    first = nix_farm.run("build", nix_farm.project, "-A", "all")
    again = nix_farm.run("build", nix_farm.project, "-A", "all")
    assert (again.returncode, again.stdout) == (0, first.stdout)
    builds = (
        "select count(*) from dispatched_job d join job j on j.id = d.job where j.kind = 'build'"
    )
    assert nix_farm.rows(builds) == [(4,)]


# -- the hook -------------------------------------------------------------------------------------


def started_nix_build(farm, attribute: str, *options: str) -> subprocess.Popen[str]:
    """Plain `nix-build` on a developer's machine, with nothing but the hook set."""
    hook = Path(sys.executable).with_name("headrace-hook")
    env = {
        **os.environ, "HEADRACE_SERVER": farm.endpoint, "HEADRACE_CACHE": farm.cache,
        "TMPDIR": str(farm.folder),
    }  # fmt: skip
    return subprocess.Popen(
        ["nix-build", farm.project, "-A", attribute, "--no-out-link", "--store",
         str(farm.folder / "developer"), "--option", "build-hook", str(hook), *options],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def nix_build(farm, attribute: str, *options: str) -> subprocess.CompletedProcess[str]:
    process = started_nix_build(farm, attribute, *options)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def until_said(process: subprocess.Popen[str], words: str) -> str:
    """What a program wrote to its standard error up to a line with these words."""
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    pytest.fail(f"it ended without {words!r}: {said}")


def builds(farm) -> dict[str, str]:
    return {job["name"]: job["status"] for job in farm.json("jobs")}


def test_the_hook_stands_behind_an_unchanged_nix_build(nix_farm):
    until_workers(nix_farm)
    built = nix_build(nix_farm, "all")
    assert built.returncode == 0, built.stderr
    path, content = plain(nix_farm, "all")
    assert built.stdout == f"{path}\n"
    assert ChrootStore(nix_farm.folder / "developer", os.environ).read(path) == content
    assert "making lib" in built.stderr  # the builder's own words
    assert built.stderr.count("on 'headrace'...") == 4
    assert builds(nix_farm) == dict.fromkeys(("lib", "one", "two", "all"), "Completed")


@pytest.mark.parametrize(
    ("attribute", "options", "code", "status", "why"),
    [
        ("fails", (), 100, "Failed", "exit code 7"),
        ("slow", ("--timeout", "2"), 101, "TimedOut", "timed out"),
    ],
)
def test_failures_and_timeouts_reach_nix(nix_farm, attribute, options, code, status, why):
    until_workers(nix_farm)
    built = nix_build(nix_farm, attribute, *options)
    assert built.returncode == code, built.stderr
    [told] = [line for line in built.stderr.splitlines() if line.startswith("headrace: ")]
    assert why in told
    assert builds(nix_farm) == {attribute: status}


def test_the_log_is_shown_live_and_a_restart_of_the_farm_is_outlived(nix_farm):
    until_workers(nix_farm)
    with started_nix_build(nix_farm, "patient") as building:
        until_said(building, "waiting")
        assert builds(nix_farm) == {"patient": "Building"}
        nix_farm.processes[0].kill()
        nix_farm.processes[0].wait()
        until_said(building, "the server is gone")
        nix_farm.server()
        out, err = building.communicate(timeout=120)
    assert building.returncode == 0, err
    store = ChrootStore(nix_farm.folder / "developer", os.environ)
    assert store.read(out.strip()) == "done\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_nobody_waits_for_any_more_is_cancelled(nix_farm, number):
    until_workers(nix_farm)
    with started_nix_build(nix_farm, "slow") as building:
        until_said(building, "slowly")
        building.send_signal(number)
        building.communicate(timeout=60)
    assert building.returncode != 0
    until(lambda: builds(nix_farm) == {"slow": "Aborted"}, "the job is cancelled")


def test_what_the_farm_cannot_build_is_left_to_nix(nix_farm):
    until_workers(nix_farm)
    built = nix_build(nix_farm, "far", "--option", "system", "riscv64-linux")
    assert built.returncode == 0, built.stderr
    assert builds(nix_farm) == {}


def test_without_a_farm_nix_builds_itself(nix_farm):
    nix_farm.processes[0].terminate()
    nix_farm.processes[0].wait()
    built = nix_build(nix_farm, "lib")
    assert built.returncode == 0, built.stderr
    assert "cannot reach a server" in built.stderr
    assert "on 'headrace'" not in built.stderr


@pytest.mark.parametrize(
    ("nix_farm", "trusted", "code"),
    [("farm-1", "farm-1", 0), ("farm-1", "other-1", 1), (None, "farm-1", 1)],
    indirect=["nix_farm"],
)
def test_outputs_are_imported_only_if_they_are_signed(nix_farm, monkeypatch, trusted, code):
    until_workers(nix_farm)
    monkeypatch.setenv("HEADRACE_CACHE_KEY", make_key(nix_farm.folder, trusted))
    built = nix_build(nix_farm, "pair")
    assert built.returncode == code, built.stderr
    assert builds(nix_farm) == {"pair": "Completed"}
    store = ChrootStore(nix_farm.folder / "developer", os.environ)
    drv = nix_farm.plain.run("nix-instantiate", nix_farm.project, "-A", "pair").stdout.strip()
    outputs = [output.path for output in nix_farm.plain.derivation(drv).outputs.values()]
    assert [store.is_valid(path) for path in outputs] == [code == 0, code == 0]
    if code:
        assert "cannot import the outputs: " in built.stderr
        assert "is untrusted" in built.stderr
    else:
        assert store.read(built.stdout.strip()).startswith("out refers to /nix/store/")


def test_machines_are_lines_of_nix(nix_farm):
    until_workers(nix_farm)
    lines = nix_farm.run("machines", "--user", "nix", "--ssh-key", "/k").stdout.splitlines()
    assert [line.split()[0] for line in sorted(lines)] == ["ssh-ng://nix@w1", "ssh-ng://nix@w2"]
    assert all(len(line.split()) == 8 for line in lines)


def until_workers(farm) -> None:
    deadline = time.monotonic() + 30
    while len(farm.json("status")["workers"]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
