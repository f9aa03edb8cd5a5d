"""What a pass decided, on its way to the ledger: batches, their claims, and promises.

Writes keep the order in which they were decided, across failures too. A promise is a message
that goes out only when everything recorded before it survives a power loss.
"""

from __future__ import annotations

import math
from collections import deque

from actors.ledger.port import Batch
from actors.ledger.records import OpenClaim, Write
from actors.server.claims import Claim
from actors.server.clusters.model import Opening, Starting

COMMIT_RETRY_SECS = 1.0

Awaited = Claim | Opening | Starting
"""Whose write's result is told with the commit."""


class Settlement:
    """Collects writes into batches; `first_batch` numbers the first one."""

    def __init__(self, first_batch: int = 1) -> None:
        self._writes: list[Write] = []
        self._awaited: list[tuple[int, Awaited]] = []
        self._batches: dict[int, tuple[list[Write], list[tuple[int, Awaited]]]] = {}
        self._next = first_batch
        self._committed = first_batch - 1
        self._hold_until = -math.inf
        self._promises: deque[tuple[int, bytes, bytes]] = deque()

    @property
    def deadline(self) -> float:
        """When a batch that failed may be tried again; inf when none did."""
        return self._hold_until if self._writes and self._hold_until > -math.inf else math.inf

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way to the ledger and no promise is open."""
        return not (self._writes or self._batches or self._promises)

    @property
    def has_unwritten(self) -> bool:
        """Whether a batch failed and waits to be tried again."""
        return bool(self._writes)

    @property
    def wants_sync(self) -> bool:
        """Whether a promise waits for nothing but the disk."""
        return bool(self._promises) and self._promises[0][0] <= self._committed

    def record(self, write: Write) -> None:
        """Part of the next batch."""
        self._writes.append(write)

    def claim(self, claim: Claim, write: OpenClaim) -> None:
        """A claim's row, part of the next batch; its result comes back with it."""
        self.expect(claim, write)

    def expect(self, awaited: Awaited, write: Write) -> None:
        """Part of the next batch; its result comes back with it."""
        self._awaited.append((len(self._writes), awaited))
        self._writes.append(write)

    def promise(self, peer: bytes, frame: bytes) -> None:
        """To be sent once what was recorded so far is durable."""
        number = self._next if self._writes else self._next - 1
        self._promises.append((number, peer, frame))

    def next_batch(self, now: float) -> Batch | None:
        """What is to be committed now, if anything."""
        if not self._writes or now < self._hold_until:
            return None
        self._hold_until = -math.inf
        batch = Batch(self._next, self._writes)
        self._batches[batch.number] = (self._writes, self._awaited)
        self._writes, self._awaited = [], []
        self._next += 1
        return batch

    def committed(self, number: int, results: list[bool]) -> list[tuple[Awaited, bool]]:
        """A batch is in: what was awaited in it, and whether each was won."""
        _, awaited = self._batches.pop(number)
        self._committed = number
        return [(each, results[position]) for position, each in awaited]

    def failed(self, number: int, now: float) -> list[Claim | Opening]:
        """A batch was rolled back, and with it all later ones in flight: their claims and the
        openings of attempts are off, everything else is written again in the same order, before
        anything newer and not before `COMMIT_RETRY_SECS`."""
        numbers = sorted(n for n in self._batches if n >= number)
        again: list[Write] = []
        kept: list[tuple[int, Awaited]] = []
        off: list[Claim | Opening] = []
        for n in numbers:
            writes, awaited = self._batches.pop(n)
            by_position = dict(awaited)
            for position, write in enumerate(writes):
                each = by_position.get(position)
                if isinstance(each, Claim | Opening):
                    off.append(each)
                    continue
                if each is not None:
                    kept.append((len(again), each))
                again.append(write)
        self._writes[:0] = again
        self._awaited = [*kept, *((p + len(again), each) for p, each in self._awaited)]
        self._promises = deque(
            (self._next if n in numbers else n, peer, frame) for n, peer, frame in self._promises
        )
        self._hold_until = now + COMMIT_RETRY_SECS
        return off

    def synced(self, number: int) -> list[tuple[bytes, bytes]]:
        """Every batch up to this number is durable: what may be sent now."""
        kept = [p for p in self._promises if p[0] > number]
        due = [(peer, frame) for n, peer, frame in self._promises if n <= number]
        self._promises = deque(kept)
        return due
