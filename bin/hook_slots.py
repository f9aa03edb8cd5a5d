"""How many builds this machine has on the farm through the hook.

Nix starts a process of the hook for each build that is accepted, some 20 MiB each, and starts as
many as are accepted. So each holds the lock of one of a number of files, and the kernel lets go of
it whatever ends the process.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path


class NoSlots(Exception):
    """The directory of the locks cannot be used; the text says why."""


class Slots:
    """The slots of this user in a directory of the machine."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), f"headrace-hook-{os.getuid()}")

    def take(self, limit: int) -> bool:
        """Holds one of the first `limit` slots until the process ends; false if all are taken.

        Raises `NoSlots`.
        """
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            # Others can make names in the directory for temporary files, links among them.
            about = self._folder.lstat()
            if about.st_uid != os.getuid() or self._folder.is_symlink():
                raise NoSlots(f"{self._folder} belongs to somebody else; remove it")
            return any(self._try(number) for number in range(limit))
        except OSError as error:
            raise NoSlots(f"{self._folder}: {error.strerror}") from None

    def _try(self, number: int) -> bool:
        file = os.open(self._folder / str(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        return True  # the file stays open, and with it the lock
