"""A farm of real processes: a server, workers and commands as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HEADRACE = [sys.executable, "-m", "bin"]
SYSTEMS = "x86_64-linux,i686-linux,aarch64-linux,x86_64-darwin"
FEATURES = "kvm,big-parallel,nixos-test,benchmark"
START_SECS = 30


def until(check: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    """Polls until `check` gives something true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.05)
    return value


def build(name: str, script: str = "echo built > $out", *needs: str, **more: Any) -> dict[str, Any]:
    """A job of headrace's own file format that runs `script`."""
    return {
        "drv_path": drv(name), "name": name, "system": "x86_64-linux", "required_features": [],
        "outputs": {"out": drv(name).removesuffix(".drv")},
        "input_drvs": [drv(n) for n in needs], "input_srcs": [],
        "builder": "/bin/sh", "args": ["-c", script], "env": {"PATH": os.environ["PATH"]}, **more,
    }  # fmt: skip


def drv(name: str) -> str:
    return f"/nix/store/{name.encode().hex()[:32]:0>32}-{name}.drv"


class FarmOfProcesses:
    """Processes on one state directory; everything is gone when the test is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self.endpoint = ""

    def server(self, *options: str, listen: str | None = None) -> subprocess.Popen[bytes]:
        """Starts a server, at the address of the last one unless told otherwise.

        Its policy does not look at how busy the machine is: the tests themselves keep it so.
        """
        ready = self.folder / f"ready-{len(self.processes)}.json"
        process = self._start(
            "server", "--state-dir", str(self.folder / "state"), "--ready-file", str(ready),
            "--listen", listen or self.endpoint or "tcp://127.0.0.1:0", "--policy", "simple",
            *options,
        )  # fmt: skip
        until(lambda: ready.exists() or process.poll() is not None, "server starts", START_SECS)
        assert process.poll() is None, self.log(process)
        self.endpoint = json.loads(ready.read_text())["endpoint"]
        return process

    def worker(self, name: str, *options: str, slots: int = 2) -> subprocess.Popen[bytes]:
        """Starts a worker for four systems; its id is its name."""
        return self._start(
            "worker", "--id", name, "--state-dir", str(self.folder / name), "--executor", "process",
            "--store", str(self.folder / "store"), "--build-max-concurrent", str(slots),
            "--systems", SYSTEMS, "--features", FEATURES, "--cpu-core-score", "1", *options,
        )  # fmt: skip

    def nix_worker(self, name: str, *options: str, slots: int = 2) -> subprocess.Popen[bytes]:
        """Starts a worker of the real Nix with a chroot store of its own, named as it is."""
        return self._start(
            "worker", "--id", name, "--state-dir", str(self.folder / f"state-{name}"),
            "--store", str(self.folder / name), "--build-max-concurrent", str(slots),
            "--cpu-core-score", "1", *options,
        )  # fmt: skip

    def run(self, *args: str, stdin: str | None = None, seconds: float = 120):
        """A command, to its end."""
        return subprocess.run(
            [*HEADRACE, *args], input=stdin, capture_output=True, text=True, timeout=seconds,
            env=self._environment(), check=False,
        )  # fmt: skip

    def json(self, *args: str, stdin: str | None = None) -> Any:
        done = self.run(*args, "--json", stdin=stdin)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def submit(self, *jobs: dict[str, Any], **more: Any) -> dict[str, Any]:
        return self.json("submit", "-", stdin=json.dumps({"jobs": jobs, **more}))

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The lines of `headrace jobs` by name."""
        return {job["name"]: job for job in self.json("jobs")}

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What the ledger holds."""
        with sqlite3.connect(self.folder / "state" / "ledger.sqlite3") as db:
            rows = db.execute(sql).fetchall()
        db.close()
        return rows

    def log(self, process: subprocess.Popen[bytes]) -> str:
        return (self.folder / f"process-{self.processes.index(process)}.log").read_text()

    def close(self) -> None:
        """Ends everything; a builder that outlives its worker is a failure."""
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                pytest.fail(f"had to be killed: {self.log(process)}")

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"process-{len(self.processes)}.log").open("wb") as log:
            process = subprocess.Popen(
                [*HEADRACE, *args], stdout=log, stderr=log, env=self._environment()
            )
        self.processes.append(process)
        return process

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "HEADRACE_SERVER": self.endpoint} if self.endpoint else {**os.environ}


@pytest.fixture
def farm(tmp_path: Path) -> Iterator[FarmOfProcesses]:
    farm = FarmOfProcesses(tmp_path)
    try:
        yield farm
    finally:
        farm.close()
    left = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if _is_of(p, tmp_path)]
    assert not left


def _is_of(process: psutil.Process, folder: Path) -> bool:
    return any(str(folder) in part for part in process.info["cmdline"] or ())
