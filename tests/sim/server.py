"""The production cores of a server in a simulated process: what dispatch and pager shells do,
without their tasks, and with everything that can happen to a commit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from actors.ledger import actor as ledger_actor
from actors.ledger.errors import Refused
from actors.ledger.port import (
    AdmissionRefused,
    AdmissionRequest,
    Answer,
    Batch,
    CommitFailed,
    Committed,
    LedgerPort,
    Synced,
)
from actors.ledger.records import Rebuild
from actors.ledger.sqlite import SqliteLedger
from actors.server.config import ServerConfig
from actors.server.effects import (
    Enter,
    Gone,
    Leave,
    ListRequested,
    PagerStarted,
    PeerGone,
    Present,
    Reset,
    StopRequested,
)
from actors.server.farm import Farm
from actors.server.ids import Ids
from actors.server.pager import Pager
from actors.server.policies import load_policy
from actors.server.reaper import SWEEP_SECS, Reaper
from actors.server.sessions import SessionTable
from tests.sim.disk import Disk
from tests.sim.network import Network
from tests.sim.watch import Watch
from transport.interface import Incoming

CHECK_EVERY = 4
"""Turns between two looks of the cores at their own invariants; the watch looks at every turn."""


class Crashed(Exception):
    """The server process is gone."""


class SimServer:
    """One life of a server."""

    def __init__(self, network: Network, random: Random, watch: Watch, ledger_file: Path,
                 config: ServerConfig, life: int, disk: Disk | None) -> None:  # fmt: skip
        self.network, self.random, self.watch = network, random, watch
        self.clock, self.faults, self.disk = network.clock, network.faults, disk
        self.config = config
        self.is_up = True
        self.is_stopping = False
        self.crash_next = False
        self.stalled_until = 0.0
        self.ids = Ids(f"{life:04d}")
        self.name = f"server-{life}"
        self.ledger = SqliteLedger.open(
            ledger_file, self.name, wall=lambda: self.clock.now + self.offset(), files=disk
        )
        self._interrupt(self.ledger)
        self.port = LedgerPort(self.ledger, self.post, self.offset)
        self.ledger.recover([f"server-{n}" for n in range(life)])
        self.watch.server_started(self.ledger)
        self.sessions = SessionTable()
        self.deferred: list[Batch] = []
        self.admitting: list[AdmissionRequest] = []
        self.is_broken = False
        self.committed = 0
        self.synced = 0
        self.is_syncing = False
        self.batches = 0
        self.turns = 0
        self.inbox: list[Any] = []
        self.pager: Pager | None = None
        self.pager_is_new = False
        """It was started anew and waits for its `Reset`."""
        self.farm: Farm | None = None
        self.reaper = Reaper(config.heartbeat_timeout, self.clock.now)
        self.outboxes: dict[bytes, list[list[bytes]]] = {}
        self.start_dispatch()
        self.clock.after(SWEEP_SECS, self._sweep)
        self._schedule()

    def offset(self) -> float:
        return self.clock.wall_shift

    def _interrupt(self, ledger: SqliteLedger) -> None:
        """Lets admissions take several transactions, between which the server may crash."""
        if self.disk is None:
            # A fsync of a file in memory proves nothing; what is durable is watched by number.
            ledger.sync = lambda: None
            return
        admit = ledger.admit
        rows = self.random.choice((60, 300, 2_000))

        def in_parts(admission: Any, offset: float, *, pause: Any) -> Any:
            def crash_or_pause() -> None:
                if self.crash_next and self.random.random() < 0.2:
                    self.crash()
                    raise Crashed
                pause()

            return admit(admission, offset, chunk_rows=rows, pause=crash_or_pause)

        ledger.admit = in_parts

    def start_dispatch(self) -> None:
        """Builds the cores anew from the ledger and the session table."""
        while self.deferred:
            self._commit_deferred()
        for request in list(self.admitting):
            self._admit(request)
        has_forgotten = self.is_broken or (
            self.farm is not None and self.farm.handout.has_unwritten
        )
        self.is_broken = False
        self.inbox = [e for e in self.inbox if not isinstance(e, Committed | CommitFailed)]
        self.watch.dispatch_started(self.sessions)
        self.farm = Farm(
            self.config, self.name, self.ids, load_policy("simple"), self.sessions, None,
            self.ledger.load(self.offset()), self.clock.now, first_batch=self.batches + 1,
            has_forgotten=has_forgotten,
        )  # fmt: skip
        self.turn(lambda: None)

    def restart_pager(self) -> None:
        self.turn(lambda: self.farm.take(PagerStarted(), self.clock.now))

    def stop(self) -> None:
        self.is_stopping = True
        self.turn(lambda: self.farm.take(StopRequested(), self.clock.now))

    def crash(self) -> None:
        """kill -9, or the machine loses power."""
        self._vanish("server crashed")
        if self.disk is None:
            self.ledger.close()
        elif self.random.random() < self.faults.power_losses:
            self.watch.note("the power is lost")
            self.disk.lose_power(self.ledger.close, self.random)
            self.watch.has_lost_power = True
        else:
            self.disk.end_process(self.ledger.close)

    def exit(self) -> None:
        """The end that SIGTERM asked for."""
        self._vanish("server stopped")
        self.ledger.sync()
        self.watch.synced_all()
        self.ledger.close()

    def _vanish(self, reason: str) -> None:
        self.is_up = False
        self.network.server = None
        self.network.cut_all(reason)

    # -- what reaches it ---------------------------------------------------------------------------

    def receive(self, peer: bytes, frames: list[bytes]) -> None:
        if self._is_stalled(lambda: self.receive(peer, frames)):
            return
        if self.is_up:
            self.watch.clusters.receives(self, peer, frames)
            self.turn(lambda: self.farm.receive(Incoming(peer, frames, None), self.clock.now))

    def _is_stalled(self, then: Callable[[], None]) -> bool:
        """While the loop stands still nothing happens; `then` happens when it goes on."""
        if self.clock.now < self.stalled_until:
            self.clock.at(self.stalled_until, then)
            return True
        return False

    def post(self, event: Any) -> None:
        self.inbox.append(event)
        self.clock.after(0.0, self._read_inbox)

    def _read_inbox(self) -> None:
        if self._is_stalled(self._read_inbox):
            return
        if not self.is_up or not self.inbox:
            return
        events, self.inbox = self.inbox, []

        def take() -> None:
            for event in events:
                if isinstance(event, PeerGone):
                    self.outboxes.pop(event.peer, None)
                elif isinstance(event, CommitFailed):
                    self.is_broken = False
                self.farm.take(event, self.clock.now)

        self.turn(take)

    def _sweep(self) -> None:
        if not self.is_up or self._is_stalled(self._sweep):
            return
        for accusation in self.reaper.sweep(self.sessions, [], self.clock.now):
            self.post(accusation)
        self.clock.after(SWEEP_SECS, self._sweep)

    def _schedule(self) -> None:
        deadline = self.farm.deadline

        def wake() -> None:
            if self._is_stalled(wake):
                return
            if self.is_up and self.farm.deadline <= self.clock.now:
                self.turn(lambda: None)
            if self.is_up:
                self._schedule()

        self.clock.at(max(deadline, self.clock.now + 0.001), wake)

    # -- a turn ------------------------------------------------------------------------------------

    def turn(self, work: Any) -> None:
        """Takes something in, commits, sends: what dispatch's shell does."""
        farm, now = self.farm, self.clock.now
        try:
            work()
            if farm.deadline <= now:
                farm.expire(now)
            while True:
                self._commit()
                if not self._send():
                    break
        except Crashed:
            self.crash()
            return
        self._hand_out()
        self.turns += 1
        if self.turns % CHECK_EVERY == 0:
            farm.check()
        self.watch.settled(self)

    def _commit(self) -> None:
        farm, now = self.farm, self.clock.now
        while (batch := farm.handout.next_batch(now)) is not None:
            self.batches = batch.number
            if self.crash_next and self.random.random() < 0.3:
                raise Crashed
            if self.is_broken:
                farm.handout.commit_failed(batch.number, now)
                continue
            if not self.deferred and self.random.random() < self.faults.failing_commits:
                farm.handout.commit_failed(batch.number, now)
                continue
            if self.deferred or self.random.random() < self.faults.deferred_commits:
                self.deferred.append(batch)
                self.clock.after(self._disk_takes(1.0), self._commit_deferred)
                continue
            if self.random.random() < self.faults.slow_commits:
                self.stalled_until = now + self.random.uniform(0.1, 8.0)
            results = self._apply(batch)
            if self.crash_next:
                raise Crashed
            farm.handout.committed(batch.number, results, now)
        if farm.handout.wants_sync and not self.is_syncing:
            self.is_syncing = True
            self.clock.after(self._disk_takes(0.02), self._sync)

    def _disk_takes(self, seconds: float) -> float:
        if self.random.random() < 5 * self.faults.slow_commits:
            seconds = 20.0
        return self.random.uniform(0.0001, seconds)

    def _apply(self, batch: Batch) -> list[bool]:
        results = self.ledger.apply(batch.writes, self.offset(), 1.0)
        self.committed = batch.number
        self.watch.wrote(batch, results)
        return results

    def _commit_deferred(self) -> None:
        if not self.is_up or not self.deferred:
            return
        batch = self.deferred.pop(0)
        if self.random.random() < self.faults.failing_commits:
            self.deferred.clear()
            self.is_broken = True
            self.post(CommitFailed(batch.number, "simulated"))
        else:
            self.post(Committed(batch.number, self._apply(batch)))

    def _sync(self) -> None:
        if self.is_up:
            self.is_syncing = False
            self.ledger.sync()
            self.synced = self.committed
            self.watch.synced_all()
            self.post(Synced(self.synced))
            if self.disk is not None:
                self._keep_log_short()

    def _keep_log_short(self) -> None:
        if self.random.random() < 0.2:
            self.ledger.checkpoint()
        if self.random.random() < 0.05:
            self.ledger.relieve()

    def _send(self) -> bool:
        farm, now = self.farm, self.clock.now
        if not farm.out.frames:
            return False
        by_peer: dict[bytes, list[Any]] = {}
        for peer, frame, claim in farm.out.frames:
            by_peer.setdefault(peer, []).append((frame, claim))
        farm.out.frames = []
        for peer, items in by_peer.items():
            if not self._put(peer, [frame for frame, _ in items]):
                for _, claim in items:
                    if claim is not None:
                        farm.handout.undeliverable(claim, now)
                farm.peer_gone(peer, now)
        return True

    def _put(self, peer: bytes, frames: list[bytes]) -> bool:
        """Hands a message to the network; False when the peer is gone."""
        connection = self.network.connections.get(peer)
        if connection is None:
            return False
        if peer not in self.outboxes and self.random.random() < self.faults.full_peers:
            self.outboxes[peer] = []
            self.clock.after(self.random.uniform(0.01, 3.0), lambda: self._flush(peer))
        self.watch.sends(self, peer, frames)
        if peer in self.outboxes:
            self.outboxes[peer].append(frames)
        else:
            connection.to_client(frames, self.stalled_until)
        return True

    def _flush(self, peer: bytes) -> None:
        connection = self.network.connections.get(peer)
        for frames in self.outboxes.pop(peer, []):
            if self.is_up and connection is not None:
                connection.to_client(frames)

    def _hand_out(self) -> None:
        farm = self.farm
        events, farm.out.pager = farm.out.pager, []
        if events and self._is_full() and not isinstance(events[0], Reset):
            self.post(PagerStarted())
            events = []
            self.pager_is_new = True
        for event in events:
            if isinstance(event, Reset):
                self.pager_is_new = False
            if not self.pager_is_new:
                self._tell_pager(event)
        for request in farm.out.admissions:
            if self._is_full():
                farm.refuse_admission(request, self.clock.now)
                self.clock.after(0.0, lambda: self.is_up and self.turn(lambda: None))
                continue
            self.admitting.append(request)
            delay = self._disk_takes(0.1)
            self.clock.after(delay, lambda request=request: self._admit(request))
        farm.out.admissions = []
        for query in farm.out.queries:
            if self._is_full():
                farm.refuse_query(query, self.clock.now)
                self.clock.after(0.0, lambda: self.is_up and self.turn(lambda: None))
                continue
            result = getattr(self.ledger, query.method)(*query.arguments)
            if isinstance(result, Rebuild):
                self.watch.rebuilt(result)
            self.post(Answer(query.token, result))
        farm.out.queries, farm.out.logs, farm.out.shell_requests = [], [], []
        self._page()

    def _admit(self, request: AdmissionRequest) -> None:
        if not self.is_up or request not in self.admitting:
            return
        self.admitting.remove(request)
        try:
            taken = ledger_actor._admit_durably(self.port, request)
        except Crashed:
            return
        except Refused as error:
            refused = AdmissionRefused(
                request.token, request.requester, request.sender, str(error), True
            )
            self.post(refused)
            return
        self.watch.admitted(taken.admission, taken.admitted)
        self.watch.synced_all()
        self.post(taken)

    def _is_full(self) -> bool:
        return self.random.random() < self.faults.full_channels

    # -- the pager ---------------------------------------------------------------------------------

    def _tell_pager(self, event: Any) -> None:
        pager = self.pager
        match event:
            case Reset():
                self.pager = pager = Pager(self.config.page_size)
                self.watch.pager_started()
                for entry in event.entries:
                    pager.enter(entry)
                for present in event.sessions:
                    listed = present.session in event.listed
                    pager.session_opened(present.session, present.view, listed=listed)
                self.present = {p.session for p in event.sessions}
            case Enter():
                self.watch.entered(event.entry.job_id)
                pager.enter(event.entry)
            case Leave():
                pager.leave(event.job_id)
            case Present() if event.session in self.present:
                pager.session_changed(event.session, event.view)
            case Present():
                self.present.add(event.session)
                pager.session_opened(event.session, event.view)
            case Gone():
                self.present.discard(event.session)
                pager.session_closed(event.session)
            case ListRequested():
                self.watch.list_requested(event.session)
                pager.request_list(event.session)

    def _page(self) -> None:
        pager = self.pager
        if self.pager_is_new:
            return
        while pager.sendable():
            for name in list(pager.sendable()):
                page = pager.next_page(name)
                session = self.sessions.by_id.get(name)
                if page is None:
                    continue
                if session is None or not self._put(session.peer, [page.frame]):
                    pager.session_closed(name)
                    if session is not None:
                        self.post(PeerGone(session.peer))
                else:
                    self.watch.offered(name, page)
        if self.turns % CHECK_EVERY == 0:
            pager.check()
