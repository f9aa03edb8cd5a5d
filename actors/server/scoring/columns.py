"""What rules look at: one request, and one worker's candidates of one kind as columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from actors.server.block import PRESENT, REPORTED, Block
from actors.server.memory import MARGIN, Load
from actors.server.pool import Pool
from actors.server.profiles import core_factor
from transport.messages import Kind

T = TypeVar("T")
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Rows = NDArray[np.intp] | slice

CONTENTION_PER_BUILD = 0.04
READ_SHARE_MBPS, WRITE_SHARE_MBPS = 1200.0, 1120.0
"""What all transfers in one direction share."""
_NEVER = 1e12
"""Seconds a byte at a speed of zero: beyond every estimate, but 0 bytes still take 0."""


class lazy(Generic[T]):  # noqa: N801 - used like `property`
    """A property that is computed once, without the lock of `functools.cached_property`."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> T:
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


class Averages(Struct, frozen=True, kw_only=True):
    """What the whole instance measured lately; None = no samples, which is not a zero."""

    wait_secs: float | None = None
    """Mean wait of the builds assigned in the last hour."""
    missing_nar_size: float | None = None
    """The last hour's mean of a build's missing bytes, and of its missing paths."""
    missing_count: float | None = None
    build_secs: float | None = None
    """Median of the last 24 h."""
    evaluation_secs: float | None = None
    """Mean over all projects, and the mean core score it was measured on."""
    evaluation_core_score: float | None = None
    path_secs: float = 0.18
    """What a missing path takes beside its bytes."""
    download_mbps: float | None = None
    """The fleet's mean speeds."""
    upload_mbps: float | None = None
    downloads: int = 0
    """Builds in prefetch, and builds in upload."""
    uploads: int = 0
    fetch_workers: int = 0
    """Workers with `fetch`, and those of them without an open claim."""
    idle_fetch_workers: int = 0
    project_claims: dict[str, int] = {}
    """Open claims by project."""


def seconds_per_byte(
    speed_mbps: float | None, fleet_mbps: float | None, share_mbps: float, in_flight: int
) -> float:
    """What one more transfer beside those in flight takes. An unknown speed is the fleet's
    mean; without that only the share counts."""
    rate = share_mbps / (in_flight + 1)
    known = fleet_mbps if speed_mbps is None else speed_mbps
    if known is not None:
        rate = min(known, rate)
    return min(8e-6 / rate, _NEVER) if rate > 0 else _NEVER


class Situation:
    """All of a request but the jobs: the worker, what it does, and what is expected of each
    profile in use, computed when a rule asks for it."""

    def __init__(
        self,
        kind: Kind,
        slot: int,
        pool: Pool,
        now: float,
        averages: Averages,
        load: Load,
    ) -> None:
        self.kind = kind
        self.slot = slot
        self.worker = pool.worker(slot)
        self.now = now
        self.averages = averages
        self.load = load
        self.profiles = pool.profiles[kind]
        self._pool = pool

    @lazy
    def may_have_outputs(self) -> bool:
        """Whether any cell of the worker may say that it has a job's outputs."""
        return self._pool.has_present(self.slot)

    @lazy
    def reserved_rank(self) -> int:
        """Of the held build whose memory is kept free; 0 without one."""
        reserved = self.load.reserved
        located = None if reserved is None else self._pool.locate(reserved.job_id)
        return 0 if located is None else int(located[0].rank[located[1]])

    @lazy
    def project_shares(self) -> Floats | None:
        """By class id: the share of the running work that the class's project holds; None when
        nothing runs."""
        claims = self.averages.project_claims
        total = sum(claims.values())
        if not total:
            return None
        return self._pool.by_class(lambda cls: claims.get(cls.project, 0) / total)

    @lazy
    def download_secs_per_byte(self) -> float:
        worker, averages = self.worker, self.averages
        return seconds_per_byte(
            worker.download_speed_mbps, averages.download_mbps, READ_SHARE_MBPS, averages.downloads
        )

    @lazy
    def upload_secs_per_byte(self) -> float:
        worker, averages = self.worker, self.averages
        return seconds_per_byte(
            worker.upload_speed_mbps, averages.upload_mbps, WRITE_SHARE_MBPS, averages.uploads
        )

    @lazy
    def run_secs(self) -> Floats:
        """By profile: building or evaluating here and now, with what running out of memory may
        cost. 0 when nothing is known."""
        mine = self.worker.cpu_core_score
        if self.kind == "eval":
            secs = self.averages.evaluation_secs or 0.0
            secs *= core_factor(self.averages.evaluation_core_score, mine)
        else:
            secs = self.averages.build_secs or 0.0
        contention = 1 + CONTENTION_PER_BUILD * self.load.open_builds
        if not self.profiles.has_history:
            return _WITHOUT * (secs * contention)
        expected = self.profiles.on_machine(self.slot, (mine, self.worker.ram_free_mb))
        run: Floats = expected.run_secs * contention
        np.multiply(run, secs, out=run, where=expected.unknown)
        return run

    @lazy
    def upload_secs(self) -> Floats:
        """By profile: uploading the expected outputs; 0 when their size is not known."""
        return self.profiles.output_size * self.upload_secs_per_byte

    @lazy
    def work_secs(self) -> Floats:
        """By profile: all of a job that does not depend on what the worker lacks."""
        if self.kind == "eval" or not self.profiles.has_history:
            return self.run_secs
        return self.run_secs + self.upload_secs

    @lazy
    def room_mb(self) -> float:
        return self.load.room_mb(self.worker)

    @lazy
    def need_mb(self) -> Floats:
        """By profile: the memory that a build needs; NaN = no prediction."""
        need: Floats = self.profiles.column("peak_mb") * MARGIN
        return need

    @lazy
    def unfit(self) -> Bools | None:
        """By profile: needs more memory than there is; None = every build fits."""
        if self.profiles.largest_peak_mb * MARGIN <= self.room_mb:
            return None
        unfit: Bools = self.need_mb > self.room_mb
        return unfit if unfit.any() else None

    @lazy
    def held(self) -> Bools | None:
        """By profile: unfit now, but not once the running builds have ended."""
        if self.unfit is None:
            return None
        held: Bools = self.unfit & (self.need_mb <= self.load.room_later_mb(self.worker))
        return held if held.any() else None

    @lazy
    def crowds_out(self) -> Bools | None:
        """By profile: would take memory that is kept free for the held build, if it is smaller;
        whether it is later too is a matter of each job."""
        reserved = self.load.reserved
        if reserved is None or self.room_mb == math.inf or not self.profiles.has_history:
            return None
        crowds: Bools = self.need_mb > self.room_mb - reserved.need_mb
        crowds &= self.profiles.column("peak_mb") <= reserved.peak_mb
        return crowds if crowds.any() else None


_WITHOUT = np.ones(2)
"""For each of the profiles of jobs without history."""


class Extremes:
    """The most favourable values among the jobs of each of some blocks: what a rule gives to no
    job of a block more than (`Rule.best`). Columns with a value for each block."""

    def __init__(self, blocks: Sequence[Block], request: Situation) -> None:
        self._blocks = blocks
        self.request = request
        self.subtotal: Floats = np.zeros(len(blocks))
        """The bound on the sum of the rules before this one."""

    @lazy
    def waited(self) -> Floats:
        """By the job that could start first."""
        oldest = np.array([block.oldest_ready_at for block in self._blocks])
        waited: Floats = np.maximum(np.floor(self.request.now - oldest), 0.0)
        return waited

    @property
    def prioritized(self) -> Bools:
        """Any is."""
        return np.array([block.priorities > 0 for block in self._blocks])

    @property
    def interactive(self) -> Bools:
        """Any is."""
        return np.array([block.interactives > 0 for block in self._blocks])


class Columns:
    """Columns of equal length, made when a rule asks for them; rules must not write to them.

    A few rows may belong to jobs that are no candidates; what rules say of those is ignored.
    Sizes are bytes, times seconds.
    """

    subtotal: Floats | float = 0.0
    """The sum of the rules before this one in the policy."""

    def __init__(
        self, block: Block, rows: Rows, slot: int, request: Situation, candidates: Bools | None
    ) -> None:
        self._block = block
        self._rows = rows
        self._slot = slot
        self._candidates = candidates
        """None = all of them."""
        self.request = request
        self.kind = request.kind
        self.worker = request.worker
        self.now = request.now
        self.averages = request.averages

    def only(self, at: int) -> Columns:
        """The job at one position."""
        rows = self._rows
        row = rows.start + at if isinstance(rows, slice) else int(rows[at])
        return Columns(self._block, slice(row, row + 1), self._slot, self.request, None)

    @property
    def block(self) -> Block:
        """The block whose rows these are; for its figures over all of them."""
        return self._block

    @property
    def oldest_ready_at(self) -> float:
        """No job of the columns, and maybe of the rest of the block, could start earlier."""
        return self._block.oldest_ready_at

    @lazy
    def waited(self) -> Floats:
        """Whole seconds since the job could start, never negative."""
        waited: Floats = self.now - self._block.ready_at[self._rows]
        np.floor(waited, out=waited)
        if self.now < self._block.newest_ready_at:
            np.maximum(waited, 0.0, out=waited)
        return waited

    @lazy
    def prioritized(self) -> Bools:
        return self._block.prioritized[self._rows]

    @lazy
    def interactive(self) -> Bools:
        return self._block.interactive[self._rows]

    @lazy
    def needs_fetch(self) -> Bools:
        """Evaluations whose source is best fetched by a worker with `fetch`."""
        return self._block.needs_fetch[self._rows]

    @lazy
    def ticks(self) -> NDArray[np.uint8]:
        """Ticks of the 5 s timer since the job is pending, at most 255."""
        return self._block.ticks[self._rows]

    @lazy
    def all_reported(self) -> bool:
        """The worker reported each of these jobs."""
        unreported = (self._state & REPORTED) == 0
        if self._candidates is not None:
            unreported &= self._candidates
        return not unreported.any()

    @lazy
    def reported(self) -> Bools:
        """The worker reported the job."""
        return (self._state & REPORTED).astype(np.bool_)

    @lazy
    def outputs_present(self) -> Bools | None:
        """The worker reported that it has all outputs; None = of none."""
        if not self.request.may_have_outputs:
            return None
        present = (self._state & PRESENT).astype(np.bool_)
        return present if present.any() else None

    @lazy
    def missing_nar_size(self) -> Floats:
        """As reported; else the last hour's mean, 0 without samples."""
        return self._reported_or(
            self._block.missing_nar_size[self._slot], self.averages.missing_nar_size
        )

    @lazy
    def missing_count(self) -> Floats:
        """As reported; else the last hour's mean, 0 without samples."""
        return self._reported_or(self._block.missing_count[self._slot], self.averages.missing_count)

    def of_profile(self, values: Floats) -> Floats | float:
        """A figure that each job's profile has; one number if it is the same for all."""
        first = values[0]
        if (values == first).all():
            return float(first)
        return values.take(self._block.profile[self._rows], mode="clip")

    def in_profile(self, flags: Bools | None) -> Bools | None:
        """A flag of each job's profile; None = of no job."""
        if flags is None:
            return None
        found = flags.take(self._block.profile[self._rows], mode="clip")
        return found if found.any() else None

    def of_class(self, values: Floats) -> Floats:
        """A figure that each job's class has, by class id."""
        return values.take(self._block.class_id[self._rows], mode="clip")

    @lazy
    def after_reserved(self) -> Bools:
        """Could start later than the worker's held build, or as early with a larger id."""
        reserved = self.request.load.reserved
        assert reserved is not None
        ready_at = self._block.ready_at[self._rows]
        rank = self._block.rank[self._rows]
        equal = ready_at == reserved.ready_at
        after: Bools = (ready_at > reserved.ready_at) | equal & (rank > self.request.reserved_rank)
        return after

    @lazy
    def held(self) -> Bools | None:
        """Has to wait for memory: its own, or that of the held build; None = none."""
        held = self.in_profile(self.request.held)
        crowding = self.in_profile(self.request.crowds_out)
        if crowding is None:
            return held
        crowding &= self.after_reserved
        return crowding if held is None else held | crowding

    @lazy
    def _state(self) -> NDArray[np.uint8]:
        state: NDArray[np.uint8] = self._block.state[self._slot][self._rows]
        return state

    def _reported_or(self, column: Floats, mean: float | None) -> Floats:
        values = column[self._rows]
        return values if self.all_reported else np.where(self.reported, values, mean or 0.0)


class KeptColumns(Columns):
    """Columns of jobs that are kept apart from the pool: what has to do with time, no more."""

    def __init__(self, ready_at: Floats, request: Situation) -> None:
        self._ready_at = ready_at
        self.request = request
        self.kind = request.kind
        self.worker = request.worker
        self.now = request.now
        self.averages = request.averages

    @property
    def oldest_ready_at(self) -> float:
        return float(self._ready_at.min())

    @lazy
    def waited(self) -> Floats:
        """As of all columns; those that are gone are ready at inf."""
        waited: Floats = np.floor(self.now - self._ready_at)
        return np.maximum(waited, 0.0, out=waited)
