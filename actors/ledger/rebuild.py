"""Builds that are done and have to be done again, because what they made is gone.

A build whose worker can get an input nowhere waits for the job that made it, which is queued again
though it is `Completed`. The ledger says which one that is: ended jobs are in no server's memory.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

from .connection import select_in
from .records import Rebuild
from .requeue import requeue
from .rows import decoded, inputs_of, known, records
from .writes import Stamp

_WAITING = "SELECT seq FROM job WHERE id = ? AND status = 'Queued'"
_PRODUCERS = """
SELECT j.seq, b.outputs FROM dependency d JOIN job j ON j.seq = d.needs
JOIN job_body b ON b.job = j.seq WHERE d.job = ? AND j.status = 'Completed'"""
_WAITS_AGAIN = """
UPDATE job SET status = 'Created', changed_at = ?, changed_by = ? WHERE seq = ?"""
_REQUESTERS = """
SELECT DISTINCT s.requester FROM requester r JOIN submission s ON s.seq = r.submission
WHERE r.job = ? AND s.state = 'accepted' ORDER BY 1"""
_SHARE_REQUESTERS = """
INSERT INTO requester (submission, job) SELECT submission, ? FROM requester WHERE job = ?
ON CONFLICT DO NOTHING"""


def rebuild(db: sqlite3.Connection, job_id: str, missing: Collection[str], stamp: Stamp) -> Rebuild:
    """Queues again whatever made the paths that `job_id` needs and misses; that job is `Created`
    then. Nothing changes unless it is `Queued`: somebody else may have decided about it."""
    row = db.execute(_WAITING, (job_id,)).fetchone()
    if row is None:
        return Rebuild(job_id)
    (waiting,) = row
    gone = set(missing)
    producers = [
        seq for seq, outputs in db.execute(_PRODUCERS, row) if not gone.isdisjoint(decoded(outputs))
    ]
    if not producers:
        return Rebuild(job_id)
    requeue(db, producers, stamp)
    db.execute(_WAITS_AGAIN, (stamp.wall, stamp.server, waiting))
    # Who wants the job wants what it needs; withdrawn, both end.
    db.executemany(_SHARE_REQUESTERS, [(seq, waiting) for seq in producers])
    needed = inputs_of(db, producers).numbers
    wanted = select_in(db, "SELECT seq FROM job WHERE seq IN (*)", needed)
    return Rebuild(
        job_id,
        tuple(records(db, producers, stamp.offset)),
        {path: state for _, path, state in known(db, [seq for (seq,) in wanted])},
        tuple(requester for (requester,) in db.execute(_REQUESTERS, row)),
    )
