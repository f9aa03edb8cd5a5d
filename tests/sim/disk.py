"""A disk that forgets what was not synced: SQLite on a VFS of ours, through apsw.

The files are real, and what a process sees of them. Beside each the disk keeps what has been made
durable and every write since. When the power is lost, each sector of 512 bytes becomes one of the
versions that it has had since the last sync (so writes are lost, torn and reordered), a size one
of the sizes, and of the names created and deleted since the directory's last sync a prefix holds,
as on a file system that journals them. What was synced stays.

The ledger's own code runs on it: its statements through `Files.connect`, the syncs of its log
through `Files.sync_data`.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import apsw

from actors.ledger.connection import OPEN_TIMEOUT_S, Files

SECTOR = 512
_names = itertools.count()


class Inode:
    """One file, whatever its name: what is durable, and what was done since."""

    def __init__(self) -> None:
        self.durable = bytearray()
        self.since: list[tuple[int, bytes | None]] = []
        """(offset, data), or (size, None) for a truncation."""
        self.syncs_folder = False
        """SQLite syncs the directory with the first sync of a new log or journal."""

    def sync(self) -> None:
        for at, data in self.since:
            _perform(self.durable, at, data)
        self.since.clear()

    def after_power_loss(self, random: Random) -> bytes:
        """What the disk holds now; all, nothing or anything in between of what was not synced."""
        survivors = random.choice(("none", "all", "some", "some"))
        if survivors == "none":
            return bytes(self.durable)
        done = self.since if survivors == "all" else self._up_to_a_truncation(random)
        image = bytearray(self.durable)
        versions: dict[int, list[bytes]] = {}
        sizes = [len(image)]
        for at, data in done:
            if data is None:
                _perform(image, at, None)
                sizes = [at]
                versions = {sector: v for sector, v in versions.items() if sector * SECTOR < at}
                continue
            touched = range(at // SECTOR, -(-(at + len(data)) // SECTOR))
            for sector in touched:
                versions.setdefault(sector, [_sector(image, sector)])
            _perform(image, at, data)
            sizes.append(len(image))
            for sector in touched:
                versions[sector].append(_sector(image, sector))
        if survivors == "all":
            return bytes(image)
        image.extend(bytes(-len(image) % SECTOR))
        for sector, seen in versions.items():
            image[sector * SECTOR : (sector + 1) * SECTOR] = random.choice(seen)
        return bytes(image[: random.choice(sizes)])

    def _up_to_a_truncation(self, random: Random) -> list[tuple[int, bytes | None]]:
        """A truncation happens whole or not at all, and so do those before it; what is written
        after one that did not happen went to blocks that nobody knows of."""
        cuts = [i for i, (_, data) in enumerate(self.since) if data is None]
        return self.since[: random.choice([*cuts, len(self.since)])]


def _sector(image: bytearray, sector: int) -> bytes:
    return bytes(image[sector * SECTOR : (sector + 1) * SECTOR]).ljust(SECTOR, b"\0")


def _perform(image: bytearray, at: int, data: bytes | None) -> None:
    if data is None:
        del image[at:]
        return
    if at > len(image):
        image.extend(bytes(at - len(image)))
    image[at : at + len(data)] = data


class Disk(Files):
    """The directory of a ledger; `close` when it is not needed any more."""

    def __init__(self) -> None:
        self.inodes: dict[str, Inode] = {}
        """By path, as processes see it."""
        self._durable_names: dict[str, Inode] = {}
        self._since: list[tuple[str, Inode | None]] = []
        self._is_frozen = False
        self._operations_left = -1
        self._vfs = _Vfs(f"headrace-disk-{next(_names)}", self)

    # -- what the ledger calls ---------------------------------------------------------------------

    def connect(self, uri: str) -> Any:
        return _Connection(uri, self._vfs.name)

    def sync_data(self, descriptor: int) -> None:
        self.sync(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    def sync_folder(self, descriptor: int) -> None:
        self._sync_names()

    # -- what the VFS calls ------------------------------------------------------------------------

    def _takes_it(self) -> bool:
        if self._operations_left == 0:
            self._is_frozen = True
        self._operations_left -= 1
        return not self._is_frozen

    def opened(self, path: str, *, is_log: bool) -> None:
        if path not in self.inodes and self._takes_it():
            inode = self.inodes[path] = Inode()
            inode.syncs_folder = is_log
            self._since.append((path, inode))

    def wrote(self, path: str, at: int, data: bytes | None) -> None:
        if self._takes_it():
            self.inodes[path].since.append((at, data))

    def deleted(self, path: str, *, is_synced: bool) -> None:
        if self._takes_it():
            self.inodes.pop(path, None)
            self._since.append((path, None))
            if is_synced:
                self._sync_names()

    def sync(self, path: str) -> None:
        inode = self.inodes.get(path)
        if inode is None or not self._takes_it():
            return
        inode.sync()
        if inode.syncs_folder:
            inode.syncs_folder = False
            self._sync_names()

    def _sync_names(self) -> None:
        if self._is_frozen:
            return
        for path, inode in self._since:
            _name(self._durable_names, path, inode)
        self._since.clear()

    # -- what a simulation calls -------------------------------------------------------------------

    def stop_after(self, operations: int) -> None:
        """From the operation after these on nothing reaches the disk: the power is about to be
        lost, and the process does not know."""
        self._operations_left = operations

    def end_process(self, close: Callable[[], None]) -> None:
        """kill -9: `close` gives back what the process held, and changes nothing."""
        seen = {path: Path(path).read_bytes() for path in self.inodes}
        self._is_frozen = True
        close()
        self._is_frozen = False
        self._restore(seen)

    def lose_power(self, close: Callable[[], None], random: Random) -> None:
        """As `end_process`, and what was not synced is lost, torn or reordered."""
        self._is_frozen = True
        close()
        self._is_frozen = False
        self._operations_left = -1
        for path, inode in self._since[: random.randint(0, len(self._since))]:
            _name(self._durable_names, path, inode)
        self._since.clear()
        self.inodes = dict(self._durable_names)
        images = {path: inode.after_power_loss(random) for path, inode in self.inodes.items()}
        for path, inode in self.inodes.items():
            inode.durable, inode.since, inode.syncs_folder = bytearray(images[path]), [], False
        self._restore(images)

    def _restore(self, images: dict[str, bytes]) -> None:
        folders = {Path(path).parent for path in images}
        for folder in folders:
            for path in folder.glob("*.sqlite3*"):
                path.unlink()  # the index of the log (-shm) too: memory, and gone with it
        for path, image in images.items():
            Path(path).write_bytes(image)

    def close(self) -> None:
        self._vfs.unregister()


def _name(names: dict[str, Inode], path: str, inode: Inode | None) -> None:
    if inode is None:
        names.pop(path, None)
    else:
        names[path] = inode


# -- SQLite's side -----------------------------------------------------------------------------


class _Vfs(apsw.VFS):
    def __init__(self, name: str, disk: Disk) -> None:
        super().__init__(name, "unix")
        self.name = name
        self._disk = disk

    def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:  # noqa: N802 - apsw's name
        if name is None:  # what spills out of memory; nobody looks for it after a crash
            return apsw.VFSFile("unix", name, flags)
        return _File(name, flags, self._disk)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._disk.deleted(filename, is_synced=syncdir)


class _File(apsw.VFSFile):
    def __init__(self, name: Any, flags: list[int], disk: Disk) -> None:
        self._disk = disk
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        is_log = flags[0] & (apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL)
        super().__init__("unix", name, flags)
        disk.opened(self._path, is_log=bool(is_log))

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        super().xWrite(data, offset)
        self._disk.wrote(self._path, offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        self._disk.wrote(self._path, newsize, None)

    def xSync(self, flags: int) -> None:  # noqa: N802
        self._disk.sync(self._path)


class _Result:
    """What the ledger uses of a `sqlite3.Cursor`."""

    def __init__(self, rows: list[Any], db: apsw.Connection) -> None:
        self._rows = iter(rows)
        self.rowcount = db.changes()
        self.lastrowid = db.last_insert_rowid()

    def __iter__(self) -> Any:
        return self._rows

    def fetchone(self) -> Any:
        return next(self._rows, None)

    def fetchall(self) -> list[Any]:
        return list(self._rows)


class _Connection:
    """What the ledger uses of a `sqlite3.Connection`."""

    def __init__(self, uri: str, vfs: str) -> None:
        flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE | apsw.SQLITE_OPEN_URI
        try:
            self._db = apsw.Connection(uri, flags=flags, vfs=vfs)
        except apsw.Error as error:
            raise _of_sqlite3(error) from error
        self._is_closed = False
        self._db.set_busy_timeout(round(OPEN_TIMEOUT_S * 1000))

    @property
    def in_transaction(self) -> bool:
        return not self._is_closed and self._db.in_transaction

    def execute(self, sql: str, values: Any = ()) -> _Result:
        try:
            return _Result(self._db.execute(sql, values).fetchall(), self._db)
        except apsw.Error as error:
            raise _of_sqlite3(error) from error

    def executemany(self, sql: str, rows: Iterable[Any]) -> None:
        try:
            self._db.executemany(sql, rows)
        except apsw.Error as error:
            raise _of_sqlite3(error) from error

    def close(self) -> None:
        self._is_closed = True
        self._db.close()


def _of_sqlite3(error: apsw.Error) -> sqlite3.Error:
    code = getattr(error, "extendedresult", apsw.SQLITE_ERROR)
    kind: type[sqlite3.Error] = sqlite3.OperationalError
    if code & 0xFF in (apsw.SQLITE_CORRUPT, apsw.SQLITE_NOTADB):
        kind = sqlite3.DatabaseError
    elif code & 0xFF == apsw.SQLITE_CONSTRAINT:
        kind = sqlite3.IntegrityError
    told = kind(str(error))
    told.sqlite_errorcode, told.sqlite_errorname = code, type(error).__name__
    return told
