"""Which actor hangs: it takes nothing, though it was nudged. Pure; supervision looks."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

LOOK_SECS = 1.0
HUNG_LOOKS = 10
"""Looks in a row without a sign of life after which an actor counts as hung."""


def _never() -> bool:
    return False


def _nothing() -> None:
    pass


class Inlet(Struct, frozen=True):
    """One thing that an actor waits for (a channel, a socket, the clock), seen from outside.

    A living actor takes something within a look of a nudge, whether anything waits or not: one
    that hangs with nothing to do is found out before somebody needs it.
    """

    name: str
    taken: Callable[[], int]
    """A number that grows with whatever the actor takes, nudges included."""
    nudge: Callable[[], object] = _nothing
    """Lets the actor look once; nothing for one that looks by itself several times a second."""
    is_excused: Callable[[], bool] = _never
    """Whether the actor waits for a thread, or for another actor that is looked at itself."""
    counted_as: str | None = None
    """Whom to count a hang for, if not the actor: one of several cores in one task."""


class HangWatch:
    """Counts looks, not seconds: while the process is stopped or suspended nobody looks, and
    what could not run meanwhile is not blamed for it."""

    def __init__(self, limit: int = HUNG_LOOKS) -> None:
        self._limit = limit
        self._seen: dict[str, tuple[int, int]] = {}

    def look(self, inlet: Inlet) -> bool:
        """One look at an inlet, and a nudge for the next; True when it did not move for as many
        looks in a row as allowed."""
        taken = inlet.taken()
        before, looks = self._seen.get(inlet.name, (-1, 0))
        looks = looks + 1 if taken == before and not inlet.is_excused() else 0
        self._seen[inlet.name] = (taken, looks)
        inlet.nudge()
        return looks >= self._limit
