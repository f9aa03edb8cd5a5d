"""What has ended does not slow what runs, however much of it there is."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.ledger.records import AddMetric, CloseClaim, OpenClaim, SetJob
from actors.ledger.sqlite import SqliteLedger
from tests.ledger.ledgers import admit, claim, open_ledger, record

FEW, MANY = 50, 20_000
STEP = 10
"""Instructions of SQLite's virtual machine that are counted as one."""


def fill(folder: Path, finished: int) -> SqliteLedger:
    """A ledger with so many finished jobs, their claims and metrics, and one that can start."""
    ledger = open_ledger(folder)
    for start in range(0, finished, 5_000):
        names = [f"old{n}" for n in range(start, min(finished, start + 5_000))]
        admit(ledger, *map(record, names), requester=f"s{start}")
        writes = []
        for n, name in enumerate(names, start):
            writes += [
                SetJob(name, "Queued", 1.0, 0, 0, ready_at=1.0),
                OpenClaim(claim(n, name)),
                CloseClaim(name, f"a{n}", 3.0, "Completed"),
                SetJob(name, "Completed", 3.0, 1, 0, ready_at=1.0),
                AddMetric(f"a{n}", f"p{n % 500}", "x86_64-linux", 3.0, 1, 1, 1, 1, False, 1.0, 1.0),
            ]
        ledger.apply(writes, 0.0, 5.0)
    admit(ledger, record("new"), record("next", "new"), requester="mine")
    ledger.apply([SetJob("new", "Queued", 4.0, 0, 0, ready_at=4.0)], 0.0, 1.0)
    return ledger


def a_whole_cycle(ledger: SqliteLedger) -> None:
    assert ledger.apply([OpenClaim(claim(10**6, "new"))], 0.0, 1.0) == [True]
    ledger.apply(
        [
            CloseClaim("new", f"a{10**6}", 5.0, "Completed"),
            SetJob("new", "Completed", 5.0, 1, 0, ready_at=4.0),
            AddMetric(f"a{10**6}", "p1", "x86_64-linux", 5.0, 1, 1, 1, 1, False, 1.0, 1.0),
            SetJob("next", "Queued", 5.0, 0, 0, ready_at=5.0),
        ],
        0.0, 1.0,
    )  # fmt: skip


OPERATIONS: dict[str, Callable[[SqliteLedger], object]] = {
    "claim to result": a_whole_cycle,
    "submission": lambda ledger: admit(ledger, record("more", "new"), requester="other"),
    "page of jobs": lambda ledger: ledger.jobs_page(None, None, 40),
    "page of queued jobs": lambda ledger: ledger.jobs_page("Queued", None, 40),
    "one job": lambda ledger: ledger.job("new", 0.0),
    "target": lambda ledger: ledger.find("new", 4),
    "explanation": lambda ledger: ledger.decision_of("new"),
    "other servers": lambda ledger: ledger.foreign_changes(99.0, 0.0),
}


def instructions(ledger: SqliteLedger, work: Callable[[SqliteLedger], object]) -> int:
    """What the work costs, in instructions of SQLite's virtual machine."""
    count = 0

    def counted() -> int:
        nonlocal count
        count += STEP
        return 0

    connections = (ledger._writer.db, ledger._connection.db)
    for db in connections:
        db.set_progress_handler(counted, STEP)
    work(ledger)
    for db in connections:
        db.set_progress_handler(None, 0)
    return count


@pytest.fixture(scope="module")
def ledgers(tmp_path_factory):
    few, many = (fill(tmp_path_factory.mktemp("ledger"), count) for count in (FEW, MANY))
    yield few, many
    few.close()
    many.close()


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_operation_costs_the_same_beside_many_finished_jobs(ledgers, name):
    few, many = (instructions(ledger, OPERATIONS[name]) for ledger in ledgers)
    assert many <= 1.5 * few + 500, f"{few} instructions beside {FEW} jobs, {many} beside {MANY}"


def test_a_scan_would_be_seen(ledgers):
    few, many = (
        instructions(ledger, lambda own: own._writer.db.execute(
            "SELECT count(*) FROM job WHERE error = 'x'").fetchall())
        for ledger in ledgers
    )  # fmt: skip
    assert many > 50 * few


def test_no_statement_of_the_hot_path_reads_a_whole_table(tmp_path):
    ledger = fill(tmp_path, FEW)
    db: sqlite3.Connection = ledger._writer.db
    said: list[str] = []
    db.set_trace_callback(said.append)
    a_whole_cycle(ledger)
    db.set_trace_callback(None)
    statements = [sql for sql in said if sql.lstrip().startswith(("INSERT", "UPDATE", "SELECT"))]
    assert len(statements) > 5
    for sql in statements:
        plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {sql}")]
        assert not [line for line in plan if line.startswith("SCAN")], (sql, plan)
    ledger.close()
