"""A disk that can be full: a small tmpfs of its own, or a limit on what its user may write."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import psutil

_MIB = 2**20
_FILLER = ".filler"
_CHUNK_BYTES = (_MIB, 4096)


class Disk(Protocol):
    """All methods block."""

    def fill(self) -> None:
        """Leaves no room; called again and again while the disk is to stay full."""

    def free(self) -> None:
        """Gives the room back."""

    def close(self, *, keep: bool) -> None:
        """Gives the disk up; with `keep` its files stay in the directory."""


class Tmpfs:
    """A file system of its own at `directory`; use `mounted`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @classmethod
    def mounted(cls, directory: Path, size_mib: int) -> Self | None:
        """None where that may not be done: only root may, and not everywhere."""
        options = f"size={size_mib}m,mode=0700"
        try:
            _run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory))
        except OSError:
            return None
        return cls(directory)

    def fill(self) -> None:
        with (self._directory / _FILLER).open("ab", buffering=0) as filler:
            for size in _CHUNK_BYTES:
                chunk = b"\xff" * size
                try:
                    while True:
                        filler.write(chunk)
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        (self._directory / _FILLER).unlink(missing_ok=True)

    def close(self, *, keep: bool) -> None:
        self.free()
        copy = self._directory.with_name(f"{self._directory.name}.kept")
        if keep:
            shutil.copytree(self._directory, copy, symlinks=True, copy_function=_copy)
        _run("umount", str(self._directory))
        if keep:
            self._directory.rmdir()
            copy.rename(self._directory)


class FileSizeLimit:
    """For who may not mount: while the disk is full, the process may not write to files at all.

    The errors differ (EFBIG for ENOSPC), what the process must do is the same.
    """

    def __init__(self, pid: Callable[[], int | None]) -> None:
        self._pid = pid

    def fill(self) -> None:
        self._limit(0)

    def free(self) -> None:
        self._limit(None)

    def close(self, *, keep: bool) -> None:
        """There is nothing to give up."""

    def _limit(self, size: int | None) -> None:
        pid = self._pid()
        if pid is None:
            return
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (hard if size is None else size, hard))


def _run(*command: str) -> None:
    """Raises `OSError` for any failure."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode:
        raise OSError(errno.EPERM, done.stderr.strip() or f"{command[0]} failed")


def _copy(source: str, target: str) -> None:
    # Sockets and what vanishes meanwhile are not worth keeping.
    with suppress(OSError):
        shutil.copy2(source, target)
