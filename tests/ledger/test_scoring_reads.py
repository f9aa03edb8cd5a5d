"""What scoring reads of the ledger, and the migration that brought it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.ledger import schema
from actors.ledger.records import (
    KEPT_PREFETCHES,
    AddMetric,
    AddPrefetch,
    Admission,
    ClaimRecord,
    CloseClaim,
    JobRecord,
    OpenClaim,
    PastWait,
    SeenWorker,
    SeeWorker,
    SetJob,
)
from actors.ledger.sqlite import SqliteLedger
from transport.codec import encode_value

OFFSET = 1_000_000.0
DAY = 86_400.0


class Wall:
    def __init__(self) -> None:
        self.now = OFFSET

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    opened = SqliteLedger.open(tmp_path / "ledger.sqlite3", "s1", wall=Wall())
    yield opened
    opened.close()


def build(job_id: str) -> JobRecord:
    return JobRecord(
        job_id=job_id, kind="build", project="p", name=job_id, status="Created",
        drv_path=f"/nix/store/{job_id}.drv", outputs=(), payload=encode_value({}), inputs=(),
    )  # fmt: skip


def metric(number: int, *, package: str = "hello", system: str = "x", at: float = 0) -> AddMetric:
    return AddMetric(
        assignment_id=f"a{number}", package=package, system=system, at=at, wall_time_ms=number,
        cpu_time_ms=None, peak_ram_mb=None, output_nar_size=None, oom=False, contention=1.0,
        core_score=None,
    )  # fmt: skip


def assign(ledger: SqliteLedger, job_id: str, ready_at: float, at: float, score: bytes) -> None:
    claim = ClaimRecord(f"a-{job_id}", job_id, "w", "session", "s1", at)
    queued = SetJob(job_id, "Queued", at, 0, 0, ready_at)
    assert ledger.apply([queued, OpenClaim(claim, score)], OFFSET, 1.0) == [True, True]


def test_a_ledger_of_version_1_opens_and_keeps_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite3"
    db = sqlite3.connect(path, isolation_level=None)
    for statement in schema.MIGRATIONS[0]:
        db.execute(statement)
    db.execute("PRAGMA user_version = 1")
    db.execute("INSERT INTO cordon VALUES ('w1', 5.0, 'new disk')")
    db.execute(
        "INSERT INTO build_metric VALUES"
        " ('a1', 'hello', 'x', ?, 1500, NULL, 7, NULL, 0, 1.04, 2.0)",
        (OFFSET,),
    )
    db.close()
    ledger = SqliteLedger.open(path, "s1", wall=Wall())
    try:
        snapshot = ledger.load(OFFSET)
        assert snapshot.cordons == {"w1": "new disk"}
        assert [(x.package, x.wall_time_ms, x.core_score) for x in snapshot.metrics] == [
            ("hello", 1500, 2.0)
        ]
        assert snapshot.workers == ()
        ledger.apply([SeeWorker("w1", 3.0, "amber", b"\xa0")], OFFSET, 1.0)
        assert ledger.load(OFFSET).workers == (SeenWorker("w1", "amber", b"\xa0", 3.0),)
    finally:
        ledger.close()
    with sqlite3.connect(path) as again:
        assert again.execute("PRAGMA user_version").fetchone()[0] == len(schema.MIGRATIONS)
    again.close()


def test_a_start_reads_the_latest_builds_and_a_week_of_evaluations(ledger: SqliteLedger) -> None:
    writes = [metric(n, at=-n * 60.0) for n in range(25)]
    writes += [metric(100, package="old", at=-91 * DAY), metric(101, package="old", at=-89 * DAY)]
    writes += [metric(200 + n, package="p", system="", at=-n * DAY) for n in range(9)]
    ledger.apply(writes, OFFSET, 1.0)
    metrics = ledger.load(OFFSET).metrics
    numbers = [x.wall_time_ms for x in metrics]
    assert sorted(n for n in numbers if n is not None and n < 100) == list(range(20))
    assert 101 in numbers
    assert 100 not in numbers
    assert [x.wall_time_ms for x in metrics if x.system == ""] == list(range(207, 199, -1))


def test_a_start_reads_the_waits_of_the_last_hour(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", tuple(map(build, ["j1", "j2", "j3"]))), OFFSET)
    assign(ledger, "j1", -9_000.0, -8_000.0, encode_value({"missing": [1, 2]}))
    assign(ledger, "j2", -200.0, -100.0, encode_value({"missing": [5, 6]}))
    assign(ledger, "j3", -30.5, -10.0, encode_value({"total": 1.0, "rules": {}}))
    waits = ledger.load(OFFSET).waits
    assert waits == (PastWait(-100.0, 100.0, (5, 6)), PastWait(-10.0, 20.5, None))


def test_a_start_reads_the_newest_prefetches(ledger: SqliteLedger) -> None:
    fetched = [AddPrefetch(n, n / 2) for n in range(KEPT_PREFETCHES + 3)]
    ledger.apply(fetched[:2], OFFSET, 1.0)
    assert ledger.load(OFFSET).prefetches == tuple(fetched[:2])
    ledger.apply(fetched[2:], OFFSET, 1.0)
    assert ledger.load(OFFSET).prefetches == tuple(fetched[3:])


def test_a_job_is_read_with_all_its_claims(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", (build("j1"),)), OFFSET)
    assign(ledger, "j1", 0.0, 1.0, b"\xa0")
    ledger.apply([CloseClaim("j1", "a-j1", 2.0, "Failed", "exit 1")], OFFSET, 1.0)
    info, claims = ledger.decision_of("j1")
    assert info is not None
    assert (info.name, info.worker) == ("j1", "w")
    assert [(c.claim.claimed_at, c.closed_at, c.outcome) for c in claims] == [
        (OFFSET + 1, OFFSET + 2, "Failed")
    ]
    assert ledger.decision_of("j9") == (None, [])


def test_a_worker_that_leaves_keeps_what_it_could_do(ledger: SqliteLedger) -> None:
    ledger.apply(
        [SeeWorker("w1", 1.0, "a", b"\x01"), SeeWorker("w2", 2.0, "b", b"\x02"),
         SeeWorker("w1", 5.0, "a"), SeeWorker("w3", 6.0, "nobody")],
        OFFSET, 1.0,
    )  # fmt: skip
    assert ledger.workers(0.0, 10, OFFSET) == [
        SeenWorker("w1", "a", b"\x01", 5.0), SeenWorker("w2", "b", b"\x02", 2.0),
    ]  # fmt: skip
    assert [w.worker for w in ledger.workers(3.0, 10, OFFSET)] == ["w1"]
