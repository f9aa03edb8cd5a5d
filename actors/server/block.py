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


class Block:
    """Columns of up to `rows` jobs. Rows that hold no job have stale values and kind `FREE`."""

    __slots__ = (
        "class_id", "interactive", "kind", "missing_count", "missing_nar_size", "output_size",
        "prioritized", "rank", "ready_at", "state", "ticks",
    )  # fmt: skip

    def __init__(self, rows: int, slots: int) -> None:
        self.kind = np.zeros(rows, np.int8)
        self.class_id = np.zeros(rows, np.int32)
        self.rank = np.zeros(rows, np.int64)
        self.ready_at = np.zeros(rows)
        self.prioritized = np.zeros(rows, np.bool_)
        self.interactive = np.zeros(rows, np.bool_)
        self.output_size = np.zeros(rows)
        """Bytes; NaN = unknown."""
        self.ticks = np.zeros(rows, np.uint8)
        # Zeroed memory is not there before it is written, and never read as a NaN.
        self.state = np.zeros((slots, rows), np.uint8)
        self.missing_nar_size = np.zeros((slots, rows))
        self.missing_count = np.zeros((slots, rows))

    def resize(self, slots: int) -> None:
        """Makes room for more workers."""
        self.state = _with_slots(self.state, slots)
        self.missing_nar_size = _with_slots(self.missing_nar_size, slots)
        self.missing_count = _with_slots(self.missing_count, slots)

    def copy_row(self, row: int, source: Block, source_row: int) -> None:
        """Overwrites a row, all workers' cells included."""
        for name in (
            "kind", "class_id", "rank", "ready_at", "prioritized", "interactive", "output_size",
            "ticks",
        ):  # fmt: skip
            getattr(self, name)[row] = getattr(source, name)[source_row]
        for name in ("state", "missing_nar_size", "missing_count"):
            getattr(self, name)[:, row] = getattr(source, name)[:, source_row]


def _with_slots(matrix: NDArray[Any], slots: int) -> NDArray[Any]:
    grown = np.zeros((slots, matrix.shape[1]), matrix.dtype)
    grown[: len(matrix)] = matrix
    return grown
