"""Which servers of a ledger live: each holds a lock on a file of its own while it does.

The kernel drops the lock with the process, so a free lock means dead, at once and for sure.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class ServerLocks:
    """`<state-dir>/servers/<id>.lock`, ours held until `release`."""

    def __init__(self, folder: Path, server: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"{server}.lock"
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def others(self) -> tuple[frozenset[str], frozenset[str]]:
        """(alive, dead) among the other servers that left a lock file."""
        alive: set[str] = set()
        dead: set[str] = set()
        for path in self._folder.glob("*.lock"):
            if path != self._path:
                (dead if _is_free(path) else alive).add(path.stem)
        return frozenset(alive), frozenset(dead)

    def forget(self, dead: frozenset[str]) -> None:
        """Removes the files of servers whose remains were dealt with."""
        for server in dead:
            (self._folder / f"{server}.lock").unlink(missing_ok=True)

    def release(self) -> None:
        """This server ends in order and leaves nothing behind that waits for it."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


def _is_free(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
