"""Cancels the job of a hook that was killed.

When Nix is interrupted it ends its hooks with SIGKILL, which nobody can catch. So a process in a
session of its own waits for the end of a pipe that the hook holds, and cancels the job for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

MAX_SAID = 4096


class Guard:
    """The hook's end of the pipe."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        """Starts the guard, which calls `cancel` with the id of a job that lost its hook.

        Before any thread is started: the process forks.
        """
        told, self._pipe = os.pipe()
        has_left, leaving = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                _leave(keep=told)
                said = _all_of(told)
                if said.endswith(b"\n") and said.count(b"\n") == 1:
                    cancel(said.decode().strip())
                status = 0
            finally:
                os._exit(status)
        os.close(told)
        os.close(leaving)
        # Ends when the guard has closed its end, out of the reach of what ends us.
        os.read(has_left, 1)
        os.close(has_left)

    def watch(self, job_id: str) -> None:
        """From now on the job is cancelled when this process is no more."""
        os.write(self._pipe, f"{job_id}\n".encode())

    def release(self) -> None:
        """The job has ended; nothing is to be done any more."""
        os.write(self._pipe, b"\n")


def _leave(keep: int) -> None:
    """Out of the process group that Nix kills, without the files whose end Nix waits for."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))


def _all_of(pipe: int) -> bytes:
    said = b""
    while (more := os.read(pipe, MAX_SAID)) and len(said) < MAX_SAID:
        said += more
    return said
