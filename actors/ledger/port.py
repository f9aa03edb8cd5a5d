"""How the dispatch task and the ledger actor share the one write connection.

The port outlives both. Dispatch commits through it on the loop; what cannot be committed there at
once (another process holds the lock, the ledger thread is busy) queues for the actor, and then
everything later queues behind it: batches commit in order, so the ledger always holds a prefix
of what was decided. Results come back as events through `deliver`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import trio
from msgspec import Struct

from actors.hangs import Inlet
from actors.ledger.errors import LedgerBusy, LedgerFailed
from actors.ledger.records import Admission, Admitted, JobInfo, JobRecord, Write
from actors.ledger.sqlite import SqliteLedger

LOOP_LOCK_SECS = 0.002
"""How long a commit on the loop may wait for the lock."""
MAX_DEFERRED = 1_000
"""Batches that wait for the ledger thread; from there on dispatch reads no more reports."""

T = TypeVar("T")
R = TypeVar("R")

Offload = Callable[..., Awaitable[Any]]
"""Runs a blocking call elsewhere: in a thread, or at once in a simulation."""


class Batch(Struct, frozen=True):
    """One transaction."""

    number: int
    writes: Sequence[Write]


class Sender(Struct, frozen=True):
    """Who waits for the answer to a submission."""

    peer: bytes
    request: int


# -- what dispatch asks of the ledger actor ------------------------------------------------


class AdmissionRequest(Struct, frozen=True):
    """Admit jobs; answered by `AdmissionTaken` or `AdmissionRefused`."""

    token: str
    requester: str
    sender: Sender | None
    draft: Callable[[], Admission]
    """Checks and orders the jobs; called on the ledger's thread, since a large submission takes
    a while. Raises `Refused`."""


class Query(Struct, frozen=True):
    """A read; answered by `Answer` with the same token and what `SqliteLedger`'s method of
    that name returned."""

    token: str
    method: str
    arguments: tuple[object, ...] = ()
    writes: bool = False
    """Whether the method needs the write connection."""


# -- what it answers -------------------------------------------------------------------------


class Committed(Struct, frozen=True):
    """A deferred batch is in, with one result per write."""

    number: int
    results: list[bool]


class CommitFailed(Struct, frozen=True):
    """A deferred batch was rolled back; nothing of it or of any later one was written."""

    number: int
    error: str


class Synced(Struct, frozen=True):
    """Every batch up to this number survives a power loss."""

    number: int


class AdmissionTaken(Struct, frozen=True):
    """The admission is durable."""

    token: str
    sender: Sender | None
    admission: Admission
    admitted: Admitted


class AdmissionRefused(Struct, frozen=True):
    """The admission changed nothing."""

    token: str
    requester: str
    sender: Sender | None
    message: str
    """One line."""
    is_bad_input: bool
    """Whether the sender must change something, or may just try again."""


class Forgotten(Struct, frozen=True):
    """Jobs that ended long ago are not in the ledger any more."""

    job_ids: tuple[str, ...]


class Answer(Struct, frozen=True):
    """The result of a query."""

    token: str
    result: list[JobInfo] | list[str] | list[JobRecord] | dict[str, int] | object
    error: str | None = None


LedgerEvent = (
    Committed | CommitFailed | Synced | AdmissionTaken | AdmissionRefused | Forgotten | Answer
)


class Waiting(Generic[T]):
    """A bounded queue whose head is taken off only after it was handled, so that a consumer
    which is cancelled or crashes loses nothing."""

    def __init__(self, limit: int) -> None:
        self.items: deque[T] = deque()
        self.taken = 0
        """Grows with every look of the consumer and every item it is done with."""
        self.in_thread = False
        """The consumer waits for a thread, which ends when it ends."""
        self._limit = limit
        self._lot = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self.items)

    def put(self, item: T) -> bool:
        """False when the queue is full; the item was not taken then."""
        if len(self.items) >= self._limit:
            return False
        self.items.append(item)
        self._lot.unpark()
        return True

    async def head(self) -> T:
        """The first item, which stays; one consumer at a time."""
        while not self.items:
            await self._lot.park()
            self.taken += 1
        return self.items[0]

    def done(self) -> None:
        """The head was handled."""
        self.items.popleft()
        self.taken += 1

    def nudge(self) -> None:
        """Lets a consumer that waits for an item look again: a sign of life in `taken`."""
        self._lot.unpark()

    async def offload(self, offload: Offload, function: Callable[..., R], *arguments: Any) -> R:
        """Runs the consumer's blocking call elsewhere."""
        self.in_thread = True
        try:
            result: R = await offload(function, *arguments)
        finally:
            self.in_thread = False
        return result

    def inlet(self, name: str) -> Inlet:
        """What supervision sees of it."""
        return Inlet(name, lambda: self.taken, self.nudge, lambda: self.in_thread)


class LedgerPort:
    """Owned by the supervisor; `lock` guards the write connection between threads."""

    def __init__(
        self,
        ledger: SqliteLedger,
        deliver: Callable[[LedgerEvent], None],
        wall_offset: Callable[[], float],
    ) -> None:
        self.ledger = ledger
        self.lock = threading.Lock()
        self.deliver = deliver
        self.wall_offset = wall_offset
        self.deferred: Waiting[Batch] = Waiting(4 * MAX_DEFERRED)
        self.admissions: Waiting[AdmissionRequest] = Waiting(1_000)
        self.queries: Waiting[Query] = Waiting(1_000)
        self.unsynced: Waiting[int] = Waiting(1)
        self.is_broken = False
        """A deferred batch failed and dispatch does not know yet: nothing newer may go in."""
        self.committed = 0
        """Number of the newest batch that is in."""
        self.is_failing = False
        """The last commit was refused, other than for a lock."""

    @property
    def queues(self) -> tuple[Waiting[Any], ...]:
        """What the ledger actor takes from."""
        return self.deferred, self.admissions, self.queries, self.unsynced

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """What the ledger actor takes from."""
        return (
            self.deferred.inlet("deferred commits"),
            self.admissions.inlet("submissions"),
            self.queries.inlet("queries"),
            self.unsynced.inlet("unsynced commits"),
        )

    @property
    def is_behind(self) -> bool:
        """Whether dispatch should take no more reports for now."""
        return len(self.deferred) >= MAX_DEFERRED

    @property
    def queue(self) -> int:
        """How much waits for the ledger actor."""
        return sum(map(len, self.queues))

    def commit(self, batch: Batch) -> list[bool] | None:
        """Commits on the loop and returns a result per write; None when the batch was left
        to the ledger thread. Raises `LedgerFailed` when it was rolled back."""
        if self.is_broken:
            raise LedgerFailed("an earlier batch was not written")
        if len(self.deferred) or not self.lock.acquire(timeout=LOOP_LOCK_SECS):
            self._defer(batch)
            return None
        try:
            results = self.ledger.apply(batch.writes, self.wall_offset(), LOOP_LOCK_SECS)
        except LedgerBusy:
            self._defer(batch)
            return None
        except LedgerFailed:
            self.is_failing = True
            raise
        finally:
            self.lock.release()
        self.succeeded(batch)
        return results

    def succeeded(self, batch: Batch) -> None:
        """The batch is in."""
        self.committed = batch.number
        self.is_failing = False

    def give_up(self, error: LedgerFailed) -> None:
        """The head of the deferred batches failed: it and those behind it come back, since
        what is written must stay a prefix of what was decided."""
        number = self.deferred.items[0].number
        self.deferred.items.clear()
        self.is_broken = self.is_failing = True
        self.deliver(CommitFailed(number, str(error)))

    def want_sync(self) -> None:
        """What is committed by now is to be made durable; `Synced` follows."""
        self.unsynced.put(0)

    def _defer(self, batch: Batch) -> None:
        if not self.deferred.put(batch):
            raise LedgerFailed("the ledger thread is too far behind")
