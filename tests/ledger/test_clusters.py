"""Clusters in the ledger: whole attempts or none, each closed once."""

from __future__ import annotations

import sqlite3

import pytest
from msgspec.structs import replace

from actors.ledger import schema
from actors.ledger.errors import Refused
from actors.ledger.records import (
    Admission,
    CloseAttempt,
    CloseClaim,
    ClusterRecord,
    MemberRecord,
    OpenAttempt,
    OpenClaim,
    SetCluster,
    SetJob,
    StartAttempt,
)
from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import admit, claim, open_ledger, record


def cluster(name: str, *jobs: str, **more) -> ClusterRecord:
    members = tuple(MemberRecord(job, "node", index) for index, job in enumerate(jobs))
    return ClusterRecord(name, "default", "Queued", members, **more)


def queued(ledger: SqliteLedger, *jobs: str) -> None:
    ledger.apply([SetJob(job, "Queued", 1.0, 0, 0, ready_at=1.0) for job in jobs], 0.0, 1.0)


@pytest.fixture
def waiting(ledger):
    """A cluster `k` of `a` and `b` that can start."""
    admit(ledger, *(record(n, cluster="k") for n in "ab"), clusters=(cluster("k", "a", "b"),))
    queued(ledger, "a", "b")
    return ledger


def opening(*jobs: str, attempt: str = "r1", first: int = 1) -> OpenAttempt:
    claims = (
        OpenClaim(replace(claim(first + n, job, f"w{n}"), attempt=attempt))
        for n, job in enumerate(jobs)
    )
    return OpenAttempt(attempt, "k", "server-1", 5.0, tuple(claims))


def statuses(ledger) -> dict[str, str]:
    return {info.job_id: info.status for info in ledger.jobs_page(None, None, 10)}


def test_an_attempt_goes_in_whole(waiting):
    assert waiting.apply([opening("a", "b")], 0.0, 1.0) == [True]
    assert statuses(waiting) == {"a": "Building", "b": "Building"}
    snapshot = waiting.load(0.0)
    [found] = snapshot.clusters
    assert (found.attempts, found.members) == (1, cluster("k", "a", "b").members)
    [attempt] = snapshot.attempts
    assert (attempt.attempt_id, attempt.started_at, attempt.reported) == ("r1", None, ())
    assert {c.attempt for c in snapshot.claims} == {"r1"}
    assert {job.cluster for job in snapshot.jobs} == {"k"}


def test_half_an_attempt_is_none_and_the_rest_of_the_transaction_stays(waiting):
    waiting.apply([OpenClaim(claim(9, "b"))], 0.0, 1.0)
    admit(waiting, record("c"), requester="s2")
    queued(waiting, "c")
    writes = [OpenClaim(claim(8, "c")), opening("a", "b"), SetCluster("k", "Queued", 6.0, 3)]
    assert waiting.apply(writes, 0.0, 1.0) == [True, False, True]
    assert statuses(waiting) == {"a": "Queued", "b": "Building", "c": "Building"}
    snapshot = waiting.load(0.0)
    assert snapshot.attempts == ()
    assert (snapshot.clusters[0].attempts, snapshot.clusters[0].retry_budget) == (0, 3)


def test_a_cluster_has_one_open_attempt(waiting):
    assert waiting.apply([opening("a", "b")], 0.0, 1.0) == [True]
    queued(waiting, "a", "b")  # whatever the jobs say
    again = opening("a", "b", attempt="r2", first=5)
    waiting.apply(
        [CloseClaim("a", "a1", 6.0, "Aborted"), CloseClaim("b", "a2", 6.0, "Aborted")], 0.0, 1.0
    )
    assert waiting.apply([again], 0.0, 1.0) == [False]
    assert waiting.apply([CloseAttempt("r1", 7.0, "PrepareFailed"), again], 0.0, 1.0) == [True] * 2


def test_an_attempt_is_started_and_closed_once(waiting):
    waiting.apply([opening("a", "b")], 0.0, 1.0)
    start, close = StartAttempt("r1", "k", 6.0), CloseAttempt("r1", 7.0, "Succeeded")
    assert waiting.apply([start, start], 0.0, 1.0) == [True, False]
    assert waiting.load(0.0).clusters[0].status == "Running"
    assert waiting.apply([close, close, start], 0.0, 1.0) == [True, False, False]
    _, _, [past] = waiting.cluster("k", 10)
    assert (past.started_at, past.finished_at, past.outcome) == (6.0, 7.0, "Succeeded")
    assert [seat.claim.worker for seat in past.seats] == ["w0", "w1"]


def test_a_closed_attempt_does_not_start(waiting):
    waiting.apply([opening("a", "b"), CloseAttempt("r1", 6.0, "PrepareFailed")], 0.0, 1.0)
    assert waiting.apply([StartAttempt("r1", "k", 7.0)], 0.0, 1.0) == [False]
    assert waiting.load(0.0).clusters[0].status == "Queued"


def test_a_member_that_reported_is_no_orphan_while_its_attempt_is_open(waiting):
    waiting.apply([opening("a", "b"), StartAttempt("r1", "k", 6.0)], 0.0, 1.0)
    waiting.apply([CloseClaim("a", "a1", 7.0, "Completed")], 0.0, 1.0)
    snapshot = waiting.load(0.0)
    assert {job.job_id: job.status for job in snapshot.jobs} == {"a": "Building", "b": "Building"}
    [reported] = snapshot.attempts[0].reported
    assert (reported.job_id, reported.outcome) == ("a", "Completed")
    waiting.apply([CloseAttempt("r1", 8.0, "Failed")], 0.0, 1.0)
    jobs = {job.job_id: job.status for job in waiting.load(0.0).jobs}
    assert jobs == {"a": "Queued", "b": "Building"}


def test_an_ended_cluster_has_no_members_any_more(waiting):
    waiting.apply([SetCluster("k", "Aborted", 9.0, 0)], 0.0, 1.0)
    snapshot = waiting.load(0.0)
    assert {job.cluster for job in snapshot.jobs} == {None}
    assert [(c.status, c.ended_at) for c in snapshot.clusters] == [("Aborted", 9.0)]
    assert {info.cluster for info in waiting.jobs_page(None, None, 10)} == {"k"}


def test_a_large_admission_with_clusters_is_staged_and_shown_at_once(ledger):
    jobs = [record(f"j{n}", cluster="k" if n < 2 else None) for n in range(300)]
    seen = []
    ledger.admit(
        admission(jobs, cluster("k", "j0", "j1")), 0.0, chunk_rows=100,
        pause=lambda: seen.append(len(ledger.load(0.0).clusters)),
    )  # fmt: skip
    assert len(seen) > 3
    assert set(seen) == {0}
    assert [c.cluster_id for c in ledger.load(0.0).clusters] == ["k"]


def admission(jobs, *clusters):

    return Admission(requester="s1", jobs=tuple(jobs), clusters=clusters)


def test_a_refused_cluster_leaves_nothing(waiting):
    with pytest.raises(Refused, match="'k' is taken by another cluster"):
        admit(waiting, record("c"), requester="s2", clusters=(cluster("k", "c"),))
    with pytest.raises(Refused, match="already open as job a"):
        admit(waiting, record("a"), requester="s3", clusters=(cluster("k2", "a"),))
    assert statuses(waiting) == {"a": "Queued", "b": "Queued"}
    assert len(waiting.load(0.0).clusters) == 1


def test_members_that_ended_run_again_under_the_ids_they_had(waiting):
    ended = [SetJob(job, "Completed", 9.0, 1, 0) for job in ("a", "b")]
    waiting.apply([*ended, SetCluster("k", "Completed", 9.0, 0)], 0.0, 1.0)
    fresh = replace(record("a", cluster="k2"), job_id="fresh")
    admitted = admit(waiting, fresh, requester="s2", clusters=(cluster("k2", "fresh"),))
    [found] = admitted.clusters
    assert [member.job_id for member in found.members] == ["a"]
    assert [(r.job_id, r.status, r.cluster) for r in admitted.requeued] == [("a", "Created", "k2")]
    assert admitted.requeued_from == {"Completed": 1}


def test_what_other_servers_did_to_clusters(tmp_path, waiting):
    other = open_ledger(tmp_path, "server-2")
    [found] = other.foreign_changes(90.0, 0.0).clusters
    assert (found.cluster_id, found.status) == ("k", "Queued")
    waiting.apply([opening("a", "b"), StartAttempt("r1", "k", 6.0)], 0.0, 1.0)
    assert other.foreign_changes(90.0, 0.0).clusters[0].status == "Running"
    assert waiting.foreign_changes(90.0, 0.0).clusters == ()
    adopted = other.adopt(["server-1"], 0.0)
    assert [attempt.attempt_id for attempt in adopted.attempts] == ["r1"]
    assert {c.server for c in adopted.claims} == {"server-2"}
    assert other.adopt(["server-1"], 0.0).attempts == ()
    other.close()


def test_members_of_an_older_file_are_kept(tmp_path):
    path = tmp_path / "ledger.sqlite3"
    with sqlite3.connect(path, isolation_level=None) as db:
        for statements in schema.MIGRATIONS[:3]:
            for statement in statements:
                db.execute(statement)
        db.execute("PRAGMA user_version = 3")
        db.execute("INSERT INTO cluster_member VALUES ('k', 'node', 0, 'j', 1, 'w')")
    db.close()
    ledger = open_ledger(tmp_path)
    ledger.close()
    with sqlite3.connect(path) as db:
        rows = db.execute("SELECT * FROM cluster_member").fetchall()
        version = db.execute("PRAGMA user_version").fetchone()
    db.close()
    assert rows == [("k", "node", 0, "j", 1, "w")]
    assert version == (len(schema.MIGRATIONS),)
