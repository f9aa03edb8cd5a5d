"""Restarting actors: a pure policy and its Trio shell.

Each child runs in a cancel scope of its own, and a new incarnation starts only when the old one
is gone; its siblings never notice. What a child needs to go on (inboxes, sockets, tables) belongs
to whoever owns the supervisor.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import trio
from msgspec import Struct

log = logging.getLogger("headrace.supervisor")

MAX_RESTARTS, RESTART_WINDOW_SECS = 5, 10.0


class GaveUp(Exception):
    """An actor failed too often, or for good; the text is one line that names it and the cause."""


class Child(Struct, frozen=True):
    """An actor: `run` returns only by failing or being cancelled."""

    name: str
    run: Callable[[], Awaitable[None]]
    blame: Callable[[BaseException], str] | None = None
    """Which of several cores in one task a failure is counted for."""
    fatal: tuple[type[Exception], ...] = ()
    """What no restart helps against."""


class Intensity:
    """How often each actor was restarted, and when that is too often."""

    def __init__(self, limit: int = MAX_RESTARTS, window: float = RESTART_WINDOW_SECS) -> None:
        self._limit = limit
        self._window = window
        self._recent: dict[str, deque[float]] = {}
        self.restarts: dict[str, int] = {}

    def failed(self, name: str, now: float) -> bool:
        """Counts one end of the actor; False when it is not to be restarted any more."""
        recent = self._recent.setdefault(name, deque())
        recent.append(now)
        while recent[0] <= now - self._window:
            recent.popleft()
        self.restarts[name] = self.restarts.get(name, 0) + 1
        return len(recent) <= self._limit


class Supervisor:
    """Runs its children until one fails too often or it is cancelled."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._scopes: dict[str, trio.CancelScope] = {}
        self._killed: dict[str, str] = {}
        self.intensity = Intensity()

    async def run(self) -> None:
        """Raises `GaveUp`, alone or in a group."""
        async with trio.open_nursery() as nursery:
            for child in self._children:
                nursery.start_soon(self._keep, child, name=child.name)

    def kill(self, name: str, *, counted_as: str | None = None) -> bool:
        """Ends the present incarnation of a child at its next await; False if there is none."""
        scope = self._scopes.get(name)
        if scope is None:
            return False
        self._killed[name] = counted_as or name
        scope.cancel()
        return True

    async def _keep(self, child: Child) -> None:
        while True:
            culprit, cause = await self._live(child)
            if not self.intensity.failed(culprit, trio.current_time()):
                raise GaveUp(f"actor {culprit} failed too often; the last cause: {cause}")

    async def _live(self, child: Child) -> tuple[str, str]:
        """One incarnation; returns whom to count its end for, and why it ended."""
        errors: list[BaseException] = []
        with trio.CancelScope() as scope:
            self._scopes[child.name] = scope
            try:
                await child.run()
            except* Exception as group:  # noqa: BLE001 - whatever an actor dies of, it is restarted
                errors += _leaves(group)
        del self._scopes[child.name]
        killed = self._killed.pop(child.name, None)
        for error in errors:
            if isinstance(error, child.fatal):
                raise GaveUp(f"actor {child.name} cannot go on: {error}")
        if errors:
            log.error("actor %s failed and is restarted", child.name, exc_info=errors[0])
            culprit = child.blame(errors[0]) if child.blame else child.name
            return culprit, "; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in errors))
        log.warning("actor %s ended and is restarted", child.name)
        return killed or child.name, "killed" if killed else "returned"


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves
