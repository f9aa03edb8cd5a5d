"""What a ledger can raise. Each message is one line for people."""

from __future__ import annotations

import sqlite3
from pathlib import Path


class LedgerError(Exception):
    """Base of what the ledger raises on purpose."""


class LedgerBusy(LedgerError):
    """Another connection held the write lock for longer than the call would wait; nothing was
    written, the same call may be made again."""


class LedgerFailed(LedgerError):
    """Disk full, an I/O error, no access: the transaction was rolled back."""


class LedgerLost(LedgerError):
    """What was committed cannot be made durable any more; only a new start helps."""


class LedgerCorrupt(LedgerFailed):
    """The file is damaged, or is something else than a ledger. It is left as it is."""


class LedgerTooNew(LedgerError):
    """The file was written by a newer program."""


class Refused(LedgerError):
    """An admission that cannot be taken; names the entry and the field. Nothing was kept."""


_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


def translated(error: sqlite3.Error, path: Path) -> Exception:
    """The ledger's error for one of SQLite's.

    Violated constraints and misuse only we can cause: they come back as they are.
    """
    # The low byte is the primary code, the rest says more of the circumstances. Errors that
    # the sqlite3 module raises itself ("Cannot operate on a closed database.") have none.
    code = getattr(error, "sqlite_errorcode", None)
    if code is None:
        return error
    if code & 0xFF == sqlite3.SQLITE_BUSY:
        return LedgerBusy(f"{path}: another process is writing to the ledger")
    if code & 0xFF in _CORRUPT:
        return LedgerCorrupt(
            f"{path}: not a usable ledger ({error}); move it away or restore a backup"
        )
    if isinstance(error, sqlite3.OperationalError):
        return LedgerFailed(f"{path}: {error} ({error.sqlite_errorname})")
    return error
