"""What rules look at: one worker's candidates of one kind, as columns."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from actors.server.block import PRESENT, REPORTED, Block
from actors.server.model import WorkerView
from transport.messages import Kind

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp] | slice


class Averages(Struct, frozen=True, kw_only=True):
    """What the whole instance measured lately; None = no samples, which is not a zero."""

    wait_secs: float | None = None
    """Mean wait of the builds assigned in the last hour."""
    missing_nar_size: float | None = None
    """The last hour's mean of a build's missing bytes, and of its missing paths."""
    missing_count: float | None = None
    download_mbps: float | None = None
    """The fleet's mean speeds."""
    upload_mbps: float | None = None
    downloads: int = 0
    """Builds in prefetch, and builds in upload."""
    uploads: int = 0


class Columns:
    """Columns of equal length, made when a rule asks for them; rules must not write to them.

    A few rows may belong to jobs that are no candidates; what rules say of those is ignored.
    Sizes are bytes, times seconds.
    """

    subtotal: Floats | float = 0.0
    """The sum of the rules before this one in the policy."""

    def __init__(
        self,
        block: Block,
        rows: Rows,
        slot: int,
        kind: Kind,
        worker: WorkerView,
        now: float,
        averages: Averages,
    ) -> None:
        self._block = block
        self._rows = rows
        self._slot = slot
        self.kind = kind
        self.worker = worker
        self.now = now
        self.averages = averages

    @cached_property
    def waited(self) -> Floats:
        """Whole seconds since the job could start, never negative."""
        waited: Floats = self.now - self._block.ready_at[self._rows]
        np.floor(waited, out=waited)
        return np.maximum(waited, 0.0, out=waited)

    @cached_property
    def prioritized(self) -> Bools:
        return self._block.prioritized[self._rows]

    @cached_property
    def interactive(self) -> Bools:
        return self._block.interactive[self._rows]

    @cached_property
    def ticks(self) -> NDArray[np.uint8]:
        """Ticks of the 5 s timer since the job is pending, at most 255."""
        return self._block.ticks[self._rows]

    @cached_property
    def output_size(self) -> Floats:
        """Expected size of the outputs; NaN = unknown."""
        return self._block.output_size[self._rows]

    @cached_property
    def has_output_sizes(self) -> bool:
        """Not all of `output_size` is unknown."""
        return not np.isnan(self.output_size).all()

    @cached_property
    def reported(self) -> Bools:
        """The worker reported the job."""
        return (self._state & REPORTED).astype(np.bool_)

    @cached_property
    def outputs_present(self) -> Bools:
        """The worker reported that it has all outputs."""
        return (self._state & PRESENT).astype(np.bool_)

    @cached_property
    def missing_nar_size(self) -> Floats:
        """As reported; else the last hour's mean, 0 without samples."""
        return self._reported_or(
            self._block.missing_nar_size[self._slot], self.averages.missing_nar_size
        )

    @cached_property
    def missing_count(self) -> Floats:
        """As reported; else the last hour's mean, 0 without samples."""
        return self._reported_or(self._block.missing_count[self._slot], self.averages.missing_count)

    @cached_property
    def _state(self) -> NDArray[np.uint8]:
        state: NDArray[np.uint8] = self._block.state[self._slot][self._rows]
        return state

    @cached_property
    def _all_reported(self) -> bool:
        return bool(self.reported.all())

    def _reported_or(self, column: Floats, mean: float | None) -> Floats:
        values = column[self._rows]
        return values if self._all_reported else np.where(self.reported, values, mean or 0.0)
