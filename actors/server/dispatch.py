"""The shell of the hot path: one task group around the pure cores of `Farm`.

Whatever wakes it (a frame, an event, a deadline) leads to the same synchronous turn: take all
that waits, commit once, send. No turn awaits anything, so turns never interleave, and a claim's
row, its `AssignJob` and all state in between are one step to the rest of the server.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Sequence

import trio

from actors.hangs import Inlet
from actors.ledger.errors import LedgerFailed
from actors.ledger.port import CommitFailed, Committed
from actors.ledger.records import Snapshot
from actors.outage import Outage
from actors.server.claims import Claim
from actors.server.clusters.placement import load_solver
from actors.server.effects import PeerGone, StopRequested
from actors.server.farm import DispatchEvent, Farm
from actors.server.world import World
from transport import messages as m
from transport.codec import encode
from transport.interface import Incoming, Sent

log = logging.getLogger("headrace.dispatch")

MAX_EVENTS_A_TURN = 256
FLUSH_FIRST_SECS, FLUSH_MAX_SECS = 0.002, 0.05
BEHIND_POLL_SECS = 0.01
ASK_AGAIN_SECS = 60.0
WAITS = ("socket", "inbox", "clock", "outbox")
"""What its tasks wait for; each wait may be cut short at any time."""
CORES = ("gateway", "registry", "feeder", "assigner", "coordinator")


class Dispatch:
    """Runs gateway, registry, feeder, assigner and coordinator in one task group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._farm: Farm | None = None
        self.started = trio.Event()
        """The first incarnation has loaded the ledger."""
        self._flush_wanted = trio.Event()
        self._outage = Outage()
        self._is_amid_turn = self._has_forgotten = False
        self._first_batch = 1
        self._asked_again_at = -math.inf
        self._waits = {wait: trio.CancelScope() for wait in WAITS}
        self._taken: Counter[str] = Counter()
        """How often each of them was over."""

    @property
    def is_up(self) -> bool:
        """Whether the present incarnation has loaded the ledger."""
        return self._farm is not None

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """What its tasks wait for. While it loads it takes nothing, and that may last."""
        return tuple(
            Inlet(
                name,
                functools.partial(self._taken.__getitem__, name),
                functools.partial(self._cut_short, name),
                functools.partial(self._is_held_up, name),
                CORES[0],
            )
            for name in WAITS
        )

    def _cut_short(self, wait: str) -> None:
        self._waits[wait].cancel()

    def _is_held_up(self, wait: str) -> bool:
        return self._farm is None or (wait == "socket" and self._world.port.is_behind)

    @property
    def is_settled(self) -> bool:
        """Whether everything that was told is durable and no claim is unanswered."""
        farm = self._farm
        return farm is not None and farm.handout.is_settled and not self._world.port.queue

    @property
    def counters(self) -> dict[str, int]:
        """Reports dropped as stale, frames that could not be read, races lost."""
        farm = self._farm
        return {
            "stale_reports": farm.reports.stale if farm else 0,
            "malformed_frames": farm.gateway.malformed if farm else 0,
            "lost_races": farm.handout.lost_races if farm else 0,
        }

    async def run(self) -> None:
        """One incarnation: the cores are rebuilt from the ledger and the session table."""
        world = self._world
        last, self._farm = self._farm, None
        # Whatever an earlier incarnation handed to the ledger thread must be in the ledger.
        while len(world.port.deferred) or len(world.port.admissions):
            await trio.sleep(BEHIND_POLL_SECS)
        # It may be killed again before its successor is there.
        self._has_forgotten = self._has_forgotten or self._forgets(last)
        world.port.is_broken = False
        self._first_batch = world.batches + 1
        snapshot = await world.offload(_load, world)
        self._farm = Farm(
            world.config, world.server, world.ids, world.policy, world.sessions,
            world.load_registrations(), snapshot, trio.current_time(),
            first_batch=self._first_batch, others_alive=world.others_alive(),
            has_forgotten=self._has_forgotten,
        )  # fmt: skip
        self._has_forgotten = False
        self._turn((), (StopRequested(),) if world.is_stopping else ())
        while len(world.port.deferred):  # what a dead server left open is closed by now
            await trio.sleep(BEHIND_POLL_SECS)
        self.started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_socket)
            nursery.start_soon(self._read_inbox)
            nursery.start_soon(self._watch_clock)
            nursery.start_soon(self._flush)

    def _forgets(self, last: Farm | None) -> bool:
        """Whether an incarnation took what is not in the ledger, and workers are to repeat it."""
        if last is None:
            return False
        was_amid, self._is_amid_turn = self._is_amid_turn, False
        if self._world.port.is_broken or (last.handout.has_unwritten and not was_amid):
            return True
        now = trio.current_time()
        # It failed over something that it took: if that comes back, it is not asked for again.
        if not was_amid or now < self._asked_again_at + ASK_AGAIN_SECS:
            return False
        self._asked_again_at = now
        return True

    # -- what wakes it -----------------------------------------------------------------------

    async def _read_socket(self) -> None:
        incoming: Sequence[Incoming]
        while True:
            incoming = ()
            with trio.CancelScope() as self._waits["socket"]:
                incoming = await self._world.router.receive()
            self._taken["socket"] += 1
            self._turn(incoming, ())
            while self._world.port.is_behind:  # reports wait in the socket, not in memory
                await trio.sleep(BEHIND_POLL_SECS)

    async def _read_inbox(self) -> None:
        events = self._world.events
        while True:
            batch = []
            with trio.CancelScope() as self._waits["inbox"]:
                batch.append(await events.receive())
            self._taken["inbox"] += 1
            try:
                while len(batch) < MAX_EVENTS_A_TURN:
                    batch.append(events.receive_nowait())
            except trio.WouldBlock:
                pass
            # Who is accused of silence may have written: the socket is read first.
            self._turn(self._world.router.receive_nowait(), batch)

    async def _watch_clock(self) -> None:
        while True:
            assert self._farm is not None
            with trio.CancelScope(deadline=self._farm.deadline) as self._waits["clock"]:
                await trio.sleep_forever()
            self._taken["clock"] += 1
            self._turn(self._world.router.receive_nowait(), ())
            await trio.lowlevel.checkpoint()

    async def _flush(self) -> None:
        """Tries again to send what full peers did not take; ZeroMQ does not tell when."""
        while True:
            pause = FLUSH_FIRST_SECS
            while len(self._world.outbox):
                await trio.sleep(pause)
                pause = min(2 * pause, FLUSH_MAX_SECS)
                self._taken["outbox"] += 1
                gone = self._world.outbox.flush(trio.current_time())
                if gone:
                    self._peers_gone(gone)
            self._flush_wanted = trio.Event()
            with trio.CancelScope() as self._waits["outbox"]:
                await self._flush_wanted.wait()
            self._taken["outbox"] += 1

    # -- a turn --------------------------------------------------------------------------------

    def _turn(self, incoming: Sequence[Incoming], events: Sequence[DispatchEvent]) -> None:
        farm = self._farm
        assert farm is not None
        self._is_amid_turn = True
        now = trio.current_time()
        for message in incoming:
            farm.receive(message, now)
        for event in events:
            if isinstance(event, Committed | CommitFailed) and event.number < self._first_batch:
                continue  # of an earlier incarnation; this one has loaded what came of it
            if isinstance(event, PeerGone):
                self._world.outbox.drop(event.peer)
            elif isinstance(event, CommitFailed):
                self._complain(event.error)
                self._world.port.is_broken = False
            elif isinstance(event, Committed):
                self._take_heart()
            farm.take(event, now)
        if farm.deadline <= now:
            farm.expire(now)
        self._settle(farm, now)
        self._is_amid_turn = False

    def _peers_gone(self, peers: Sequence[bytes]) -> None:
        farm = self._farm
        assert farm is not None
        now = trio.current_time()
        for peer in peers:
            farm.peer_gone(peer, now)
        self._settle(farm, now)

    def _settle(self, farm: Farm, now: float) -> None:
        while True:
            self._commit(farm, now)
            if not self._send(farm, now):
                break
        self._hand_out(farm, now)
        while farm.out.troubles:
            log.error("%s", farm.out.troubles.pop())
        clock = self._waits["clock"]
        clock.deadline = min(clock.deadline, farm.deadline)

    def _commit(self, farm: Farm, now: float) -> None:
        port = self._world.port
        while (batch := farm.handout.next_batch(now)) is not None:
            self._world.batches = batch.number
            try:
                results = port.commit(batch)
            except LedgerFailed as error:
                self._complain(str(error))
                farm.handout.commit_failed(batch.number, now)
                continue
            if results is not None:
                self._take_heart()
                farm.handout.committed(batch.number, results, now)
        if farm.handout.wants_sync:
            port.want_sync()

    def _complain(self, cause: str) -> None:
        if self._outage.begins():
            text = "the ledger does not take writes, nothing is assigned until it does: %s"
            log.error(text, cause)

    def _take_heart(self) -> None:
        if self._outage.ends():
            log.info("the ledger takes writes again")

    def _send(self, farm: Farm, now: float) -> bool:
        """Sends all frames; True when that led to something new to settle."""
        if not farm.out.frames:
            return False
        by_peer: dict[bytes, list[tuple[bytes, Claim | None]]] = {}
        for peer, frame, claim in farm.out.frames:
            by_peer.setdefault(peer, []).append((frame, claim))
        farm.out.frames = []
        for peer, items in by_peer.items():
            sent = self._world.outbox.send(peer, [frame for frame, _ in items], now)
            if sent is Sent.FULL:
                self._flush_wanted.set()
            elif sent is Sent.GONE:
                for _, claim in items:
                    if claim is not None:
                        farm.handout.undeliverable(claim, now)
                farm.peer_gone(peer, now)
        return True

    def _hand_out(self, farm: Farm, now: float) -> None:
        world = self._world
        if farm.out.pager:
            try:
                world.to_pager.send_nowait(farm.out.pager)
            except trio.WouldBlock:
                # The pager is far behind: it starts anew from a `Reset`, which it asks for.
                world.kill("pager")
            farm.out.pager = []
        for request in farm.out.admissions:
            if not world.port.admissions.put(request):
                farm.refuse_admission(request, now)
        farm.out.admissions = []
        for query in farm.out.queries:
            if not world.port.queries.put(query):
                farm.refuse_query(query, now)
        farm.out.queries = []
        for chunk in farm.out.logs:
            world.logbook.put(chunk)
        farm.out.logs = []
        for peer, message in farm.out.shell_requests:
            if isinstance(message, m.CmdStatus):
                self._answer_status(farm, peer, message, now)
            else:
                self._kill(peer, message, now)
        farm.out.shell_requests = []
        for asked in farm.out.health_requests:
            world.check_health(asked)
        farm.out.health_requests = []

    def _answer_status(self, farm: Farm, peer: bytes, message: m.CmdStatus, now: float) -> None:
        status = {**farm.status(now), "server": self._world.server_status(now)}
        reply = m.CmdStatusReply(request=message.request, status=status)
        self._world.outbox.send(peer, [encode(reply)], now)

    def _kill(self, peer: bytes, message: m.CmdKillActor, now: float) -> None:
        reply: m.Message = m.CmdDone(request=message.request)
        if not self._world.kill(message.actor):
            text = f"no actor {message.actor!r} runs now"
            reply = m.CmdError(request=message.request, code=2, message=text)
        self._world.outbox.send(peer, [encode(reply)], now)


def _load(world: World) -> Snapshot:
    with world.port.lock:
        snapshot = world.port.ledger.load(world.port.wall_offset())
    if snapshot.clusters:
        load_solver()  # here, where no request waits for it
    return snapshot


def blame(error: BaseException) -> str:
    """The core whose code was the innermost to run when dispatch failed."""
    culprit, frame = CORES[0], error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "").rpartition(".")[2]
        if module in CORES:
            culprit = module
        frame = frame.tb_next
    return culprit
