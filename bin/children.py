"""Child processes that run `headrace` commands, and end with all that they started.

Each child leads a process group of its own, so that Ctrl-C reaches only us and everyone is
stopped once and in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import trio

from bin.errors import FAILED, CommandError

STOP_SECS = 8.0
"""For a child to end by itself after SIGTERM; a worker needs up to 5."""
_ROOT = Path(__file__).resolve().parent.parent
_LOG_TAIL_BYTES = 2_000


class Child:
    """One `headrace` command that runs for long."""

    def __init__(self, name: str, process: trio.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._stopping = False

    async def watch(self) -> None:
        """Waits for the end; raises `CommandError` unless `stop` caused it."""
        await self._process.wait()
        if not self._stopping:
            raise CommandError(self.obituary(), FAILED)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, unless it has ended."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def obituary(self) -> str:
        """How it ended, and the last that it said."""
        return f"{self.name} ended with exit code {self._process.returncode}: {self._last_line()}"

    async def stop(self, limit_secs: float = STOP_SECS) -> int:
        """Ends it by SIGTERM, or by force with its descendants when that takes too long; returns
        its exit code."""
        self._stopping = True
        descendants = self._descendants()
        if self._process.poll() is None:
            self._process.terminate()
        with trio.move_on_after(limit_secs):
            await self._process.wait()
        for process in [*descendants, *self._descendants()]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process.poll() is None:
            self._process.kill()
        return await self._process.wait()

    def _descendants(self) -> list[psutil.Process]:
        try:
            found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return found

    def _last_line(self) -> str:
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


async def start(name: str, arguments: Sequence[str], log: Path) -> Child:
    """Starts `headrace ARGUMENTS`, its output at the end of `log`; the caller must `stop` it."""
    with log.open("ab") as output:
        process = await trio.lowlevel.open_process(
            # -P: a folder named `bin` where we were started must not stand in for ours.
            [sys.executable, "-P", "-m", "bin", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=_environment(),
            start_new_session=True,
        )
    return Child(name, process, log)


def kill_within(directory: Path) -> None:
    """Kills what still works in `directory`: the builds of a worker that was killed have no
    parent any more that would."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if Path(process.cwd()).is_relative_to(directory):
                process.kill()


def _environment() -> dict[str, str]:
    """Ours without the settings of headrace itself, and with the way to this very program."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HEADRACE_", "GRADIENT_WORKER_"))
    }
    if str(_ROOT) != sysconfig.get_path("purelib"):
        paths = [str(_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment
