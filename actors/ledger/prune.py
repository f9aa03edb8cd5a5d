"""Forgetting what ended long ago.

A job is forgotten whole: its row, claims, edges, messages and, unless somebody else needs them, its
derivation and the sizes of its outputs. What an open job, evaluation or cluster still needs stays,
however old. Build metrics have a life of their own: scoring reads them for `HISTORY_SECS`.

The candidates are found on the read connection; each small write transaction judges them again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from .connection import select_in
from .rows import decoded

HISTORY_SECS = 90 * 86_400.0
LOOKED_AT, FORGOTTEN = 2_000, 100
"""Jobs of one read, and of one write transaction."""
_METRICS = 500

_OLD = """
SELECT seq, ended_at FROM job WHERE seq > ? ORDER BY seq LIMIT ?"""
_FREE = """
SELECT j.seq, j.id FROM job j WHERE j.seq IN (*) AND j.ended_at < {before}
AND NOT EXISTS (
    SELECT 1 FROM dependent p JOIN job k ON k.seq = p.job
    WHERE p.needs = j.seq AND k.ended_at IS NULL)
AND NOT EXISTS (
    SELECT 1 FROM requester r JOIN submission s ON s.seq = r.submission
    JOIN job e ON e.id = s.requester WHERE r.job = j.seq AND e.ended_at IS NULL)
AND NOT EXISTS (
    SELECT 1 FROM cluster_member m JOIN cluster_job c ON c.id = m.cluster
    WHERE m.job = j.id AND c.ended_at IS NULL)"""
_BY_SEQ = (
    """DELETE FROM dependent
        WHERE job = ?1 AND needs IN (SELECT needs FROM dependency WHERE job = ?1)""",
    "DELETE FROM dependency WHERE job = ?1",
    "DELETE FROM requester WHERE job = ?1",
    "DELETE FROM taken_over WHERE job = ?1",
    "DELETE FROM eval_message WHERE job = ?1",
    "DELETE FROM eval_target WHERE job = ?1",
    "DELETE FROM job_body WHERE job = ?1",
    "DELETE FROM job WHERE seq = ?1",
    "DELETE FROM drv WHERE seq = ?1 AND NOT EXISTS (SELECT 1 FROM dependent WHERE needs = ?1)",
)
_BY_ID = (
    "DELETE FROM dispatched_job WHERE job = ?1",
    "DELETE FROM cluster_member WHERE job = ?1",
)
_CLUSTERS = (
    """DELETE FROM cluster_attempt WHERE cluster IN (
        SELECT id FROM cluster_job c WHERE c.ended_at IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM cluster_member WHERE cluster = c.id))""",
    """DELETE FROM cluster_job WHERE ended_at IS NOT NULL
        AND NOT EXISTS (SELECT 1 FROM cluster_member WHERE cluster = cluster_job.id)""",
)
_OLD_METRICS = """
DELETE FROM build_metric WHERE rowid IN (SELECT rowid FROM build_metric WHERE at < ? LIMIT ?)"""


def old_jobs(db: sqlite3.Connection, before: float, after: int) -> tuple[list[int], int | None]:
    """Keys of jobs that ended before a wall-clock time, of the next `LOOKED_AT` after a key; and
    where to go on, None at the end."""
    rows = db.execute(_OLD, (after, LOOKED_AT)).fetchall()
    old = [seq for seq, ended_at in rows if ended_at is not None and ended_at < before]
    return old, rows[-1][0] if len(rows) == LOOKED_AT else None


def forget(db: sqlite3.Connection, jobs: Collection[int], before: float) -> list[str]:
    """Deletes those of the jobs that nobody needs; returns their ids. To be called within a
    transaction, while nothing is staged: what is staged may need any of them."""
    if db.execute("SELECT 1 FROM submission WHERE state = 'staging'").fetchone():
        return []
    free = list(select_in(db, _FREE.format(before=float(before)), jobs))
    for seq, job_id in free:
        _drop_sizes(db, seq)
        for statement in _BY_ID:
            db.execute(statement, (job_id,))
        for statement in _BY_SEQ:
            db.execute(statement, (seq,))
    if free:
        for statement in _CLUSTERS:
            db.execute(statement)
    return [job_id for _, job_id in free]


def _drop_sizes(db: sqlite3.Connection, seq: int) -> None:
    row = db.execute("SELECT outputs FROM job_body WHERE job = ?", (seq,)).fetchone()
    paths = decoded(row[0]) if row else ()
    db.executemany("DELETE FROM store_path WHERE path = ?", [(path,) for path in paths])


def forget_metrics(db: sqlite3.Connection, now: float) -> int:
    """Deletes some of the metrics that are too old to be read; returns how many."""
    return db.execute(_OLD_METRICS, (now - HISTORY_SECS, _METRICS)).rowcount
