"""Clusters, their members and attempts as rows: admission and reads.

A cluster is there from the last step of its admission, so that it is never seen without its
members' jobs. A job is a member of at most one cluster that has not ended; of ended ones it may
be a member of many.
"""

# ruff: noqa: S608 (statements are joined from constants only; every value is bound)

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from actors.graph.knots import find_knot

from .connection import select_in
from .errors import Refused
from .records import (
    TERMINAL,
    AttemptRecord,
    ClaimRecord,
    ClusterRecord,
    MemberRecord,
    PastAttempt,
    PastClaim,
    Reported,
)
from .rows import earlier
from .writes import Stamp

_ADD_CLUSTER = """
INSERT INTO cluster_job (id, project, status, same_zone, retry_budget, attempts, prioritized,
    created_at, submission, changed_at, changed_by)
VALUES (?, ?, 'Queued', ?, ?, 0, ?, ?, ?, ?, ?)"""
_ADD_MEMBER = """
INSERT INTO cluster_member (cluster, role, number, job, is_primary, pin)
VALUES (?, ?, ?, ?, ?, ?)"""

_CLUSTERS = """
SELECT c.id, c.project, c.status, c.same_zone, c.retry_budget, c.attempts, c.prioritized,
    c.created_at, c.ended_at,
    (SELECT max(a.finished_at) FROM cluster_attempt a WHERE a.cluster = c.id)
FROM cluster_job c
"""
_MEMBERS = """
SELECT cluster, job, role, number, is_primary, pin FROM cluster_member WHERE cluster IN (*)
ORDER BY cluster, role, number"""
_OPEN_ATTEMPTS = """
SELECT id, cluster, server, created_at, started_at FROM cluster_attempt
WHERE finished_at IS NULL ORDER BY created_at, id"""
_REPORTED = """
SELECT cluster_attempt, job, outcome, error FROM dispatched_job
WHERE cluster_attempt IN (*) AND closed_at IS NOT NULL ORDER BY closed_at, id"""
_ATTEMPTS = """
SELECT id, created_at, started_at, finished_at, outcome FROM cluster_attempt
WHERE cluster = ? ORDER BY created_at DESC, id DESC LIMIT ?"""
_SEATS = """
SELECT id, job, worker, session, server, claimed_at, cluster_attempt, closed_at, outcome, error,
    NULL
FROM dispatched_job WHERE cluster_attempt = ? ORDER BY job, id"""
# Attempts close in the transaction that ends their cluster or queues it again.
_CHANGED = "c.changed_by IN (SELECT seq FROM server WHERE id <> ?) AND c.changed_at >= ?"

COMPANION = """
j.status = 'Aborted' AND j.ended_at IS NOT NULL AND 'Completed' = (
    SELECT c.status FROM cluster_member m JOIN cluster_job c ON c.id = m.cluster
    WHERE m.job = j.id ORDER BY c.created_at DESC, c.id DESC LIMIT 1)"""
"""Condition on a job `j`: it was stopped because its cluster had completed without it."""

_STATUS = "SELECT j.seq, j.id, j.status FROM job j WHERE j.seq IN (*)"
_OPEN_DEPENDENTS = f"""
SELECT p.needs, j.name FROM dependent p JOIN job j ON j.seq = p.job
WHERE p.needs IN (*) AND j.status NOT IN ({", ".join(f"'{s}'" for s in sorted(TERMINAL))})"""
_UNBUILT_INPUTS = """
SELECT d.job, d.needs FROM dependency d JOIN job j ON j.seq = d.needs
WHERE d.job IN (*) AND j.status <> 'Completed'"""


# -- admission ---------------------------------------------------------------------------------


def add_clusters(
    db: sqlite3.Connection, clusters: Iterable[ClusterRecord], submission: int, stamp: Stamp
) -> None:
    """Inserts clusters whose jobs are in. Raises: Refused for an id that is taken."""
    for cluster in clusters:
        taken = db.execute("SELECT 1 FROM cluster_job WHERE id = ?", (cluster.cluster_id,))
        if taken.fetchone():
            raise Refused(
                f"cluster_id: {cluster.cluster_id!r} is taken by another cluster: leave it out, "
                "or choose another"
            )
        db.execute(
            _ADD_CLUSTER,
            (
                cluster.cluster_id, cluster.project, cluster.same_zone, cluster.retry_budget,
                cluster.prioritized, cluster.created_at + stamp.offset, submission, stamp.wall,
                stamp.server,
            ),
        )  # fmt: skip
        db.executemany(
            _ADD_MEMBER,
            [
                (cluster.cluster_id, m.role, m.index, m.job_id, m.primary, m.pin)
                for m in cluster.members
            ],
        )


def members_to_run_again(db: sqlite3.Connection, members: Mapping[int, str]) -> set[int]:
    """Which of the jobs that are to be members are `Completed`, and start again with the others.

    `members` gives a label for errors to each number of a job that the ledger holds.

    Raises: Refused for one that has not ended, or that something which has not ended took as
        built.
    """
    completed = set()
    for seq, job_id, status in select_in(db, _STATUS, members):
        if status not in TERMINAL:
            raise Refused(
                f"{members[seq]}: drv_path: it is already open as job {job_id}: a member belongs "
                "to its cluster alone; wait for its end, or cancel it"
            )
        if status == "Completed":
            completed.add(seq)
    for seq, name in select_in(db, _OPEN_DEPENDENTS, completed):
        raise Refused(
            f"{members[seq]}: drv_path: it is built, and {name} that needs it has not ended: "
            "wait for its end"
        )
    return completed


def refuse_knots(db: sqlite3.Connection, members: Mapping[int, str]) -> None:
    """Refuses clusters that could never start, since a member waits, over jobs that the ledger
    starts again, for another one. `members` gives the cluster of each member's number.

    Raises: Refused.
    """
    edges: dict[int, list[int]] = {}
    new: Collection[int] = set(members)
    while new:
        found = list(select_in(db, _UNBUILT_INPUTS, new))
        edges.update({seq: [] for seq in new})
        for job, needs in found:
            edges[job].append(needs)
        new = {needs for _, needs in found} - edges.keys()
    knot = find_knot(edges, members)
    if knot is not None:
        cluster = next(members[seq] for seq, _ in knot if seq in members)
        raise Refused(
            f"cluster {cluster}: members would wait for each other over inputs that are built "
            "again: members start together, so none may need another"
        )


# -- reads -------------------------------------------------------------------------------------


def unended(db: sqlite3.Connection, offset: float) -> tuple[ClusterRecord, ...]:
    """Every cluster that has not ended, the oldest first."""
    return _read(db, "WHERE c.ended_at IS NULL ORDER BY c.created_at, c.id", (), offset)


def ended(db: sqlite3.Connection, limit: int, offset: float) -> tuple[ClusterRecord, ...]:
    """The newest clusters that have ended, the newest first."""
    clause = "WHERE c.ended_at IS NOT NULL ORDER BY c.ended_at DESC, c.id DESC LIMIT ?"
    return _read(db, clause, (limit,), offset)


def changed_clusters(
    db: sqlite3.Connection, server: str, since_wall: float, offset: float
) -> tuple[ClusterRecord, ...]:
    """Those that other servers brought or changed since a wall-clock time."""
    return _read(db, f"WHERE {_CHANGED} ORDER BY c.id", (server, since_wall), offset)


def cluster_page(
    db: sqlite3.Connection, status: str | None, after: str | None, limit: int
) -> tuple[ClusterRecord, ...]:
    """At most `limit` clusters (of one status) whose ids follow `after`, in id order; times are
    the wall clock's."""
    conditions, arguments = ["1"], []
    if status is not None:
        conditions.append("c.status = ?")
        arguments.append(status)
    if after is not None:
        conditions.append("c.id > ?")
        arguments.append(after)
    clause = f"WHERE {' AND '.join(conditions)} ORDER BY c.id LIMIT ?"
    return _read(db, clause, (*arguments, limit), 0.0)


def clusters_named(db: sqlite3.Connection, target: str, limit: int) -> list[str]:
    """Ids of the clusters that `target` can mean: that of this id, else those whose id begins
    with it."""
    if not target:
        return []
    if db.execute("SELECT 1 FROM cluster_job WHERE id = ?", (target,)).fetchone():
        return [target]
    # No text sorts after U+10FFFF, so this is every id with the prefix.
    sql = "SELECT id FROM cluster_job WHERE id > ? AND id < ? || char(1114111) ORDER BY id LIMIT ?"
    return [row[0] for row in db.execute(sql, (target, target, limit))]


def cluster_history(
    db: sqlite3.Connection, cluster_id: str, limit: int
) -> tuple[ClusterRecord, dict[str, tuple[str, str]], list[PastAttempt]] | None:
    """A cluster, status and name of each member's job, and its newest attempts, oldest first;
    wall-clock times. None for an unknown one."""
    found = _read(db, "WHERE c.id = ?", (cluster_id,), 0.0)
    if not found:
        return None
    jobs = {
        row[0]: (row[1], row[2])
        for row in db.execute(
            "SELECT j.id, j.status, j.name FROM cluster_member m JOIN job j ON j.id = m.job"
            " WHERE m.cluster = ?",
            (cluster_id,),
        )
    }
    attempts = [
        PastAttempt(row[0], row[1], row[2], row[3], row[4], _seats(db, row[0]))
        for row in db.execute(_ATTEMPTS, (cluster_id, limit)).fetchall()
    ]
    return found[0], jobs, attempts[::-1]


def _seats(db: sqlite3.Connection, attempt: str) -> tuple[PastClaim, ...]:
    rows = db.execute(_SEATS, (attempt,))
    return tuple(PastClaim(ClaimRecord(*row[:7]), *row[7:]) for row in rows)


def open_attempts(db: sqlite3.Connection, offset: float) -> tuple[AttemptRecord, ...]:
    """Every open attempt, the oldest first."""
    rows = db.execute(_OPEN_ATTEMPTS).fetchall()
    reported: dict[str, list[Reported]] = {row[0]: [] for row in rows}
    for attempt, *report in select_in(db, _REPORTED, list(reported)):
        reported[attempt].append(Reported(*report))
    return tuple(
        AttemptRecord(
            attempt, cluster, server, created_at - offset, earlier(started_at, offset),
            tuple(reported[attempt]),
        )
        for attempt, cluster, server, created_at, started_at in rows
    )  # fmt: skip


def _read(
    db: sqlite3.Connection, clause: str, arguments: Sequence[Any], offset: float
) -> tuple[ClusterRecord, ...]:
    rows = db.execute(_CLUSTERS + clause, arguments).fetchall()
    members: dict[str, list[MemberRecord]] = {row[0]: [] for row in rows}
    for cluster, job, role, index, primary, pin in select_in(db, _MEMBERS, list(members)):
        members[cluster].append(MemberRecord(job, role, index, bool(primary), pin))
    return tuple(
        ClusterRecord(
            cluster_id=row[0],
            project=row[1],
            status=row[2],
            members=tuple(members[row[0]]),
            same_zone=bool(row[3]),
            retry_budget=row[4],
            attempts=row[5],
            prioritized=bool(row[6]),
            created_at=row[7] - offset,
            ended_at=earlier(row[8], offset),
            tried_at=earlier(row[9], offset),
        )
        for row in rows
    )


def with_jobs(cluster: ClusterRecord, ids: Mapping[str, str]) -> ClusterRecord:
    """The cluster with other ids for some of its members' jobs."""
    members = tuple(replace(m, job_id=ids.get(m.job_id, m.job_id)) for m in cluster.members)
    return replace(cluster, members=members)
