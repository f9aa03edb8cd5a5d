"""Batches and promises, across commits that fail."""

from __future__ import annotations

from actors.ledger.records import SetCordon
from actors.server.settlement import COMMIT_RETRY_SECS, Settlement

WRITES = [SetCordon(f"w{n}", 0.0, "why") for n in range(3)]


def test_a_promise_wants_a_sync_only_once_its_batch_is_in():  # chaos: else the loop never rests
    settlement = Settlement()
    settlement.record(WRITES[0])
    settlement.promise(b"p", b"done")
    assert not settlement.wants_sync
    first = settlement.next_batch(0.0)
    assert not settlement.wants_sync
    settlement.failed(first.number, 0.0)
    assert settlement.next_batch(COMMIT_RETRY_SECS / 2) is None
    assert not settlement.wants_sync
    again = settlement.next_batch(COMMIT_RETRY_SECS)
    assert again.writes == first.writes
    settlement.committed(again.number, [True])
    assert settlement.wants_sync
    assert settlement.synced(again.number) == [(b"p", b"done")]
    assert not settlement.wants_sync


def test_a_later_promise_does_not_hold_up_an_earlier_one():
    settlement = Settlement(first_batch=5)
    settlement.record(WRITES[0])
    settlement.promise(b"p", b"first")
    first = settlement.next_batch(0.0)
    settlement.record(WRITES[1])
    settlement.promise(b"q", b"second")
    second = settlement.next_batch(0.0)
    settlement.committed(first.number, [True])
    assert settlement.wants_sync
    assert settlement.synced(first.number) == [(b"p", b"first")]
    assert not settlement.wants_sync
    settlement.committed(second.number, [True])
    assert settlement.synced(second.number) == [(b"q", b"second")]
    assert settlement.is_settled


def test_a_promise_about_what_is_in_already_wants_a_sync():
    settlement = Settlement()
    settlement.promise(b"p", b"nothing changed")
    assert settlement.wants_sync
