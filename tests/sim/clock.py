"""Virtual time: one heap of what happens next, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Runs events in order of time, then of being planned."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.wall_shift = 0.0
        """What the wall clock shows beyond `now`; it jumps."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._planned = 0

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._planned += 1
        heapq.heappush(self._heap, (max(when, self.now), self._planned, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Lets the next event happen; False when there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True
