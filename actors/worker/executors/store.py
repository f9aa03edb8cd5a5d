"""A directory that stands for the Nix store, used by one worker or shared by several.

An output is valid once its registration, a small file written last, exists; until then
whatever stands at its path is a leftover. While a worker builds an output it holds a lock
file, and so do its builders: the system lets go of it when all of them are dead, since the
builders of a worker that was killed go on and write.

    <store>/<name>                      files of a store path
    <store>/.headrace/valid/<name>      registration: {"nar_size": bytes}
    <store>/.headrace/locks/<name>      flock, held during the build
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

_NAME = re.compile(r"[0-9A-Za-z+\-._?=~@]{1,255}")


class BadStorePath(ValueError):
    """A path that is no direct entry of the store; the text is one line."""


class DirectoryStore:
    """Store paths `<prefix>/<name>` relocated to `<directory>/<name>`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._valid = directory / ".headrace" / "valid"
        self._locks = directory / ".headrace" / "locks"

    def open(self) -> None:
        """Makes the directories. Raises `OSError`."""
        for directory in (self._valid, self._locks):
            directory.mkdir(parents=True, exist_ok=True)

    def entry(self, path: str) -> Path:
        """Where a store path lives here. Raises `BadStorePath`."""
        return self.directory / _name(path)

    def is_valid(self, path: str) -> bool:
        """Whether the store path was built here, whole. Raises `OSError`, not for bad paths."""
        try:
            name = _name(path)
        except BadStorePath:
            return False
        return _exists(self._valid / name) and _exists(self.directory / name)

    def nar_size(self, path: str) -> int | None:
        """Bytes of a valid path's files, as registered."""
        try:
            size = json.loads((self._valid / _name(path)).read_bytes())["nar_size"]
        except (OSError, ValueError, LookupError, TypeError):
            return None
        return size if isinstance(size, int) and size >= 0 else None

    def discard(self, path: str) -> None:
        """Removes what stands at a path, its registration first."""
        (self._valid / _name(path)).unlink(missing_ok=True)
        remove_tree(self.entry(path))

    def register(self, path: str) -> int:
        """Makes an output valid, if it stands there; returns the bytes of its files.

        Raises `FileNotFoundError` when it does not.
        """
        size = tree_bytes(self.entry(path))
        # The temporary name starts with a dot and is no file of a registration.
        handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self._valid)
        try:
            os.write(handle, json.dumps({"nar_size": size}).encode())
        finally:
            os.close(handle)
        Path(temporary).replace(self._valid / _name(path))
        return size

    def try_lock(self, paths: Iterable[str]) -> StoreLock | None:
        """Locks these paths for building; none when another build holds one of them."""
        lock = StoreLock()
        for name in sorted(map(_name, paths)):
            if not lock.add(self._locks / name):
                lock.release()
                return None
        return lock


class StoreLock:
    """Locked paths of the store, until `release`."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Path]] = []

    @property
    def handles(self) -> list[int]:
        """Whoever inherits these holds the lock too, until its end or `release`."""
        return [handle for handle, _ in self._held]

    def add(self, file: Path) -> bool:
        while True:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
                return False
            # Who released it has deleted the file: a lock on that one excludes nobody.
            if os.fstat(handle).st_nlink > 0:
                self._held.append((handle, file))
                return True
            os.close(handle)

    def release(self) -> None:
        while self._held:
            handle, file = self._held.pop()
            file.unlink(missing_ok=True)
            os.close(handle)


class Relocation:
    """Replaces the store prefix of a job's paths by the directory in any text."""

    def __init__(self, drv_path: str, directory: Path) -> None:
        self.prefix = drv_path.rpartition("/")[0] or "/nix/store"
        self._directory = str(directory)

    def __call__(self, text: str) -> str:
        return text.replace(self.prefix, self._directory)

    def check(self, path: str) -> None:
        """Raises `BadStorePath` for a path outside of the prefix."""
        if path.rpartition("/")[0] != self.prefix:
            raise BadStorePath(f"{path!r} is not in the store {self.prefix}")
        _name(path)


def tree_bytes(path: Path) -> int:
    """Bytes of all files below `path`; a link counts its target's name."""
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return status.st_size
    return sum(entry.stat(follow_symlinks=False).st_size for entry in _files(path))


def tree_disk_bytes(path: Path) -> int:
    """Bytes that all below `path` takes on the disk; 0 if nothing is there."""
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return status.st_blocks * 512
        return sum(entry.stat(follow_symlinks=False).st_blocks for entry in _files(path)) * 512
    except OSError:
        return 0


def _files(directory: Path) -> Iterator[os.DirEntry[str]]:
    pending = [os.fspath(directory)]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                else:
                    yield entry


def remove_tree(path: Path) -> None:
    """Removes a file or a tree, directories without write permission included."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except PermissionError:
        for directory, _, _ in os.walk(path):
            Path(directory).chmod(0o700)
        shutil.rmtree(path)


def _name(path: str) -> str:
    name = path.rpartition("/")[2]
    if _NAME.fullmatch(name) is None or name.startswith("."):
        raise BadStorePath(f"{path!r} is not a path of the store")
    return name


def _exists(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
