"""Restarting actors: a pure policy and its Trio shell.

Each child runs in a cancel scope of its own, and a new incarnation starts only when the old one
is gone; its siblings never notice. What a child needs to go on (inboxes, sockets, tables) belongs
to whoever owns the supervisor.

A child ends by failing, by being killed, or by hanging: once a second the supervisor looks at
its inlets (see `hangs`). One that does not end when it is cancelled cannot be helped, since Trio
preempts nobody: that ends the process.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable

import trio
from msgspec import Struct

from actors.hangs import HUNG_LOOKS, LOOK_SECS, HangWatch, Inlet

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
    inlets: tuple[Inlet, ...] = ()
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


class _Life:
    """One incarnation of a child."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.culprit: str | None = None
        """Whom to count its end for, once it was killed."""
        self.why = "killed"
        self.hangs = HangWatch()
        self.looks_since = 0
        """Looks at it since it was to end."""


class Supervisor:
    """Runs its children until one fails too often or it is cancelled.

    `end_process` is called with one line when a child does not end; it does not return.
    `ending` is called when all children were told to end, which may take them a while.
    """

    def __init__(
        self,
        children: list[Child],
        end_process: Callable[[str], object] | None = None,
        ending: Callable[[], object] | None = None,
    ) -> None:
        self._children = children
        self._end_process = end_process
        self._ending = ending
        self._lives: dict[str, _Life] = {}
        self.intensity = Intensity()

    async def run(self) -> None:
        """Raises `GaveUp`, alone or in a group."""
        async with trio.open_nursery() as nursery:
            for child in self._children:
                nursery.start_soon(self._keep, child, name=child.name)
            nursery.start_soon(self._look_for_hangs)
            nursery.start_soon(self._tell_of_the_end)

    def kill(self, name: str, *, counted_as: str | None = None, why: str = "killed") -> bool:
        """Ends the present incarnation of a child at its next await; False if there is none."""
        life = self._lives.get(name)
        if life is None:
            return False
        if life.culprit is None:
            life.culprit, life.why = counted_as or name, why
        life.scope.cancel()
        return True

    def is_alive(self, name: str) -> bool:
        """Whether a child runs and is not about to end."""
        life = self._lives.get(name)
        return life is not None and life.culprit is None

    async def _keep(self, child: Child) -> None:
        while True:
            culprit, cause = await self._live(child)
            await trio.lowlevel.checkpoint_if_cancelled()  # whatever fails in a shutdown: it ends
            if not self.intensity.failed(culprit, trio.current_time()):
                raise GaveUp(f"actor {culprit} failed too often; the last cause: {cause}")

    async def _live(self, child: Child) -> tuple[str, str]:
        """One incarnation; returns whom to count its end for, and why it ended."""
        errors: list[BaseException] = []
        life = self._lives[child.name] = _Life()
        try:
            with life.scope:
                try:
                    await child.run()
                except* Exception as group:
                    errors += leaves(group)
                    for error in errors:
                        log.error("actor %s failed", child.name, exc_info=error)  # noqa: TRY400 - one each
        finally:
            del self._lives[child.name]
        for error in errors:
            if isinstance(error, child.fatal):
                raise GaveUp(f"actor {child.name} cannot go on: {error}")
        if errors:
            culprit = child.blame(errors[0]) if child.blame else child.name
            cause = "; ".join(dict.fromkeys(map(_told, errors)))
        else:
            culprit = life.culprit or child.name
            cause = life.why if life.culprit else "returned"
        log.warning("actor %s is restarted: %s", culprit, cause)
        return culprit, cause

    async def _tell_of_the_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            if self._ending is not None:
                self._ending()

    async def _look_for_hangs(self) -> None:
        while True:
            await trio.sleep(LOOK_SECS)
            for child in self._children:
                self._look(child)

    def _look(self, child: Child) -> None:
        life = self._lives.get(child.name)
        if life is None:
            return
        for inlet in child.inlets:
            if life.hangs.look(inlet):
                why = f"it hung: nothing taken from its {inlet.name} for {HUNG_LOOKS} s"
                self.kill(child.name, counted_as=inlet.counted_as, why=why)
        if life.culprit is None or any(inlet.is_excused() for inlet in child.inlets):
            life.looks_since = 0
            return
        life.looks_since += 1
        if life.looks_since > HUNG_LOOKS:
            text = f"actor {life.culprit} does not end when it is cancelled ({life.why})"
            if self._end_process is not None:
                self._end_process(text)
            raise GaveUp(text)


def leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The failures in a group of groups, in order."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
