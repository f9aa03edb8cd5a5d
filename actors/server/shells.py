"""The shells of pager and reaper: they only move things between the world and their core."""

from __future__ import annotations

import contextlib

import trio

from actors.hangs import Inlet
from actors.server.effects import (
    Enter,
    Gone,
    Leave,
    ListRequested,
    PagerEvent,
    PagerStarted,
    PeerGone,
    Present,
    Reset,
)
from actors.server.pager import Pager
from actors.server.reaper import FULL_SECS, SWEEP_SECS, Reaper
from actors.server.world import World
from transport.interface import Sent

BLOCKED_PAUSE_SECS = 0.02


class PagerShell:
    """Feeds the pager and sends a page per turn, so that others are served between pages."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pager: Pager | None = None
        self._taken = 0

    @property
    def is_ready(self) -> bool:
        """Whether it knows everything that is pending."""
        return self._pager is not None

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """What the pager takes from."""

        def nudge() -> None:
            with contextlib.suppress(trio.WouldBlock):  # full: it has enough to take
                self._world.to_pager.send_nowait([])

        return (Inlet("inbox", lambda: self._taken, nudge),)

    async def run(self) -> None:
        """One incarnation: everything is offered anew after the `Reset` that it asks for."""
        self._pager = None
        self._peers: dict[str, bytes] = {}
        self._blocked: set[str] = set()
        self._unreachable: set[str] = set()
        """Sessions that a page found gone; dispatch will say so too."""
        while not self._world.post(PagerStarted()):
            await trio.sleep(BLOCKED_PAUSE_SECS)
        while True:
            await self._take_events()
            self._send_pages()
            await trio.lowlevel.checkpoint()

    async def _take_events(self) -> None:
        """Takes what waits; waits for more only when there is nothing to send."""
        events = self._world.pager_events
        pager = self._pager
        if pager is None or not pager.sendable():
            timeout = BLOCKED_PAUSE_SECS if self._blocked else float("inf")
            with trio.move_on_after(timeout):
                self._apply(await events.receive())
        while True:
            try:
                self._apply(events.receive_nowait())
            except trio.WouldBlock:
                break
        for session in self._blocked:
            if self._pager is not None:
                self._pager.unblocked(session)
        self._blocked.clear()

    def _apply(self, batch: list[PagerEvent]) -> None:
        self._taken += 1
        for event in batch:
            if isinstance(event, Reset):
                self._reset(event)
            elif self._pager is not None:  # else it is older than the `Reset` to come
                self._apply_one(self._pager, event)

    def _apply_one(self, pager: Pager, event: PagerEvent) -> None:
        match event:
            case Enter():
                pager.enter(event.entry)
            case Leave():
                pager.leave(event.job_id)
            case Present() if event.session in self._unreachable:
                pass
            case Present():
                if event.session in self._peers:
                    pager.session_changed(event.session, event.view)
                else:
                    self._peers[event.session] = event.peer
                    pager.session_opened(event.session, event.view)
            case Gone():
                pager.session_closed(event.session)
                self._unreachable.discard(event.session)
                self._peers.pop(event.session, None)
                self._blocked.discard(event.session)
            case ListRequested():
                pager.request_list(event.session)

    def _reset(self, reset: Reset) -> None:
        self._pager = pager = Pager(self._world.config.page_size)
        self._peers = {present.session: present.peer for present in reset.sessions}
        self._blocked.clear()
        self._unreachable.clear()
        for entry in reset.entries:
            pager.enter(entry)
        for present in reset.sessions:
            pager.session_opened(
                present.session, present.view, listed=present.session in reset.listed
            )

    def _send_pages(self) -> None:
        """One page for each session that has something to be sent."""
        pager = self._pager
        if pager is None:
            return
        for session in list(pager.sendable()):
            page = pager.next_page(session)
            if page is None:
                continue
            sent = self._world.outbox.send_page(self._peers[session], page.frame)
            if sent is Sent.FULL:
                pager.blocked(session, page)
                self._blocked.add(session)
            elif sent is Sent.GONE:
                pager.session_closed(session)
                self._unreachable.add(session)
                self._world.post(PeerGone(self._peers.pop(session)))


class ReaperShell:
    """Sweeps for the silent; what dispatch's inbox does not take is accused again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sweeps = 0

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """It takes nothing but the time, and that twice a second."""
        return (Inlet("clock", lambda: self._sweeps),)

    async def run(self) -> None:
        """One incarnation."""
        world = self._world
        reaper = Reaper(world.config.heartbeat_timeout, trio.current_time())
        while True:
            await trio.sleep(SWEEP_SECS)
            self._sweeps += 1
            now = trio.current_time()
            stuck = world.outbox.stuck(now - FULL_SECS)
            for accusation in reaper.sweep(world.sessions, stuck, now):
                world.post(accusation)
