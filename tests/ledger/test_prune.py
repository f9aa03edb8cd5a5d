"""What ended long ago is forgotten, and nothing that anybody needs."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from actors.ledger import actor, prune
from actors.ledger.actor import run_ledger
from actors.ledger.port import Forgotten, LedgerEvent, LedgerPort
from actors.ledger.records import (
    AddMessages,
    AddMetric,
    Admission,
    ClaimRecord,
    CloseClaim,
    JobRecord,
    OpenClaim,
    SetJob,
    SetSizes,
    Status,
)
from actors.ledger.sqlite import SqliteLedger
from transport.codec import encode_value

OFFSET, DAY = 10_000_000.0, 86_400.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[SqliteLedger]:
    opened = SqliteLedger.open(tmp_path / "ledger.sqlite3", "s1", wall=lambda: OFFSET)
    yield opened
    opened.close()


def build(job_id: str, *needs: str) -> JobRecord:
    return JobRecord(
        job_id=job_id, kind="build", project="p", name=job_id, status="Created",
        drv_path=f"/nix/store/{job_id}.drv", outputs=(f"/nix/store/{job_id}",),
        payload=encode_value({}), inputs=tuple(f"/nix/store/{n}.drv" for n in needs),
    )  # fmt: skip


def evaluation(job_id: str) -> JobRecord:
    return JobRecord(
        job_id=job_id, kind="eval", project="p", name=job_id, status="Queued", drv_path=None,
        outputs=(), payload=encode_value({}), inputs=(),
    )  # fmt: skip


def end(ledger: SqliteLedger, job_id: str, at: float, status: Status = "Completed") -> None:
    claim = ClaimRecord(f"a-{job_id}", job_id, "w", "session", "s1", at)
    metric = AddMetric(f"a-{job_id}", "p", "x", at, 1, None, None, None, False, 1.0, None)
    ledger.apply(
        [SetJob(job_id, "Queued", at, 0, 0, at), OpenClaim(claim),
         CloseClaim(job_id, f"a-{job_id}", at, "Completed"), SetJob(job_id, status, at, 1, 0, at),
         metric,
         SetSizes(((f"/nix/store/{job_id}", 5, None),)), AddMessages(job_id, ("w",), ())],
        OFFSET, 1.0,
    )  # fmt: skip


def jobs(ledger: SqliteLedger) -> set[str]:
    with ledger.snapshot() as db:
        return {row[0] for row in db.execute("SELECT id FROM job")}


def forget(ledger: SqliteLedger, before: float) -> set[str]:
    old, following = ledger.old_jobs(OFFSET + before, 0)
    assert following is None
    return set(ledger.forget(old, OFFSET + before))


def count(ledger: SqliteLedger, table: str) -> int:
    with ledger.snapshot() as db:
        found: int = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return found


def test_a_job_is_forgotten_whole_and_its_metric_stays(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", (build("old"), build("new", "old"))), OFFSET)
    end(ledger, "old", -10 * DAY)
    end(ledger, "new", -1 * DAY)
    assert forget(ledger, -5 * DAY) == {"old"}
    assert jobs(ledger) == {"new"}
    assert ledger.decision_of("old") == (None, [])
    assert ledger.sizes_of(["/nix/store/old", "/nix/store/new"]) == {"/nix/store/new": 5}
    assert len(ledger.load(OFFSET).metrics) == 2
    assert forget(ledger, -0.5 * DAY) == {"new"}
    for table in ("job", "job_body", "dispatched_job", "dependency", "dependent", "requester",
                  "eval_message", "store_path"):  # fmt: skip
        assert count(ledger, table) == 0, table
    with ledger.snapshot() as db:
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


def test_what_something_open_needs_stays(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", (build("a"), build("b"), build("c", "a", "b"))), OFFSET)
    ledger.admit(Admission("s", (evaluation("e"),)), OFFSET)
    ledger.admit(Admission("e", (build("child"),)), OFFSET)
    for job_id in ("a", "child"):
        end(ledger, job_id, -10 * DAY)
    assert forget(ledger, 0.0) == set()
    end(ledger, "b", -10 * DAY)
    end(ledger, "c", -10 * DAY)
    end(ledger, "e", -10 * DAY)
    assert forget(ledger, 0.0) == {"a", "b", "c", "child", "e"}


def test_a_derivation_may_come_again(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", (build("a"), build("b", "a"))), OFFSET)
    end(ledger, "a", -10 * DAY)
    end(ledger, "b", -1 * DAY)
    assert forget(ledger, -5 * DAY) == {"a"}
    again = JobRecord(**{f: getattr(build("a"), f) for f in JobRecord.__struct_fields__}
                      | {"job_id": "a2"})  # fmt: skip
    ledger.admit(Admission("s2", (again,)), OFFSET)
    assert jobs(ledger) == {"a2", "b"}
    with ledger.snapshot() as db:
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []


def test_nothing_is_forgotten_while_a_submission_is_staged(
    ledger: SqliteLedger, tmp_path: Path
) -> None:
    ledger.admit(Admission("s", (build("a"),)), OFFSET)
    end(ledger, "a", -10 * DAY)
    with sqlite3.connect(tmp_path / "ledger.sqlite3") as other:
        other.execute("UPDATE submission SET state = 'staging' WHERE requester = 's'")
    assert forget(ledger, 0.0) == set()
    with other:
        other.execute("UPDATE submission SET state = 'accepted'")
    other.close()
    assert forget(ledger, 0.0) == {"a"}


def test_metrics_go_after_90_days(ledger: SqliteLedger) -> None:
    ledger.admit(Admission("s", (build("a"), build("b"))), OFFSET)
    end(ledger, "a", -91 * DAY)
    end(ledger, "b", -89 * DAY)
    assert forget(ledger, -1000 * DAY) == set()
    assert count(ledger, "build_metric") == 1


async def test_the_actor_goes_through_all_jobs_in_small_steps(
    ledger: SqliteLedger, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "LOOKED_AT", 3)
    monkeypatch.setattr(actor, "FORGOTTEN", 2)
    names = [f"j{n}" for n in range(8)]
    ledger.admit(Admission("s", tuple(map(build, names))), OFFSET)
    for number, name in enumerate(names):
        end(ledger, name, -10 * DAY if number % 4 else 0.0)
    events: list[LedgerEvent] = []
    port = LedgerPort(ledger, events.append, lambda: OFFSET)

    async def at_once(work, *args):
        await trio.lowlevel.checkpoint()
        return work(*args)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_ledger, port, at_once, 5 * DAY)
        await trio.sleep(actor.FORGET_EVERY_SECS + 10)
        nursery.cancel_scope.cancel()
    told = [set(event.job_ids) for event in events if isinstance(event, Forgotten)]
    assert set().union(*told) == {"j1", "j2", "j3", "j5", "j6", "j7"}
    assert max(map(len, told)) == 2
    assert jobs(ledger) == {"j0", "j4"}
