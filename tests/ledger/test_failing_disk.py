"""A ledger whose disk takes nothing for a while, or for good."""

from __future__ import annotations

import errno
import os

import pytest
import trio

from actors.ledger import actor
from actors.ledger.actor import run_ledger
from actors.ledger.errors import LedgerFailed, LedgerLost
from actors.ledger.port import (
    AdmissionRefused,
    AdmissionRequest,
    AdmissionTaken,
    LedgerPort,
    Sender,
)
from actors.ledger.records import Admission
from tests.ledger.ledgers import open_ledger, record


class Disk:
    """Counts the tries that it lets fail."""

    def __init__(self, ledger, failures: int) -> None:
        self.failures = failures
        self._admit = ledger.admit
        ledger.admit = self.admit

    def admit(self, *arguments, **more):
        if self.failures:
            self.failures -= 1
            raise LedgerFailed("ledger.sqlite3: database or disk is full (SQLITE_FULL)")
        return self._admit(*arguments, **more)


def request(name: str, sender: Sender | None) -> AdmissionRequest:
    jobs = (record(name),)
    return AdmissionRequest(name, name, sender, lambda: Admission(requester=name, jobs=jobs))


@pytest.fixture
def answers(ledger, monkeypatch):
    """Admits what it is given, on a disk that fails some times, and returns the answers."""
    monkeypatch.setattr(actor, "FAILED_PAUSE_SECS", 0.01)

    async def admit(failures: int, *requests: AdmissionRequest) -> list[object]:
        seen: list[object] = []
        port = LedgerPort(ledger, seen.append, lambda: 0.0)
        Disk(ledger, failures)
        for one in requests:
            assert port.admissions.put(one)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run_ledger, port)
            with trio.fail_after(20):
                while len(seen) < len(requests):
                    await trio.sleep(0.005)
            nursery.cancel_scope.cancel()
        assert len(port.admissions) == 0
        return seen

    return admit


async def test_a_submission_is_refused_and_told_what_to_do(answers):
    [refused] = await answers(1, request("a", Sender(b"p", 7)))
    assert isinstance(refused, AdmissionRefused)
    assert not refused.is_bad_input
    assert "nothing was taken" in refused.message
    assert "disk is full" in refused.message
    assert "submit again" in refused.message


async def test_a_part_of_an_evaluation_is_tried_until_it_is_in(answers, ledger):  # chaos
    evaluated, submitted = request("a", None), request("b", Sender(b"p", 7))
    refused, taken = await answers(3, evaluated, submitted)
    # A client hears at once; what nobody would send again waits for the disk.
    assert (type(refused), refused.token) == (AdmissionRefused, "b")
    assert (type(taken), taken.token) == (AdmissionTaken, "a")
    assert [job.job_id for job in ledger.jobs_page(None, None, 10)] == ["a"]


async def test_what_cannot_be_made_durable_is_not_answered_and_ends_the_actor(ledger, monkeypatch):
    def refuse(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", refuse)
    seen: list[object] = []
    port = LedgerPort(ledger, seen.append, lambda: 0.0)
    port.admissions.put(request("a", Sender(b"p", 7)))
    with trio.fail_after(20), pytest.raises(ExceptionGroup) as group:
        await run_ledger(port)
    [cause] = group.value.exceptions
    assert isinstance(cause, LedgerLost)
    assert "No space left" in str(cause)
    assert seen == []
    monkeypatch.undo()
    # The kernel tells it once: that a later call succeeds proves nothing.
    with pytest.raises(LedgerLost):
        ledger.sync()


def test_a_new_start_writes_the_log_back_instead_of_trusting_it(tmp_path):
    first = open_ledger(tmp_path)
    first.admit(Admission(requester="s", jobs=(record("a"),)), 0.0)
    second = open_ledger(tmp_path, "server-2")
    # All that was in the log is in the database too: that file alone holds it.
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "ledger.sqlite3").write_bytes((tmp_path / "ledger.sqlite3").read_bytes())
    first.close()
    second.close()
    alone = open_ledger(copy, "server-3")
    assert [job.job_id for job in alone.jobs_page(None, None, 10)] == ["a"]
    alone.close()
