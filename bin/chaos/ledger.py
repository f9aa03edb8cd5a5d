"""The ledger as another process sees it: locked for a while, and read with SQL of our own."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from bin.chaos.verdict import AttemptRow, ClaimRow, ClusterRow, JobRow, LedgerSeen

_LOCK_WAIT_SECS = 5.0
_JOBS = "SELECT kind, coalesce(drv_path, name), status, error FROM job ORDER BY seq"
_CLAIMS = """
SELECT coalesce(job.drv_path, job.name), claim.outcome, claim.closed_at, claim.cluster_attempt
FROM dispatched_job AS claim JOIN job ON job.id = claim.job ORDER BY claim.closed_at"""
_CLUSTERS = "SELECT id, status FROM cluster_job ORDER BY id"
_ATTEMPTS = "SELECT cluster, outcome, finished_at FROM cluster_attempt ORDER BY created_at"


def lock(path: Path) -> sqlite3.Connection | None:
    """Takes the write lock until the connection is closed; none if it was not to be had."""
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=_LOCK_WAIT_SECS,
            isolation_level=None, check_same_thread=False,
        )  # fmt: skip
    except sqlite3.OperationalError:
        return None
    try:
        db.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:
        db.close()
        return None
    return db


def read(path: Path) -> LedgerSeen:
    """All that a verdict needs. Raises `sqlite3.Error`."""
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        return LedgerSeen(
            jobs=[JobRow(*row) for row in db.execute(_JOBS)],
            claims=[ClaimRow(*row) for row in db.execute(_CLAIMS)],
            clusters=[ClusterRow(*row) for row in db.execute(_CLUSTERS)],
            attempts=[AttemptRow(*row) for row in db.execute(_ATTEMPTS)],
            integrity=tuple(row[0] for row in db.execute("PRAGMA integrity_check")),
            dangling=len(db.execute("PRAGMA foreign_key_check").fetchall()),
        )
