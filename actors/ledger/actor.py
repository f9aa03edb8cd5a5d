"""The ledger actor: what takes time or must be durable, off the loop.

Five loops in one nursery, one for each kind of work, since none may wait for another: a claim
does not wait for a large admission, nor an fsync for a long read. Where each keeps its place is
in the port, which outlives this actor; killed anywhere, it does the head of the queue again.
All that it does again is idempotent: a batch that committed but was not reported is guarded by
`Batch.number`.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext

import trio

from actors.ledger.errors import LedgerBusy, LedgerFailed, Refused
from actors.ledger.port import (
    AdmissionRefused,
    AdmissionRequest,
    AdmissionTaken,
    Answer,
    Batch,
    Committed,
    Forgotten,
    LedgerPort,
    Offload,
    Query,
    Synced,
)
from actors.ledger.prune import FORGOTTEN

log = logging.getLogger("headrace.ledger")

BUSY_SECS = 5.0
"""How long one try of a deferred batch waits for another process's lock."""
CHECKPOINT_SECS = 1.0
MAX_WAL_BYTES = 16 * 2**20
FAILED_PAUSE_SECS = 1.0
FORGET_EVERY_SECS, FORGET_PAUSE_SECS = 600.0, 0.02


async def run_ledger(
    port: LedgerPort, offload: Offload = trio.to_thread.run_sync, keep_secs: float = 0.0
) -> None:
    """Serves the port until cancelled. Jobs that ended `keep_secs` ago are forgotten; 0 = none.

    Raises `LedgerLost` in a group.
    """
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_commit_deferred, port, offload)
        nursery.start_soon(_sync, port, offload)
        nursery.start_soon(_admit, port, offload)
        nursery.start_soon(_answer, port, offload)
        nursery.start_soon(_checkpoint, port, offload)
        if keep_secs:
            nursery.start_soon(_forget, port, offload, keep_secs)


async def _commit_deferred(port: LedgerPort, offload: Offload) -> None:
    while True:
        batch = await port.deferred.head()
        if batch.number > port.committed:
            try:
                results = await port.deferred.offload(offload, _apply, port, batch)
            except LedgerBusy:
                continue
            except LedgerFailed as error:
                port.give_up(error)
                continue
            port.deliver(Committed(batch.number, results))
        port.deferred.done()


def _apply(port: LedgerPort, batch: Batch) -> list[bool]:
    with port.lock:
        results = port.ledger.apply(batch.writes, port.wall_offset(), BUSY_SECS)
        port.committed = batch.number
        return results


async def _sync(port: LedgerPort, offload: Offload) -> None:
    while True:
        await port.unsynced.head()
        port.unsynced.done()
        number = port.committed
        await port.unsynced.offload(offload, port.ledger.sync)
        port.deliver(Synced(number))


async def _admit(port: LedgerPort, offload: Offload) -> None:
    while True:
        request = await port.admissions.head()
        answer: AdmissionTaken | AdmissionRefused
        try:
            answer = await port.admissions.offload(offload, _admit_durably, port, request)
        except Refused as error:
            answer = _refused(request, str(error), is_bad_input=True)
        except LedgerBusy:
            continue
        except LedgerFailed as error:
            if request.sender is None and port.admissions.put(request):
                # Nobody would send this part of an evaluation again.
                port.admissions.done()
                await trio.sleep(FAILED_PAUSE_SECS)
                continue
            why = f"nothing was taken, the ledger cannot be written: {error}; submit again later"
            answer = _refused(request, why, is_bad_input=False)
        port.admissions.done()
        port.deliver(answer)


def _refused(request: AdmissionRequest, why: str, *, is_bad_input: bool) -> AdmissionRefused:
    return AdmissionRefused(request.token, request.requester, request.sender, why, is_bad_input)


def _admit_durably(port: LedgerPort, request: AdmissionRequest) -> AdmissionTaken:
    admission = request.draft()

    def let_others_write() -> None:
        port.lock.release()
        # A lock that is taken again at once starves who waits for it.
        time.sleep(0.0005)
        port.lock.acquire()

    with port.lock:
        admitted = port.ledger.admit(admission, port.wall_offset(), pause=let_others_write)
    port.ledger.sync()
    return AdmissionTaken(request.token, request.sender, admission, admitted)


async def _answer(port: LedgerPort, offload: Offload) -> None:
    while True:
        query = await port.queries.head()
        try:
            result = await port.queries.offload(offload, _read, port, query)
        except (LedgerBusy, LedgerFailed) as error:
            answer = Answer(query.token, None, str(error))
        else:
            answer = Answer(query.token, result)
        port.queries.done()
        port.deliver(answer)


def _read(port: LedgerPort, query: Query) -> object:
    with port.lock if query.writes else nullcontext():
        return getattr(port.ledger, query.method)(*query.arguments)


async def _checkpoint(port: LedgerPort, offload: Offload) -> None:
    """Keeps the write-ahead log short without ever doing it in a commit on the loop."""
    while True:
        await trio.sleep(CHECKPOINT_SECS)
        if port.ledger.wal_bytes() < MAX_WAL_BYTES // 4:
            continue
        try:
            left = await offload(port.ledger.checkpoint)
            if left > MAX_WAL_BYTES:
                await offload(_relieve, port)
        except (LedgerBusy, LedgerFailed):
            continue  # a reader or another server is in the way; the next round tries again


async def _forget(port: LedgerPort, offload: Offload, keep_secs: float) -> None:
    """Goes through all jobs at every `FORGET_EVERY_SECS`, a few at a time."""
    while True:
        await trio.sleep(FORGET_EVERY_SECS)
        before = trio.current_time() + port.wall_offset() - keep_secs
        after: int | None = 0
        try:
            while after is not None:
                old, after = await offload(port.ledger.old_jobs, before, after)
                for start in range(0, len(old), FORGOTTEN):
                    some = old[start : start + FORGOTTEN]
                    job_ids = await offload(_forget_some, port, some, before)
                    if job_ids:
                        port.deliver(Forgotten(tuple(job_ids)))
                    await trio.sleep(FORGET_PAUSE_SECS)
        except (LedgerBusy, LedgerFailed) as error:
            log.warning("old jobs are not forgotten for now: %s", error)


def _forget_some(port: LedgerPort, jobs: list[int], before: float) -> list[str]:
    with port.lock:
        return port.ledger.forget(jobs, before)


def _relieve(port: LedgerPort) -> None:
    with port.lock:
        port.ledger.relieve()
