"""Which ended jobs start again with an admission.

What the ledger must never hold is a job that has not ended with an input that ended other than
`Completed`: nothing would ever start or end it. So three kinds are requeued:

- jobs submitted again that had ended other than `Completed`;
- upward, whatever input of a new or requeued job had ended so, even if nobody named it;
- downward, what is `DependencyFailed` for their sake, unless it has another input that stays
  failed: then it stays too, until that one is submitted again.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable

from .connection import select_in
from .writes import Stamp

BROKEN = frozenset({"Failed", "TimedOut", "DependencyFailed", "Aborted"})

# Statuses are compared here and not in SQL: the planner takes an index on them for the most
# selective one, and would walk all failed jobs of all times.
_STATUS = "SELECT seq, status FROM job WHERE seq IN (*)"
_INPUTS = """
SELECT d.job, d.needs, j.status FROM dependency d JOIN job j ON j.seq = d.needs
WHERE d.job IN (*)"""
_DEPENDENTS = """
SELECT p.job, j.status FROM dependent p JOIN job j ON j.seq = p.job WHERE p.needs IN (*)"""
_REQUEUE = """
UPDATE job SET status = 'Created', attempts = 0, losses = 0, ready_at = NULL, retry_at = NULL,
    ended_at = NULL, error = NULL, changed_at = ?, changed_by = ? WHERE seq = ?"""


def broken_inputs(db: sqlite3.Connection, wanted: Iterable[int]) -> set[int]:
    """The ones of `wanted` that ended other than `Completed`, and upward all their inputs that
    did, transitively."""
    found: set[int] = set()
    new = {seq for seq, status in select_in(db, _STATUS, wanted) if status in BROKEN}
    while new:
        found |= new
        edges = select_in(db, _INPUTS, new)
        new = {needs for _, needs, status in edges if status in BROKEN} - found
    return found


def failed_dependents(db: sqlite3.Connection, requeued: Collection[int]) -> set[int]:
    """Downward, all that is `DependencyFailed` for nothing but the sake of `requeued`."""
    again = set(requeued)
    new = again
    while new:
        rows = select_in(db, _DEPENDENTS, new)
        candidates = {seq for seq, status in rows if status == "DependencyFailed"} - again
        edges = select_in(db, _INPUTS, candidates)
        # One that is held back is looked at again when its last broken input comes in.
        new = candidates - {
            job for job, needs, status in edges if status in BROKEN and needs not in again
        }
        again |= new
    return again - set(requeued)


def requeue(db: sqlite3.Connection, jobs: Collection[int], stamp: Stamp) -> Counter[str]:
    """Makes them as they were when they came; returns how many had which status before."""
    before = Counter(status for _, status in select_in(db, _STATUS, jobs))
    db.executemany(_REQUEUE, [(stamp.wall, stamp.server, seq) for seq in sorted(jobs)])
    return before
