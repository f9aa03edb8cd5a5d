"""All that a starting server reads of its ledger."""

# ruff: noqa: S608 (statements are joined from constants only; every value is bound)

from __future__ import annotations

import sqlite3

from msgspec.structs import replace

from . import clusters
from .queries import counts, sizes
from .records import TERMINAL, ClaimRecord, JobRecord, Known, Snapshot
from .rows import JOB_COLUMNS, VISIBLE, Inputs, job_record, known
from .writes import Stamp

_ENDED_CLUSTERS = 100
_IS_OPEN = f"j.ended_at IS NULL AND {VISIBLE}"

# An evaluation that is `Building` finished its claim and waits for its builds, a member of an
# open attempt may have reported and wait for the others; any other job in these states has an
# open claim, or its server died between closing it and saying what became of the job.
_ORPHANS = """
SELECT j.seq FROM job j
WHERE j.ended_at IS NULL
AND (j.status = 'Evaluating' OR j.status = 'Building' AND j.kind = 'build')
AND NOT EXISTS (SELECT 1 FROM dispatched_job c WHERE c.job = j.id AND c.closed_at IS NULL)
AND NOT EXISTS (
    SELECT 1 FROM cluster_member m JOIN cluster_attempt a ON a.cluster = m.cluster
    WHERE m.job = j.id AND a.finished_at IS NULL)
"""

# Without the plus signs SQLite begins with what was ever requested, not with what is open.
_FAILED_CHILDREN = f"""
SELECT e.id, count(DISTINCT j.seq) FROM job e
JOIN submission s ON s.requester = +e.id AND s.state = 'accepted'
JOIN requester r ON r.submission = +s.seq JOIN job j ON j.seq = +r.job
WHERE e.kind = 'eval' AND e.ended_at IS NULL
AND j.status IN {tuple(sorted(TERMINAL - {"Completed"}))}
GROUP BY e.id
"""


def has_orphans(db: sqlite3.Connection) -> bool:
    """Whether a job is claimed by its status and by no row."""
    return db.execute(f"{_ORPHANS} LIMIT 1").fetchone() is not None


def requeue_orphans(db: sqlite3.Connection, stamp: Stamp) -> None:
    """Makes them `Queued`, or nobody could claim them; within a write transaction."""
    db.execute(
        "UPDATE job SET status = 'Queued', changed_at = ?, changed_by = ?"
        f" WHERE seq IN ({_ORPHANS})",
        (stamp.wall, stamp.server),
    )


def read_snapshot(db: sqlite3.Connection, offset: float) -> Snapshot:
    """Reads it within one transaction. An orphan that came up since `requeue_orphans` (its
    server is alive and about to write on) is `Queued` here too."""
    inputs = Inputs(
        db,
        db.execute(
            f"SELECT d.job, d.needs FROM job j JOIN dependency d ON d.job = j.seq WHERE {_IS_OPEN}"
        ),
    )
    orphans = {row[0] for row in db.execute(_ORPHANS)}
    tally = counts(db)
    jobs: list[JobRecord] = []
    seqs: set[int] = set()
    for row in db.execute(f"{JOB_COLUMNS} WHERE {_IS_OPEN} ORDER BY j.id"):
        record = job_record(row, inputs.of(row[0]), offset)
        if row[0] in orphans:
            tally[record.status] -= 1
            tally["Queued"] = tally.get("Queued", 0) + 1
            record = replace(record, status="Queued")
        seqs.add(row[0])
        jobs.append(record)
    outside = inputs.numbers - seqs
    needed: dict[str, Known | None] = {inputs.paths[number]: None for number in outside}
    needed.update((path, state) for _, path, state in known(db, outside))
    outputs = {path for record in jobs for path in record.outputs}
    outputs.update(path for state in needed.values() if state for path in state.outputs)
    return Snapshot(
        jobs=tuple(jobs),
        claims=_open_claims(db, offset),
        requesters=_requesters(db),
        failed_children=dict(db.execute(_FAILED_CHILDREN).fetchall()),
        inputs=needed,
        sizes=sizes(db, outputs),
        counts={status: n for status, n in tally.items() if n},
        cordons=dict(db.execute("SELECT worker, reason FROM cordon").fetchall()),
        clusters=(
            *clusters.unended(db, offset),
            *reversed(clusters.ended(db, _ENDED_CLUSTERS, offset)),
        ),
        attempts=clusters.open_attempts(db, offset),
    )


def _open_claims(db: sqlite3.Connection, offset: float) -> tuple[ClaimRecord, ...]:
    rows = db.execute(
        "SELECT id, job, worker, session, server, claimed_at - ?, cluster_attempt"
        " FROM dispatched_job WHERE closed_at IS NULL ORDER BY claimed_at, seq",
        (offset,),
    )
    return tuple([ClaimRecord(*row) for row in rows])


def _requesters(db: sqlite3.Connection) -> dict[str, tuple[str, ...]]:
    requesters: dict[str, set[str]] = {}
    rows = db.execute(
        "SELECT j.id, s.requester FROM job j JOIN requester r ON r.job = +j.seq"
        f" JOIN submission s ON s.seq = +r.submission WHERE {_IS_OPEN} AND s.state = 'accepted'"
    )
    for job_id, requester in rows:
        requesters.setdefault(job_id, set()).add(requester)
    return {job_id: tuple(sorted(names)) for job_id, names in requesters.items()}
