"""The columns of up to 8 192 pending jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from transport.messages import Kind

ELIGIBLE, REPORTED, PRESENT = 1, 2, 4
"""Bits of a cell: the job is a candidate of the worker; the worker reported the job; its outputs
are all in the worker's store."""

# Kinds of rows. Members of clusters have their own, which no request names.
FREE = 0
KIND_CODES: dict[Kind, int] = {"eval": 1, "build": 2}
MEMBER = 2

_ROW = ("kind", "class_id", "profile", "rank", "ready_at", "prioritized", "interactive",
        "needs_fetch", "ticks")  # fmt: skip
_CELLS = ("state", "missing_nar_size", "missing_count")
_LAST_RANK = np.iinfo(np.int64).max


class Block:
    """Columns of up to `rows` jobs. Rows that hold no job have kind `FREE`, sort after all others
    by `ready_at` and `rank`, and have stale values otherwise."""

    __slots__ = (
        *_ROW, *_CELLS, "_first_rank", "_newest_ready_at", "_oldest_ready_at", "interactives",
        "priorities",
    )  # fmt: skip

    def __init__(self, rows: int, slots: int) -> None:
        self.kind = np.zeros(rows, np.int8)
        self.class_id = np.zeros(rows, np.int32)
        self.profile = np.zeros(rows, np.intp)
        """Row of the kind's `ProfileTable`."""
        self.rank = np.full(rows, _LAST_RANK, np.int64)
        self.ready_at = np.full(rows, np.inf)
        self.prioritized = np.zeros(rows, np.bool_)
        self.interactive = np.zeros(rows, np.bool_)
        self.needs_fetch = np.zeros(rows, np.bool_)
        self.ticks = np.zeros(rows, np.uint8)
        # Zeroed memory is not there before it is written, and never read as a NaN.
        self.state = np.zeros((slots, rows), np.uint8)
        self.missing_nar_size = np.zeros((slots, rows))
        self.missing_count = np.zeros((slots, rows))
        self.priorities = 0
        """How many rows are prioritized, and how many interactive."""
        self.interactives = 0
        self._oldest_ready_at: float | None = np.inf
        self._newest_ready_at = -np.inf
        self._first_rank: int | None = int(_LAST_RANK)

    @property
    def oldest_ready_at(self) -> float:
        """The lowest `ready_at`; inf when no row is in use."""
        if self._oldest_ready_at is None:
            self._oldest_ready_at = float(self.ready_at.min())
        return self._oldest_ready_at

    @property
    def newest_ready_at(self) -> float:
        """No `ready_at` of a row in use is above it."""
        return self._newest_ready_at

    @property
    def first_rank(self) -> int:
        """The lowest rank."""
        if self._first_rank is None:
            self._first_rank = int(self.rank.min())
        return self._first_rank

    def fill(
        self, row: int, *, kind: int, class_id: int, profile: int, rank: int, ready_at: float,
        prioritized: bool, interactive: bool, needs_fetch: bool,
    ) -> None:  # fmt: skip
        """A job takes a free row; its cells are the caller's."""
        self.kind[row] = kind
        self.class_id[row] = class_id
        self.profile[row] = profile
        self.ready_at[row] = ready_at
        self.prioritized[row] = prioritized
        self.interactive[row] = interactive
        self.needs_fetch[row] = needs_fetch
        self.ticks[row] = 0
        self.set_rank(row, rank)
        self._entered(row)

    def clear(self, row: int) -> None:
        """The row is free."""
        self.kind[row] = FREE
        if self.prioritized[row]:
            self.priorities -= 1
        if self.interactive[row]:
            self.interactives -= 1
        if self._oldest_ready_at is not None and self.ready_at[row] <= self._oldest_ready_at:
            self._oldest_ready_at = None
        if self._first_rank is not None and self.rank[row] <= self._first_rank:
            self._first_rank = None
        self.ready_at[row] = np.inf
        self.rank[row] = _LAST_RANK

    def set_rank(self, row: int, rank: int) -> None:
        """Gives a row its rank, or another one."""
        self.rank[row] = rank
        self._first_rank = None

    def set_prioritized(self, row: int, prioritized: bool) -> None:
        self.priorities += int(prioritized) - int(self.prioritized[row])
        self.prioritized[row] = prioritized

    def resize(self, slots: int) -> None:
        """Makes room for more workers."""
        for name in _CELLS:
            setattr(self, name, _with_slots(getattr(self, name), slots))

    def copy_row(self, row: int, source: Block, source_row: int) -> None:
        """Fills a free row with another one, all workers' cells included."""
        for name in _ROW:
            getattr(self, name)[row] = getattr(source, name)[source_row]
        for name in _CELLS:
            getattr(self, name)[:, row] = getattr(source, name)[:, source_row]
        self._first_rank = None
        self._entered(row)

    def _entered(self, row: int) -> None:
        self.priorities += int(self.prioritized[row])
        self.interactives += int(self.interactive[row])
        ready_at = float(self.ready_at[row])
        if self._oldest_ready_at is not None:
            self._oldest_ready_at = min(self._oldest_ready_at, ready_at)
        self._newest_ready_at = max(self._newest_ready_at, ready_at)

    def check(self) -> None:
        """Asserts the invariants of this class; slow."""
        used = self.kind != FREE
        assert self.priorities == int(self.prioritized[used].sum())
        assert self.interactives == int(self.interactive[used].sum())
        assert self.oldest_ready_at == self.ready_at.min()
        assert self.first_rank == self.rank.min()
        assert np.isinf(self.ready_at[~used]).all()
        assert not used.any() or self.newest_ready_at >= self.ready_at[used].max()


def _with_slots(matrix: NDArray[Any], slots: int) -> NDArray[Any]:
    grown = np.zeros((slots, matrix.shape[1]), matrix.dtype)
    grown[: len(matrix)] = matrix
    return grown
