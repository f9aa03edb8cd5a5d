"""What is read of a ledger while others write to it."""

# ruff: noqa: S608 (statements are joined from constants only; every value is bound)

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from transport.codec import decode_value

from . import clusters
from .connection import Connection, select_in
from .prune import old_jobs
from .records import (
    TERMINAL,
    AddMetric,
    AddPrefetch,
    ClaimRecord,
    ClusterRecord,
    EvalOutcome,
    EvalTarget,
    ForeignChanges,
    JobInfo,
    JobRecord,
    PastAttempt,
    PastClaim,
    PastWait,
    SeenWorker,
)
from .rows import JOB_COLUMNS, VISIBLE, inputs_of, job_record, known, records

_PAGE = """
SELECT j.id, j.kind, j.status, j.name, c.worker, c.id, j.attempts, j.error, j.drv_path,
    (SELECT m.cluster FROM cluster_member m JOIN cluster_job k ON k.id = m.cluster
        WHERE m.job = j.id ORDER BY k.created_at DESC, k.id DESC LIMIT 1)
FROM job j LEFT JOIN dispatched_job c ON c.seq = (
    SELECT d.seq FROM dispatched_job d WHERE d.job = j.id
    ORDER BY d.claimed_at DESC, d.seq DESC LIMIT 1)
"""

_COUNTS = """
SELECT status, sum(n) FROM (
    SELECT status, count(*) AS n FROM job WHERE ended_at IS NOT NULL GROUP BY status
    UNION ALL
    SELECT status, count(*) FROM job WHERE ended_at IS NULL GROUP BY status
    UNION ALL
    SELECT j.status, -count(*) FROM submission s
    JOIN requester r ON r.submission = s.seq
    JOIN job j ON j.seq = r.job AND j.submission = s.seq
    WHERE s.state = 'staging' GROUP BY j.status
) AS part GROUP BY status HAVING sum(n) > 0
"""

_REQUESTED = """
SELECT DISTINCT j.id, j.seq, j.status FROM submission s
JOIN requester r ON r.submission = s.seq JOIN job j ON j.seq = r.job
WHERE s.requester = ? AND s.state = 'accepted'
"""

_SOLE = f"""
SELECT DISTINCT mine.id FROM ({_REQUESTED}) AS mine
WHERE mine.status NOT IN ({", ".join(f"'{status}'" for status in sorted(TERMINAL))})
AND NOT EXISTS (
    SELECT 1 FROM requester r JOIN submission s ON s.seq = r.submission
    WHERE r.job = mine.seq AND s.state = 'accepted' AND s.requester <> ?)
ORDER BY mine.id
"""

# What another server changed, and what it brought: staged jobs are older than their acceptance.
_FOREIGN = """
SELECT j.seq FROM job j
WHERE j.changed_by IN (SELECT seq FROM server WHERE id <> ?) AND j.changed_at >= ?
UNION
SELECT j.seq FROM dispatched_job d JOIN job j ON j.id = d.job
WHERE d.closed_at IS NULL AND d.server <> ? AND d.claimed_at >= ?
UNION
SELECT j.seq FROM submission s
JOIN requester r ON r.submission = s.seq JOIN job j ON j.seq = r.job AND j.submission = s.seq
WHERE s.server IN (SELECT seq FROM server WHERE id <> ?) AND s.accepted_at >= ?
"""

_CLAIMS = """
SELECT id, job, worker, session, server, claimed_at - ?, cluster_attempt, closed_at - ?, outcome,
    error, score
FROM dispatched_job WHERE job = ? ORDER BY claimed_at, seq
"""

_METRIC_COLUMNS = """
SELECT assignment, package, system, at - ?, wall_time_ms, cpu_time_ms, peak_ram_mb,
    output_nar_size, oom, contention, core_score
"""

_METRICS = f"""
{_METRIC_COLUMNS}
FROM (
    SELECT m.*, row_number() OVER (
        PARTITION BY package, system ORDER BY at DESC, assignment) AS age
    FROM build_metric m WHERE at >= ? AND system <> ''
) AS ranked WHERE age <= ? ORDER BY at, assignment
"""

_EVALUATIONS = f"""
{_METRIC_COLUMNS}
FROM build_metric WHERE system = '' AND at >= ? ORDER BY at DESC, assignment DESC LIMIT ?
"""

_WAITS = """
SELECT d.claimed_at - ?, d.claimed_at - j.ready_at, d.score
FROM (SELECT seq, job, claimed_at, score FROM dispatched_job ORDER BY seq DESC LIMIT ?) d
JOIN job j ON j.id = d.job
WHERE d.claimed_at >= ? AND j.kind = 'build' AND j.ready_at IS NOT NULL
ORDER BY d.claimed_at, d.seq
"""

_TARGETS = """
SELECT t.attribute, t.drv_path, j.id, j.status, b.payload
FROM job e JOIN eval_target t ON t.job = e.seq
LEFT JOIN drv d ON d.path = t.drv_path LEFT JOIN job j ON j.seq = d.seq
LEFT JOIN job_body b ON b.job = j.seq
WHERE e.id = ? ORDER BY t.attribute
"""
_BUILDS = """
SELECT j.status, count(*) FROM submission s JOIN requester r ON r.submission = s.seq
JOIN job j ON j.seq = r.job WHERE s.requester = ? GROUP BY j.status
"""
_FAILED = """
SELECT j.id, j.name, j.status, j.error FROM submission s JOIN requester r ON r.submission = s.seq
JOIN job j ON j.seq = r.job WHERE s.requester = ? AND j.status IN ('Failed', 'TimedOut')
ORDER BY j.ended_at LIMIT 20
"""
_PREFETCHES = "SELECT paths, secs FROM prefetch ORDER BY seq"


class Reads:
    """Reads on a connection of their own, from any thread, one at a time.

    Each sees one committed state. What is staged they do not show.
    """

    def __init__(self, connection: Connection, server: str) -> None:
        self.server = server
        """Id of the server that reads."""
        self._connection = connection
        self._lock = threading.Lock()

    @contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """Statements of the block see one state. Raises: LedgerFailed."""
        with self._lock, self._connection.snapshot() as db:
            yield db

    def jobs_page(self, status: str | None, after: str | None, limit: int) -> list[JobInfo]:
        """At most `limit` jobs (of one status) whose ids follow `after`, in id order."""
        # An index serves each of the forms; one statement for all of them could use none.
        conditions = [VISIBLE]
        arguments: list[Any] = []
        order = " ORDER BY j.id LIMIT ?"
        if status is not None:
            conditions.append("j.status = ?")
            arguments.append(status)
            has_ended = status in TERMINAL
            conditions.append("j.ended_at IS NOT NULL" if has_ended else "j.ended_at IS NULL")
            if has_ended:
                order = " ORDER BY j.status, j.id LIMIT ?"
        if after is not None:
            conditions.append("j.id > ?")
            arguments.append(after)
        sql = _PAGE + " WHERE " + " AND ".join(conditions) + order
        with self.snapshot() as db:
            return [JobInfo(*row) for row in db.execute(sql, (*arguments, limit))]

    def job(self, job_id: str, wall_offset: float) -> JobRecord | None:
        with self.snapshot() as db:
            sql = f"{JOB_COLUMNS} WHERE j.id = ? AND {VISIBLE}"
            row = db.execute(sql, (job_id,)).fetchone()
            return (
                None
                if row is None
                else job_record(row, inputs_of(db, row[:1]).of(row[0]), wall_offset)
            )

    def find(self, target: str, limit: int) -> list[str]:
        """Ids of the jobs that `target` can mean, in id order: the job of that id or drv path
        alone if there is one, else those whose id begins with it or whose name it is."""
        exact = f"SELECT j.id FROM job j WHERE j.id = ? AND {VISIBLE}"
        by_path = (
            f"SELECT j.id FROM drv v JOIN job j ON j.seq = v.seq WHERE v.path = ? AND {VISIBLE}"
        )
        # No text sorts after U+10FFFF, so this is every id with the prefix.
        loose = (
            f"SELECT j.id FROM job j WHERE j.id > ? AND j.id < ? || char(1114111) AND {VISIBLE}"
            f" UNION SELECT j.id FROM job j WHERE j.name = ? AND {VISIBLE} ORDER BY 1 LIMIT ?"
        )
        if not target:
            return []
        with self.snapshot() as db:
            for sql in (exact, by_path):
                if row := db.execute(sql, (target,)).fetchone():
                    return [row[0]][:limit]
            return [row[0] for row in db.execute(loose, (target, target, target, limit))]

    def jobs_of(self, requester: str) -> list[str]:
        """Ids of all jobs that a submission or evaluation requested, in id order."""
        with self.snapshot() as db:
            rows = db.execute(f"{_REQUESTED} ORDER BY j.id", (requester,))
            return [row[0] for row in rows]

    def sole_jobs_of(self, requester: str) -> list[str]:
        """Those of its jobs that have not ended and that nobody else requested."""
        with self.snapshot() as db:
            return [row[0] for row in db.execute(_SOLE, (requester, requester))]

    def counts(self) -> dict[str, int]:
        """Jobs by status; a status without jobs is left out."""
        with self.snapshot() as db:
            return counts(db)

    def ended_among(self, job_ids: Collection[str]) -> tuple[list[str], list[str], list[str]]:
        """Of these jobs, those that ended; of them, those that ended other than `Completed`, less
        the companions that a completed cluster stopped; and those that the ledger does not hold.
        Each in the order given."""
        sql = f"SELECT j.id, j.status FROM job j WHERE j.id IN (*) AND {VISIBLE}"
        companion = f"SELECT j.id FROM job j WHERE j.id IN (*) AND {clusters.COMPANION}"
        with self.snapshot() as db:
            status = dict(select_in(db, sql, job_ids))
            ended = [job_id for job_id in job_ids if status.get(job_id) in TERMINAL]
            failed = [job_id for job_id in ended if status[job_id] != "Completed"]
            companions = {row[0] for row in select_in(db, companion, failed)}
        failed = [job_id for job_id in failed if job_id not in companions]
        return ended, failed, [job_id for job_id in job_ids if job_id not in status]

    def companions(self) -> int:
        """How many jobs ended `Aborted` because their cluster had completed without them."""
        sql = f"SELECT count(*) FROM job j WHERE {clusters.COMPANION} AND {VISIBLE}"
        with self.snapshot() as db:
            count: int = db.execute(sql).fetchone()[0]
            return count

    def claims_of(self, job_id: str, wall_offset: float) -> list[PastClaim]:
        """Every claim of a job, oldest first."""
        with self.snapshot() as db:
            rows = db.execute(_CLAIMS, (wall_offset, wall_offset, job_id))
            return [PastClaim(ClaimRecord(*row[:7]), *row[7:]) for row in rows]

    def outcome_of(self, job_id: str) -> EvalOutcome | None:
        """What an evaluation said and was asked for, and how its builds went; None for a job that
        is not there."""
        with self.snapshot() as db:
            sql = "SELECT kind, status, error FROM job WHERE id = ?"
            row = db.execute(sql, (job_id,)).fetchone()
            targets = db.execute(_TARGETS, (job_id,)).fetchall()
            builds = dict(db.execute(_BUILDS, (job_id,)).fetchall())
            failed = db.execute(_FAILED, (job_id,)).fetchall()
        if row is None:
            return None
        kind, status, error = row
        warnings, errors = self.messages_of(job_id)
        return EvalOutcome(
            kind, status, error, tuple(warnings), tuple(errors),
            tuple(EvalTarget(*target) for target in targets), builds, tuple(failed),
        )  # fmt: skip

    def messages_of(self, job_id: str) -> tuple[list[str], list[str]]:
        """Warnings and errors of an evaluation, in the order reported."""
        sql = (
            "SELECT m.severity, m.message FROM eval_message m JOIN job j ON j.seq = m.job"
            " WHERE j.id = ? ORDER BY m.seq"
        )
        with self.snapshot() as db:
            said = db.execute(sql, (job_id,)).fetchall()
        warnings = [text for severity, text in said if severity == "warning"]
        return warnings, [text for severity, text in said if severity == "error"]

    def sizes_of(self, paths: Collection[str]) -> dict[str, int]:
        """NAR sizes in bytes of those of the paths whose size was submitted or reported."""
        with self.snapshot() as db:
            return sizes(db, paths)

    def metrics(self, since: float, per_package: int, wall_offset: float) -> list[AddMetric]:
        """The newest builds of each package and system since a time on the server's clock,
        oldest first."""
        with self.snapshot() as db:
            rows = db.execute(_METRICS, (wall_offset, since + wall_offset, per_package))
            return [replace(AddMetric(*row), oom=bool(row[8])) for row in rows]

    def evaluations(self, since: float, limit: int, wall_offset: float) -> list[AddMetric]:
        """The newest evaluations since a time on the server's clock, oldest first; `package` is
        the project."""
        with self.snapshot() as db:
            rows = db.execute(_EVALUATIONS, (wall_offset, since + wall_offset, limit)).fetchall()
            return [replace(AddMetric(*row), oom=bool(row[8])) for row in reversed(rows)]

    def waits(self, since: float, limit: int, wall_offset: float) -> list[PastWait]:
        """Waits of the builds assigned since a time on the server's clock, oldest first; looks
        at the newest `limit` assignments. Waits count from when the job could start first."""
        with self.snapshot() as db:
            rows = db.execute(_WAITS, (wall_offset, limit, since + wall_offset)).fetchall()
        return [PastWait(claimed, waited, _missing(score)) for claimed, waited, score in rows]

    def prefetches(self) -> list[AddPrefetch]:
        """How long the newest prefetches took, oldest first."""
        with self.snapshot() as db:
            return [AddPrefetch(*row) for row in db.execute(_PREFETCHES)]

    def workers(self, since: float, limit: int, wall_offset: float) -> list[SeenWorker]:
        """Workers that were here since a time on the server's clock, the newest first."""
        sql = (
            "SELECT id, name, capabilities, last_seen - ? FROM worker WHERE last_seen >= ?"
            " ORDER BY last_seen DESC LIMIT ?"
        )
        with self.snapshot() as db:
            rows = db.execute(sql, (wall_offset, since + wall_offset, limit))
            return [SeenWorker(*row) for row in rows]

    def decision_of(self, job_id: str) -> tuple[JobInfo | None, list[PastClaim]]:
        """A job and all its claims, oldest first, with wall-clock times."""
        sql = f"{_PAGE} WHERE j.id = ? AND {VISIBLE}"
        with self.snapshot() as db:
            row = db.execute(sql, (job_id,)).fetchone()
            claims = db.execute(_CLAIMS, (0.0, 0.0, job_id)).fetchall()
        info = None if row is None else JobInfo(*row)
        return info, [PastClaim(ClaimRecord(*claim[:7]), *claim[7:]) for claim in claims]

    def old_jobs(self, before: float, after: int) -> tuple[list[int], int | None]:
        """Keys of jobs that ended before a wall-clock time, of those next after a key; and where
        to go on, None at the end."""
        with self.snapshot() as db:
            return old_jobs(db, before, after)

    def foreign_changes(self, since_wall: float, wall_offset: float) -> ForeignChanges:
        """Jobs that other servers brought or changed since a wall-clock time, as they are now.

        A change bears the time at which its transaction had the lock and shows when it has
        committed: ask from a few seconds before the last time.
        """
        with self.snapshot() as db:
            seqs = [row[0] for row in db.execute(_FOREIGN, (self.server, since_wall) * 3)]
            changed = records(db, seqs, wall_offset)
            inputs = known(db, inputs_of(db, seqs).numbers)
            return ForeignChanges(
                tuple(changed),
                {path: state for _, path, state in inputs},
                clusters.changed_clusters(db, self.server, since_wall, wall_offset),
            )

    def clusters_page(
        self, status: str | None, after: str | None, limit: int
    ) -> tuple[ClusterRecord, ...]:
        """At most `limit` clusters (of one status) whose ids follow `after`, in id order; times
        are the wall clock's."""
        with self.snapshot() as db:
            return clusters.cluster_page(db, status, after, limit)

    def find_cluster(self, target: str, limit: int) -> list[str]:
        """Ids of the clusters that `target` can mean: that of this id, else those whose id begins
        with it."""
        with self.snapshot() as db:
            return clusters.clusters_named(db, target, limit)

    def cluster(
        self, cluster_id: str, limit: int
    ) -> tuple[ClusterRecord, dict[str, tuple[str, str]], list[PastAttempt]] | None:
        """A cluster, status and name of each member's job, and its newest `limit` attempts,
        oldest first; wall-clock times. None for an unknown one."""
        with self.snapshot() as db:
            return clusters.cluster_history(db, cluster_id, limit)

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _missing(score: bytes | None) -> tuple[int, int] | None:
    """What a score breakdown says that the worker had reported missing."""
    if score is None:
        return None
    missing = decode_value(score).get("missing")
    return None if missing is None else (missing[0], missing[1])


def counts(db: sqlite3.Connection) -> dict[str, int]:
    return dict(db.execute(_COUNTS).fetchall())


def sizes(db: sqlite3.Connection, paths: Collection[str]) -> dict[str, int]:
    sql = "SELECT path, nar_size FROM store_path WHERE path IN (*) AND nar_size IS NOT NULL"
    return dict(select_in(db, sql, paths))
