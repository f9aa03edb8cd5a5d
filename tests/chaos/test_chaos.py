"""`headrace chaos`, whole: a short run with a fixed seed, and one that is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bin.chaos.faults import KINDS

pytestmark = pytest.mark.processes

SECONDS = 24
LIMIT_SECS = 280


@pytest.fixture
def chaos(tmp_path):
    """Starts `headrace chaos ARGS` with its files in `tmp_path`."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("HEADRACE_")}
    running: list[subprocess.Popen[str]] = []

    def run(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "bin", "chaos", *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=LIMIT_SECS)


def left_behind(home: Path) -> list[str]:
    """Files, mounts and processes."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if str(home) in line]
    processes = [
        " ".join(p.info["cmdline"] or ())
        for p in psutil.process_iter(["cmdline"])
        if any(str(home) in word for word in p.info["cmdline"] or ())
    ]
    return [*map(str, home.iterdir()), *mounts, *processes]


def test_nothing_is_lost_and_nothing_left(chaos, tmp_path):
    process = chaos("--seconds", str(SECONDS), "--seed", "1", "--json")
    out, err = process.communicate(timeout=LIMIT_SECS)
    report = json.loads(out)
    assert report["violations"] == [], err
    assert process.returncode == 0
    assert (report["lost"], report["double"]) == (0, 0)
    assert set(report["faults"]) <= set(KINDS)
    assert sum(report["faults"].values()) >= 12
    assert report["jobs"]["Completed"] >= 20
    assert report["restarts"]["server"] >= 1
    assert report["directory"] is None
    assert left_behind(tmp_path) == []


def test_one_that_is_stopped_leaves_nothing(chaos, tmp_path):
    process = chaos("--seconds", "60", "--seed", "2")
    for line in process.stderr:
        if "builds submitted" in line:
            break
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == 130, err
    assert out == ""
    assert err.splitlines()[-1] == "headrace: stopped"
    assert left_behind(tmp_path) == []


def test_a_directory_that_is_given_is_new_and_kept(chaos, tmp_path):
    home = tmp_path / "given"
    home.mkdir()
    (home / "mine").touch()
    refused = chaos("--state-dir", str(home))
    _, err = refused.communicate(timeout=LIMIT_SECS)
    assert refused.returncode == 2
    assert f"--state-dir {home} is not empty" in err
    (home / "mine").unlink()
    process = chaos(
        "--state-dir",
        str(home),
        "--seconds",
        "3",
        "--workers",
        "1",
        "--jobs",
        "5",
        "--seed",
        "21370",
    )
    out, err = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == 0, out + err
    assert out.splitlines()[-1] == f"kept in: {home}"
    assert (home / "server" / "ledger.sqlite3").exists()
    assert (home / "w1.log").exists()
    assert str(home) not in Path("/proc/mounts").read_text()
