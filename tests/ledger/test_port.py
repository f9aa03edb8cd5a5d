"""How the loop and the ledger's threads share one connection."""

from __future__ import annotations

import sqlite3

import pytest
import trio

from actors.ledger.actor import run_ledger
from actors.ledger.errors import LedgerFailed
from actors.ledger.port import Batch, CommitFailed, Committed, LedgerPort, Query, Synced, Waiting
from actors.ledger.records import OpenClaim, SetJob
from tests.ledger.ledgers import admit, claim, record


class Events:
    def __init__(self) -> None:
        self.seen: list[object] = []

    def __call__(self, event: object) -> None:
        self.seen.append(event)

    async def until(self, kind: type, count: int = 1) -> list[object]:
        with trio.fail_after(20):
            while len(found := [e for e in self.seen if isinstance(e, kind)]) < count:
                await trio.sleep(0.005)
        return found


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def port(ledger, events) -> LedgerPort:
    admit(ledger, *(record(n) for n in "abc"))
    ledger.apply([SetJob(n, "Queued", 1.0, 0, 0, ready_at=1.0) for n in "abc"], 0.0, 1.0)
    return LedgerPort(ledger, events, lambda: 0.0)


def batch(number: int, job: str) -> Batch:
    return Batch(number, [OpenClaim(claim(number, job))])


async def test_a_free_ledger_commits_on_the_loop(port):
    assert port.commit(batch(1, "a")) == [True]
    assert port.committed == 1


async def test_behind_a_lock_batches_queue_and_go_in_in_order(port, events, tmp_path):
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert port.commit(batch(1, "a")) is None
    other.execute("ROLLBACK")
    other.close()
    assert port.commit(batch(2, "a")) is None  # the lock is free, the order counts
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_ledger, port)
        done = await events.until(Committed, 2)
        nursery.cancel_scope.cancel()
    assert [(e.number, e.results) for e in done] == [(1, [True]), (2, [False])]
    assert port.commit(batch(3, "b")) == [True]


async def test_a_failed_batch_brings_the_later_ones_back(port, events, tmp_path, monkeypatch):
    other = sqlite3.connect(tmp_path / "ledger.sqlite3", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    port.commit(batch(1, "a"))
    port.commit(batch(2, "b"))
    other.execute("ROLLBACK")
    other.close()

    def fail(*_):
        raise LedgerFailed("disk full")

    monkeypatch.setattr(port.ledger, "apply", fail)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_ledger, port)
        [failed] = await events.until(CommitFailed)
        nursery.cancel_scope.cancel()
    assert failed.number == 1
    assert len(port.deferred) == 0
    monkeypatch.undo()
    with pytest.raises(LedgerFailed):
        port.commit(batch(3, "c"))
    port.is_broken = False
    assert port.commit(batch(3, "c")) == [True]


async def test_sync_follows_what_was_committed(port, events):
    port.commit(batch(1, "a"))
    port.want_sync()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_ledger, port)
        [synced] = await events.until(Synced)
        nursery.cancel_scope.cancel()
    assert synced.number == 1


async def test_a_query_is_answered_under_its_token(port, events):
    port.queries.put(Query("q1", "find", ("a", 4)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_ledger, port)
        with trio.fail_after(20):
            while not events.seen:
                await trio.sleep(0.005)
        nursery.cancel_scope.cancel()
    [answer] = events.seen
    assert (answer.token, answer.result) == ("q1", ["a"])


async def test_an_item_is_kept_until_it_was_handled():
    waiting: Waiting[int] = Waiting(2)
    assert waiting.put(1)
    assert waiting.put(2)
    assert not waiting.put(3)
    with trio.move_on_after(0):
        await waiting.head()
    assert await waiting.head() == 1
    waiting.done()
    assert await waiting.head() == 2
    assert len(waiting) == 1
