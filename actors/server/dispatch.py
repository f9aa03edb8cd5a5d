"""The shell of the hot path: one task group around the pure cores of `Farm`.

Whatever wakes it (a frame, an event, a deadline) leads to the same synchronous turn: take all
that waits, commit once, send. No turn awaits anything, so turns never interleave, and a claim's
row, its `AssignJob` and all state in between are one step to the rest of the server.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import trio

from actors.ledger.errors import LedgerFailed
from actors.ledger.port import CommitFailed, Committed
from actors.outage import Outage
from actors.server.claims import Claim
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
CORES = ("gateway", "registry", "feeder", "assigner")


class Dispatch:
    """Runs gateway, registry, feeder and assigner in one task group."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._farm: Farm | None = None
        self.started = trio.Event()
        """The first incarnation has loaded the ledger."""
        self._clock = trio.CancelScope()
        self._flush_wanted = trio.Event()
        self._outage = Outage()
        self._is_amid_turn = False
        self._asked_again_at = -math.inf

    @property
    def is_settled(self) -> bool:
        """Whether everything that was told is durable and no claim is unanswered."""
        return self._farm is not None and self._farm.is_settled and not self._world.port.queue

    @property
    def counters(self) -> dict[str, int]:
        """Reports dropped as stale, frames that could not be read, races lost."""
        farm = self._farm
        return {
            "stale_reports": farm.reports.stale if farm else 0,
            "malformed_frames": farm.gateway.malformed if farm else 0,
            "lost_races": farm.lost_races if farm else 0,
        }

    async def run(self) -> None:
        """One incarnation: the cores are rebuilt from the ledger and the session table."""
        world = self._world
        last, self._farm = self._farm, None
        # Whatever an earlier incarnation handed to the ledger thread must be in the ledger.
        while len(world.port.deferred) or len(world.port.admissions):
            await trio.sleep(BEHIND_POLL_SECS)
        has_forgotten = self._has_forgotten(last)
        world.port.is_broken = False
        snapshot = await world.offload(_load, world)
        self._farm = Farm(
            world.config, world.server, world.ids, world.policy, world.sessions,
            world.load_registrations(), snapshot, trio.current_time(),
            first_batch=world.batches + 1, others_alive=world.others_alive(),
            has_forgotten=has_forgotten,
        )  # fmt: skip
        self._turn((), (StopRequested(),) if world.is_stopping else ())
        self.started.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._read_socket)
            nursery.start_soon(self._read_inbox)
            nursery.start_soon(self._watch_clock)
            nursery.start_soon(self._flush)

    def _has_forgotten(self, last: Farm | None) -> bool:
        """Whether an incarnation took what is not in the ledger, and workers are to repeat it."""
        if last is None:
            return False
        was_amid, self._is_amid_turn = self._is_amid_turn, False
        if self._world.port.is_broken or (last.has_unwritten and not was_amid):
            return True
        now = trio.current_time()
        # It failed over something that it took: if that comes back, it is not asked for again.
        if not was_amid or now < self._asked_again_at + ASK_AGAIN_SECS:
            return False
        self._asked_again_at = now
        return True

    # -- what wakes it -----------------------------------------------------------------------

    async def _read_socket(self) -> None:
        while True:
            incoming = await self._world.router.receive()
            self._turn(incoming, ())
            while self._world.port.is_behind:  # reports wait in the socket, not in memory
                await trio.sleep(BEHIND_POLL_SECS)

    async def _read_inbox(self) -> None:
        events = self._world.events
        while True:
            batch = [await events.receive()]
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
            with trio.CancelScope(deadline=self._farm.deadline) as self._clock:
                await trio.sleep_forever()
            self._turn(self._world.router.receive_nowait(), ())
            await trio.lowlevel.checkpoint()

    async def _flush(self) -> None:
        """Tries again to send what full peers did not take; ZeroMQ does not tell when."""
        while True:
            pause = FLUSH_FIRST_SECS
            while len(self._world.outbox):
                await trio.sleep(pause)
                pause = min(2 * pause, FLUSH_MAX_SECS)
                gone = self._world.outbox.flush(trio.current_time())
                if gone:
                    self._peers_gone(gone)
            self._flush_wanted = trio.Event()
            await self._flush_wanted.wait()

    # -- a turn --------------------------------------------------------------------------------

    def _turn(self, incoming: Sequence[Incoming], events: Sequence[DispatchEvent]) -> None:
        farm = self._farm
        assert farm is not None
        self._is_amid_turn = True
        now = trio.current_time()
        for message in incoming:
            farm.receive(message, now)
        for event in events:
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
        while farm.troubles:
            log.error("%s", farm.troubles.pop())
        self._clock.deadline = min(self._clock.deadline, farm.deadline)

    def _commit(self, farm: Farm, now: float) -> None:
        port = self._world.port
        while (batch := farm.next_batch(now)) is not None:
            self._world.batches = batch.number
            try:
                results = port.commit(batch)
            except LedgerFailed as error:
                self._complain(str(error))
                farm.commit_failed(batch.number, now)
                continue
            if results is not None:
                self._take_heart()
                farm.committed(batch.number, results, now)
        if farm.wants_sync:
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
        if not farm.out:
            return False
        by_peer: dict[bytes, list[tuple[bytes, Claim | None]]] = {}
        for peer, frame, claim in farm.out:
            by_peer.setdefault(peer, []).append((frame, claim))
        farm.out = []
        for peer, items in by_peer.items():
            sent = self._world.outbox.send(peer, [frame for frame, _ in items], now)
            if sent is Sent.FULL:
                self._flush_wanted.set()
            elif sent is Sent.GONE:
                for _, claim in items:
                    if claim is not None:
                        farm.undeliverable(claim, now)
                farm.peer_gone(peer, now)
        return True

    def _hand_out(self, farm: Farm, now: float) -> None:
        world = self._world
        if farm.pager:
            try:
                world.to_pager.send_nowait(farm.pager)
            except trio.WouldBlock:
                # The pager is far behind: it starts anew from a `Reset`, which it asks for.
                world.kill("pager")
            farm.pager = []
        for request in farm.admissions_out:
            if not world.port.admissions.put(request):
                farm.refuse_admission(request, now)
        farm.admissions_out = []
        for query in farm.queries:
            if not world.port.queries.put(query):
                farm.refuse_query(query, now)
        farm.queries = []
        for chunk in farm.logs:
            world.logbook.put(chunk)
        farm.logs = []
        for peer, message in farm.shell_requests:
            if isinstance(message, m.CmdStatus):
                self._answer_status(farm, peer, message, now)
            else:
                self._kill(peer, message, now)
        farm.shell_requests = []

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


def _load(world: World) -> Any:
    with world.port.lock:
        return world.port.ledger.load(world.port.wall_offset())


def blame(error: BaseException) -> str:
    """The core whose code was the innermost to run when dispatch failed."""
    culprit, frame = CORES[0], error.__traceback__
    while frame is not None:
        module = frame.tb_frame.f_globals.get("__name__", "").rpartition(".")[2]
        if module in CORES:
            culprit = module
        frame = frame.tb_next
    return culprit
