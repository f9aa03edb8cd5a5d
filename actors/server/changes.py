"""Which rows of the pool changed lately, for those who keep something about rows."""

from __future__ import annotations

from collections.abc import Sequence

MAX_CHANGES = 1_024
"""How many are remembered. Who asks later than that starts anew."""


class Changes:
    """Rows in the order they changed. A place in it is the number of changes before it."""

    __slots__ = ("_first", "_rows")

    def __init__(self) -> None:
        self._rows: list[tuple[int, int]] = []
        self._first = 0
        """Place of the oldest that is remembered."""

    @property
    def end(self) -> int:
        """The place after the newest change."""
        return self._first + len(self._rows)

    def add(self, row: int) -> None:
        """A row is not what it was."""
        self._add((row, row))

    def move(self, source: int, target: int) -> None:
        """What was in one row, which is free now, is in another one that was free."""
        self._add((source, target))

    def _add(self, change: tuple[int, int]) -> None:
        if len(self._rows) >= MAX_CHANGES:
            del self._rows[: MAX_CHANGES // 2]
            self._first += MAX_CHANGES // 2
        self._rows.append(change)

    def clear(self) -> None:
        """Any row may have changed."""
        self._first += len(self._rows) + 1
        self._rows.clear()

    def since(self, place: int) -> Sequence[tuple[int, int]] | None:
        """From a place on: (row, the same row) of what changed, (source, target) of what moved;
        None when that is not known any more."""
        if place < self._first:
            return None
        return self._rows[place - self._first :]
