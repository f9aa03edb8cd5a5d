"""SQLite connections of a ledger: opening, transactions, and what makes them durable."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .errors import LedgerCorrupt, LedgerFailed, LedgerLost, LedgerTooNew, translated
from .schema import APPLICATION_ID, migrate, version_of

OPEN_TIMEOUT_S = 5.0
# A check reads the whole file; beyond this size a start would wait for it.
_CHECKED_BYTES = 32 * 2**20
# What a log that is started anew is cut to; see `SqliteLedger.relieve`.
_LOG_BYTES = 16 * 2**20
# The default of 2 MiB makes a claim read pages of the busiest indexes back from the log.
_CACHE_KIB = 32 * 2**10
_MAGIC, _HEADER_BYTES = b"SQLite format 3\0", 100
_IN_LIST = 500  # SQLite takes 32 766 variables, older ones 999


class Files:
    """How a ledger reaches its files; a simulation puts a disk of its own in its place."""

    def connect(self, uri: str) -> sqlite3.Connection:
        """Transactions begin and end where we say so."""
        return sqlite3.connect(
            uri,
            timeout=OPEN_TIMEOUT_S,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=256,
            uri=True,
        )

    def sync_data(self, descriptor: int) -> None:
        """Fdatasync."""
        os.fdatasync(descriptor)

    def sync_folder(self, descriptor: int) -> None:
        """Fsync of a directory: the names in it."""
        os.fsync(descriptor)


class Connection:
    """One connection, used by one thread at a time."""

    def __init__(
        self,
        path: Path,
        *,
        create: bool = False,
        read_only: bool = False,
        files: Files | None = None,
    ) -> None:
        """Raises: LedgerFailed when the file is not there or cannot be opened."""
        self.path = path
        self.files = files or Files()
        self._busy_timeout_s = OPEN_TIMEOUT_S
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if create else 'rw'}"
        with self.errors():
            self.db = self.files.connect(uri)
            self.db.execute("PRAGMA wal_autocheckpoint = 0")
            self.db.execute("PRAGMA synchronous = NORMAL")
            self.db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self.db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
            if read_only:
                self.db.execute("PRAGMA query_only = ON")

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Turns SQLite's errors into the ledger's."""
        try:
            yield
        except sqlite3.Error as error:
            told = translated(error, self.path)
            if told is error:
                raise
            raise told from error

    def wait_for(self, busy_timeout_s: float) -> None:
        """How long statements from now on wait for another connection's lock."""
        if busy_timeout_s != self._busy_timeout_s:
            self.db.execute(f"PRAGMA busy_timeout = {max(0, round(busy_timeout_s * 1000))}")
            self._busy_timeout_s = busy_timeout_s

    @contextlib.contextmanager
    def transaction(self, busy_timeout_s: float = OPEN_TIMEOUT_S) -> Iterator[sqlite3.Connection]:
        """A write transaction: committed at the end of the block, rolled back on any exception.

        It takes the write lock first: one that reads before it writes could fail as busy at
        once, whatever the time-out, because its snapshot may be outdated by then.

        Raises: LedgerBusy, LedgerFailed.
        """
        db = self.db
        try:
            self.wait_for(busy_timeout_s)
            db.execute("BEGIN IMMEDIATE")
            yield db
            db.execute("COMMIT")
        except sqlite3.Error as error:
            self._roll_back()
            told = translated(error, self.path)
            if told is error:
                raise
            raise told from error
        except BaseException:
            self._roll_back()
            raise

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Reads of one state. Raises: LedgerFailed."""
        with self.errors():
            self.db.execute("BEGIN")
            try:
                yield self.db
            finally:
                self._roll_back()

    def _roll_back(self) -> None:
        # After some errors (disk full, I/O) SQLite has rolled back by itself.
        if self.db.in_transaction:
            with contextlib.suppress(sqlite3.OperationalError):
                self.db.execute("ROLLBACK")

    def close(self) -> None:
        self.db.close()


def open_writer(path: Path, *, create: bool, files: Files | None = None) -> Connection:
    """The write connection to a checked and migrated file in WAL mode.

    Raises: LedgerTooNew, LedgerCorrupt, LedgerBusy, LedgerFailed; the file is then as it was.
    """
    _check_header(path)
    connection = Connection(path, create=create, files=files)
    try:
        with connection.errors():
            _check(connection.db, path)
            _set_wal_mode(connection.db, path)
        with connection.transaction() as db:
            migrate(db)
        with connection.errors():
            # What an earlier server could not make durable is only said to be in the log.
            connection.db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    except LedgerTooNew as error:
        connection.close()
        raise LedgerTooNew(f"{path}: {error}") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _check_header(path: Path) -> None:
    """Refuses what SQLite would take for an empty database and write over, its log included."""
    log, journal = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))
    if _size(journal):
        return  # a creation that was cut short; SQLite undoes it
    size = _size(path)
    if not size and _size(log):
        raise LedgerCorrupt(
            f"{path}: the ledger is gone or empty, but not its log {log.name}: restore both from a"
            " backup, or move the log away to begin a new ledger"
        )
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
    except OSError:
        return  # not there yet, or SQLite says why it cannot be read
    if size and (len(header) < _HEADER_BYTES or not header.startswith(_MAGIC)):
        raise LedgerCorrupt(
            f"{path}: not a usable ledger (file is not a database); move it away or restore a"
            " backup"
        )


def _size(path: Path) -> int:
    """Bytes, 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _check(db: sqlite3.Connection, path: Path) -> None:
    application_id = db.execute("PRAGMA application_id").fetchone()[0]
    if application_id != APPLICATION_ID:
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise LedgerCorrupt(f"{path}: this SQLite file is not a headrace ledger")
        return
    version_of(db)
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    page_bytes = db.execute("PRAGMA page_size").fetchone()[0]
    if pages * page_bytes <= _CHECKED_BYTES:
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise LedgerCorrupt(f"{path}: the ledger is damaged: {' '.join(verdict.split())}")


def _set_wal_mode(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
        raise LedgerFailed(f"{path}: this file system does not support SQLite's WAL mode")


def chunks(items: Sequence[Any], size: int = _IN_LIST) -> Iterator[Sequence[Any]]:
    """Consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def select_in(db: sqlite3.Connection, sql: str, keys: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Rows of `sql`, whose `(*)` stands for a list of the keys, for any number of keys."""
    for chunk in chunks(list(keys)):
        marks = ",".join("?" * len(chunk))
        yield from db.execute(sql.replace("(*)", f"({marks})"), chunk)


class Log:
    """The write-ahead log as a file: made durable from any thread, without a connection.

    Unlike on the database itself, SQLite keeps no locks on this file, so that opening and
    closing it here cannot drop them (POSIX locks of a process go with any descriptor closed).
    """

    def __init__(self, database: Path, files: Files) -> None:
        self._files = files
        self._path = database.with_name(database.name + "-wal")
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._failure: str | None = None

    def sync(self) -> None:
        """Waits until all that the file holds now is on disk.

        Raises: LedgerLost; from then on always, since the kernel reports a failed write once and
        may have dropped what it could not write.
        """
        with self._lock:
            if self._failure is None:
                try:
                    self._files.sync_data(self._descriptor())
                except OSError as error:
                    self._failure = f"{self._path}: cannot be made durable: {error.strerror}"
            if self._failure is not None:
                raise LedgerLost(self._failure)

    def _descriptor(self) -> int:
        now = self._path.stat()
        if self._fd is not None:
            held = os.fstat(self._fd)
            if (held.st_dev, held.st_ino) == (now.st_dev, now.st_ino):
                return self._fd
            os.close(self._fd)
            self._fd = None
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        # The names of the log and, when it is new, of the database.
        directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._files.sync_folder(directory)
        finally:
            os.close(directory)
        return self._fd

    def size(self) -> int:
        """Bytes, 0 when there is none."""
        return _size(self._path)

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
