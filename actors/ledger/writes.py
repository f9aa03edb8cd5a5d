"""The small writes of a running server as SQL: claims, their ends, the states of jobs.

The hot path. A claim costs two statements and no read of its own: the insert tests the job's
status and the unique index of open claims, and its row count says who won. It does not mark the
job as changed: other servers see open claims by themselves, and two more pages of the log would be
written (see schema.py).
"""

from __future__ import annotations

import sqlite3
from typing import assert_never

from .records import (
    KEPT_PREFETCHES,
    TERMINAL,
    AddMessages,
    AddMetric,
    AddPrefetch,
    AddRequester,
    CloseAttempt,
    CloseClaim,
    DropRequester,
    OpenAttempt,
    OpenClaim,
    SeeWorker,
    SetCluster,
    SetCordon,
    SetJob,
    SetPriority,
    SetSizes,
    StartAttempt,
    Write,
)

_OPEN = """
INSERT INTO dispatched_job (id, job, worker, session, server, claimed_at, score, cluster_attempt)
SELECT ?, id, ?, ?, ?, ?, ?, ? FROM job WHERE id = ? AND status = 'Queued'
ON CONFLICT DO NOTHING"""
_CLAIMED = """
UPDATE job SET status = CASE kind WHEN 'eval' THEN 'Evaluating' ELSE 'Building' END WHERE id = ?"""
_CLOSE = """
UPDATE dispatched_job SET closed_at = ?, outcome = ?, error = ?
WHERE job = ? AND closed_at IS NULL AND id = ?"""
_OPEN_ATTEMPT = """
INSERT INTO cluster_attempt (id, cluster, server, created_at)
SELECT ?, id, ?, ? FROM cluster_job WHERE id = ? AND status = 'Queued' ON CONFLICT DO NOTHING"""
_COUNT_ATTEMPT = """
UPDATE cluster_job SET attempts = attempts + 1, changed_at = ?, changed_by = ? WHERE id = ?"""
_START_ATTEMPT = """
UPDATE cluster_attempt SET started_at = ?
WHERE id = ? AND started_at IS NULL AND finished_at IS NULL"""
_RUN_CLUSTER = """
UPDATE cluster_job SET status = 'Running', changed_at = ?, changed_by = ? WHERE id = ?"""
_CLOSE_ATTEMPT = """
UPDATE cluster_attempt SET finished_at = ?, outcome = ? WHERE id = ? AND finished_at IS NULL"""
_SET_CLUSTER = """
UPDATE cluster_job SET status = ?, retry_budget = ?, ended_at = ?, changed_at = ?, changed_by = ?
WHERE id = ?"""
_SET_JOB = """
UPDATE job SET status = ?, attempts = ?, losses = ?, ready_at = ?, retry_at = ?, ended_at = ?,
    error = ?, changed_at = ?, changed_by = ? WHERE id = ?"""
_SET_PRIORITY = "UPDATE job SET prioritized = ?, changed_at = ?, changed_by = ? WHERE id = ?"
_SET_CORDON = """
INSERT INTO cordon (worker, since, reason) VALUES (?, ?, ?)
ON CONFLICT (worker) DO UPDATE SET since = excluded.since, reason = excluded.reason"""
_DROP_REQUESTER = """
UPDATE submission SET state = 'dropped' WHERE requester = ? AND state = 'accepted'"""
_ADD_REQUESTER = """
INSERT INTO requester (submission, job) SELECT ?, seq FROM job WHERE id = ?
ON CONFLICT DO NOTHING"""
_SET_SIZES = """
INSERT INTO store_path (path, nar_size, nar_hash) VALUES (?, ?, ?)
ON CONFLICT (path) DO UPDATE SET nar_size = coalesce(excluded.nar_size, store_path.nar_size),
    nar_hash = coalesce(excluded.nar_hash, store_path.nar_hash)"""
_ADD_METRIC = """
INSERT INTO build_metric (assignment, package, system, at, wall_time_ms, cpu_time_ms,
    peak_ram_mb, output_nar_size, oom, contention, core_score)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_ADD_PREFETCH = "INSERT INTO prefetch (paths, secs) VALUES (?, ?)"
_DROP_PREFETCHES = "DELETE FROM prefetch WHERE seq <= ?"
_SEE_WORKER = """
INSERT INTO worker (id, name, capabilities, last_seen) VALUES (?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET name = excluded.name, capabilities = excluded.capabilities,
    last_seen = excluded.last_seen"""
_ADD_MESSAGE = """
INSERT INTO eval_message (job, severity, message) SELECT seq, ?, ? FROM job WHERE id = ?"""
_ADD_TARGET = """
INSERT INTO eval_target (job, attribute, drv_path) SELECT seq, ?, ? FROM job WHERE id = ?
ON CONFLICT (job, attribute) DO UPDATE SET drv_path = excluded.drv_path"""


class Stamp:
    """Who writes, when, and how the server's clock turns into the wall's."""

    __slots__ = ("offset", "server", "wall")

    def __init__(self, server: int, wall: float, offset: float) -> None:
        self.server = server
        """Key of the `server` row."""
        self.wall = wall
        """Unix seconds of this transaction."""
        self.offset = offset
        """Seconds from the monotonic clock to the wall clock."""

    def later(self, at: float | None) -> float | None:
        """Wall clock of an optional monotonic time."""
        return None if at is None else at + self.offset


def perform(db: sqlite3.Connection, write: Write, stamp: Stamp) -> bool:
    """One write of a transaction; false for a lost claim, and for what was closed already.

    A write that names an unknown job changes nothing.
    """
    match write:
        case OpenClaim():
            return _open_claim(db, write, stamp)
        case CloseClaim():
            row = (
                write.closed_at + stamp.offset, write.outcome, write.error, write.job_id,
                write.assignment_id,
            )  # fmt: skip
            return db.execute(_CLOSE, row).rowcount == 1
        case OpenAttempt():
            return _open_attempt(db, write, stamp)
        case StartAttempt():
            return _start_attempt(db, write, stamp)
        case CloseAttempt():
            at = write.at + stamp.offset
            closed = db.execute(_CLOSE_ATTEMPT, (at, write.outcome, write.attempt_id))
            return closed.rowcount == 1
        case SetCluster():
            _set_cluster(db, write, stamp)
        case SetJob():
            _set_job(db, write, stamp)
        case SetPriority(job_id, prioritized):
            db.execute(_SET_PRIORITY, (prioritized, stamp.wall, stamp.server, job_id))
        case SetCordon():
            _set_cordon(db, write, stamp)
        case AddRequester(job_id, requester):
            db.execute(_ADD_REQUESTER, (submission_of(db, requester, stamp), job_id))
        case DropRequester(requester):
            db.execute(_DROP_REQUESTER, (requester,))
        case SetSizes(sizes):
            db.executemany(_SET_SIZES, sizes)
        case AddMetric():
            _add_metric(db, write, stamp)
        case AddPrefetch(paths, secs):
            newest = db.execute(_ADD_PREFETCH, (paths, secs)).lastrowid or 0
            db.execute(_DROP_PREFETCHES, (newest - KEPT_PREFETCHES,))
        case SeeWorker():
            _see_worker(db, write, stamp)
        case AddMessages():
            _add_messages(db, write)
        case _:
            assert_never(write)
    return True


def _open_claim(db: sqlite3.Connection, write: OpenClaim, stamp: Stamp) -> bool:
    claim = write.claim
    row = (
        claim.assignment_id,
        claim.worker,
        claim.session,
        claim.server,
        claim.claimed_at + stamp.offset,
        write.score,
        claim.attempt,
        claim.job_id,
    )
    if db.execute(_OPEN, row).rowcount != 1:
        return False
    db.execute(_CLAIMED, (claim.job_id,))
    return True


def _open_attempt(db: sqlite3.Connection, write: OpenAttempt, stamp: Stamp) -> bool:
    row = (write.attempt_id, write.server, write.created_at + stamp.offset, write.cluster_id)
    db.execute("SAVEPOINT attempt")
    won = db.execute(_OPEN_ATTEMPT, row).rowcount == 1
    if won and all(_open_claim(db, claim, stamp) for claim in write.claims):
        db.execute(_COUNT_ATTEMPT, (stamp.wall, stamp.server, write.cluster_id))
    else:
        won = False
        db.execute("ROLLBACK TO attempt")
    db.execute("RELEASE attempt")
    return won


def _start_attempt(db: sqlite3.Connection, write: StartAttempt, stamp: Stamp) -> bool:
    if db.execute(_START_ATTEMPT, (write.at + stamp.offset, write.attempt_id)).rowcount != 1:
        return False
    db.execute(_RUN_CLUSTER, (stamp.wall, stamp.server, write.cluster_id))
    return True


def _set_cluster(db: sqlite3.Connection, write: SetCluster, stamp: Stamp) -> None:
    ended_at = write.at + stamp.offset if write.status in TERMINAL else None
    row = (
        write.status, write.retry_budget, ended_at, stamp.wall, stamp.server, write.cluster_id
    )  # fmt: skip
    db.execute(_SET_CLUSTER, row)


def _set_job(db: sqlite3.Connection, write: SetJob, stamp: Stamp) -> None:
    row = (
        write.status,
        write.attempts,
        write.losses,
        stamp.later(write.ready_at),
        stamp.later(write.retry_at),
        write.at + stamp.offset if write.status in TERMINAL else None,
        write.error,
        stamp.wall,
        stamp.server,
        write.job_id,
    )
    db.execute(_SET_JOB, row)


def _add_metric(db: sqlite3.Connection, write: AddMetric, stamp: Stamp) -> None:
    row = (
        write.assignment_id,
        write.package,
        write.system,
        write.at + stamp.offset,
        write.wall_time_ms,
        write.cpu_time_ms,
        write.peak_ram_mb,
        write.output_nar_size,
        write.oom,
        write.contention,
        write.core_score,
    )
    db.execute(_ADD_METRIC, row)


def _set_cordon(db: sqlite3.Connection, write: SetCordon, stamp: Stamp) -> None:
    if write.reason is None:
        db.execute("DELETE FROM cordon WHERE worker = ?", (write.worker,))
    else:
        db.execute(_SET_CORDON, (write.worker, write.at + stamp.offset, write.reason))


def _see_worker(db: sqlite3.Connection, write: SeeWorker, stamp: Stamp) -> None:
    at = write.at + stamp.offset
    if write.capabilities is None:
        db.execute("UPDATE worker SET last_seen = ? WHERE id = ?", (at, write.worker))
    else:
        db.execute(_SEE_WORKER, (write.worker, write.name, write.capabilities, at))


def _add_messages(db: sqlite3.Connection, write: AddMessages) -> None:
    said = [("warning", text, write.job_id) for text in write.warnings]
    said += [("error", text, write.job_id) for text in write.errors]
    db.executemany(_ADD_MESSAGE, said)
    targets = [(attribute, drv_path, write.job_id) for attribute, drv_path in write.targets]
    db.executemany(_ADD_TARGET, targets)


def submission_of(db: sqlite3.Connection, requester: str, stamp: Stamp) -> int:
    """Key of the requester's accepted submission, made if there is none."""
    row = db.execute(
        "SELECT seq FROM submission WHERE requester = ? AND state = 'accepted' LIMIT 1",
        (requester,),
    ).fetchone()
    return row[0] if row else new_submission(db, requester, "accepted", stamp)


def new_submission(db: sqlite3.Connection, requester: str, state: str, stamp: Stamp) -> int:
    """Inserts a submission and returns its key."""
    accepted_at = stamp.wall if state == "accepted" else None
    seq: int = db.execute(
        "INSERT INTO submission (requester, server, state, created_at, accepted_at)"
        " VALUES (?, ?, ?, ?, ?) RETURNING seq",
        (requester, stamp.server, state, stamp.wall, accepted_at),
    ).fetchone()[0]
    return seq
