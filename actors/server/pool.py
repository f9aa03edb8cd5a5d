"""The pending jobs as columns, so that a request is ranked by a few passes over arrays.

Theory of operation. Every pending job has a *row*, every worker a *slot*. Rows live in blocks of
8 192, each with one array a column and, for what differs between workers, one matrix
[slot, row of the block]:

- A block's columns and temporaries (64 KiB each) stay in the second-level cache: at 100 000 rows
  a pass over blocks takes a fifth of one over whole columns, and growing the pool copies nothing.
- A byte a cell tells whether the job is a candidate of the worker (`ELIGIBLE`), and whether the
  worker reported its score (`REPORTED`, `PRESENT`). Entering writes that byte for all workers,
  one strided operation, and so ends the scores that the row's last job left in the other
  matrices; leaving touches no worker at all.
- Jobs take the lowest free row. When less than half of the rows are in use, leaving moves the
  last rows into free ones, so that a pass costs what is pending now and not what once was.
- Eligibility is decided once for each worker and class of jobs, and looked up by class id.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from actors.server.block import ELIGIBLE, KIND_CODES, MEMBER, PRESENT, REPORTED, Block
from actors.server.changes import Changes
from actors.server.classes import ClassTable
from actors.server.history import EVALUATION_SYSTEM, History, Key, Profile
from actors.server.model import JobClass, PoolEntry, WorkerView, eligible
from actors.server.profiles import ProfileTable
from actors.server.ranks import Ranks
from transport.messages import Kind, Score


class FleetMean:
    """The mean of a figure over the workers that know it."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def replace(self, old: float | None, new: float | None) -> None:
        """A worker's figure changed; None = not known (any more)."""
        if old is not None:
            self._sum -= old
            self._count -= 1
        if new is not None:
            self._sum += new
            self._count += 1
        if not self._count:
            self._sum = 0.0  # what rounding left over

    @property
    def mean(self) -> float | None:
        return max(0.0, self._sum / self._count) if self._count else None


class Pool:
    """Pending jobs and what each worker said of them.

    `block_rows` and `slots` (places for workers before the first growth) are for tests.
    """

    def __init__(self, *, block_rows: int = 8192, slots: int = 256) -> None:
        self._block_rows = block_rows
        self._slack = block_rows // 8
        """Rows beyond twice the jobs that may stay before rows are moved."""
        self._capacity = slots
        self._blocks: list[Block] = []
        self._rows: dict[str, int] = {}
        self._entries: list[PoolEntry | None] = []
        """By row, up to the last row in use."""
        self._free: list[int] = []
        """Heap of the free rows below the last one in use; rows that came to lie above it since
        stay until they are met."""
        self._ranks = Ranks()
        self._views: list[WorkerView | None] = []
        self._free_slots: list[int] = []
        self._classes = ClassTable(slots)
        self._has_present: list[bool] = []
        self.changes = Changes()
        """Rows that mean another job than before, or another state of it, to every worker."""
        self._reports: list[Changes] = []
        self.tick_count = 0
        self.history = History(self._profile_changed)
        self._clock = 0.0
        self.profiles: dict[Kind, ProfileTable] = {
            "build": ProfileTable(self._known_build),
            "eval": ProfileTable(self._known_evaluation),
        }
        self.download_mbps = FleetMean()
        self.upload_mbps = FleetMean()

    # -- jobs ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._rows

    def __iter__(self) -> Iterator[PoolEntry]:
        """All entries, in no particular order."""
        return (entry for entry in self._entries if entry is not None)

    def get(self, job_id: str) -> PoolEntry | None:
        row = self._rows.get(job_id)
        return None if row is None else self._entries[row]

    def ticks(self, job_id: str) -> int:
        """Ticks of the 5 s timer that a pending job saw, at most 255."""
        block, at = self._locate(self._rows[job_id])
        return int(block.ticks[at])

    def enter(self, entry: PoolEntry) -> bool:
        """The job is pending. False when it was already; the earlier entry stays."""
        if entry.job_id in self._rows:
            return False
        row = self._take_row()
        self._entries[row] = entry
        self._rows[entry.job_id] = row
        class_id = self._classes.acquire(entry.cls, self._workers())
        relabelled = self._ranks.add(entry.job_id)
        block, at = self._locate(row)
        code = KIND_CODES[entry.cls.kind]
        block.fill(
            at,
            kind=code + MEMBER if entry.is_cluster_member else code,
            class_id=class_id,
            profile=self.profiles[entry.cls.kind].acquire(key_of(entry), entry.job_id),
            rank=self._ranks[entry.job_id],
            ready_at=entry.ready_at,
            prioritized=entry.prioritized,
            interactive=entry.interactive,
            needs_fetch=entry.cls.needs_fetch,
        )
        workers = len(self._views)
        block.state[:workers, at] = self._classes.of_class(class_id, workers)
        self.changes.add(row)
        if relabelled:
            for job_id, other in self._rows.items():
                block, at = self._locate(other)
                block.set_rank(at, self._ranks[job_id])
            self.changes.clear()
        return True

    def leave(self, job_id: str) -> PoolEntry | None:
        """The job is not pending any more; its scores end. None when it was not."""
        row = self._rows.pop(job_id, None)
        if row is None:
            return None
        entry = self._entries[row]
        assert entry is not None
        self._ranks.drop(job_id)
        block, at = self._locate(row)
        block.clear(at)
        self.changes.add(row)
        self._classes.release(int(block.class_id[at]))
        profiles = self.profiles[entry.cls.kind]
        profiles.release(int(block.profile[at]), key_of(entry), job_id)
        self._free_row(row)
        while len(self._entries) > 2 * len(self._rows) + self._slack:
            self._move_last()
        return entry

    def set_prioritized(self, job_id: str, prioritized: bool) -> None:
        """Ignored for a job that is not pending."""
        row = self._rows.get(job_id)
        if row is None:
            return
        entry = self._entries[row]
        assert entry is not None
        self._entries[row] = replace(entry, prioritized=prioritized)
        block, at = self._locate(row)
        block.set_prioritized(at, prioritized)
        self.changes.add(row)

    def tick(self, now: float | None = None) -> None:
        """The 5 s timer went off; history that is too old is dropped."""
        if now is not None:
            self._clock = now
            self.history.expire(now)
        self.tick_count += 1
        for block, rows in self.blocks():
            ticks = block.ticks[:rows]
            np.add(ticks, 1, out=ticks, where=ticks < 255)

    # -- workers ---------------------------------------------------------------------------

    def add_worker(self, view: WorkerView) -> int:
        """Returns the worker's slot, which is its own until it is removed."""
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
            self._views[slot] = view
        else:
            slot = len(self._views)
            if slot == self._capacity:
                self._grow_slots()
            self._views.append(view)
            self._has_present.append(False)
            self._reports.append(Changes())
        self._has_present[slot] = False
        self.download_mbps.replace(None, view.download_speed_mbps)
        self.upload_mbps.replace(None, view.upload_speed_mbps)
        for block, rows in self.blocks():
            block.state[slot, :rows] = 0
        self._judge(slot, view)
        return slot

    def update_worker(self, slot: int, view: WorkerView) -> None:
        """Scores stay, those of jobs that are no candidates meanwhile too: what was offered is
        not offered again when a right or system comes back."""
        old = self._views[slot]
        assert old is not None
        self._views[slot] = view
        self.download_mbps.replace(old.download_speed_mbps, view.download_speed_mbps)
        self.upload_mbps.replace(old.upload_speed_mbps, view.upload_speed_mbps)
        if _rights(old) != _rights(view):
            self._judge(slot, view)

    def remove_worker(self, slot: int) -> None:
        """The worker's scores end; its slot may be given to another one."""
        old = self._views[slot]
        assert old is not None
        self._views[slot] = None
        self.download_mbps.replace(old.download_speed_mbps, None)
        self.upload_mbps.replace(old.upload_speed_mbps, None)
        self._classes.judge(slot, None)
        self._reports[slot].clear()
        for block, rows in self.blocks():
            block.state[slot, :rows] = 0
        heapq.heappush(self._free_slots, slot)

    def worker(self, slot: int) -> WorkerView:
        view = self._views[slot]
        assert view is not None
        return view

    def score(self, slot: int, scores: Sequence[Score]) -> int:
        """Takes a worker's reports; a later one replaces an earlier one. Those of jobs that are
        not its candidates are ignored. Returns how many were taken."""
        # One by one takes 1.5 us a report and vectors 30 us a call: a new job brings one report
        # from every worker, a list brings pages of 1 000 (200 us instead of 400 us).
        if not self._has_present[slot]:
            self._has_present[slot] = any(score.outputs_present for score in scores)
        return (
            self._score_each(slot, scores) if len(scores) < 50 else self._score_page(slot, scores)
        )

    def reports(self, slot: int) -> Changes:
        """Rows whose state changed for this worker alone."""
        return self._reports[slot]

    def has_present(self, slot: int) -> bool:
        """Whether the worker ever reported a job whose outputs it has."""
        return self._has_present[slot]

    def _score_each(self, slot: int, scores: Sequence[Score]) -> int:
        taken = 0
        for score in scores:
            row = self._rows.get(score.job_id)
            if row is None:
                continue
            block, at = self._locate(row)
            if block.state[slot, at] & ELIGIBLE:
                block.missing_nar_size[slot, at] = score.missing_nar_size
                block.missing_count[slot, at] = score.missing_count
                present = PRESENT if score.outputs_present else 0
                block.state[slot, at] = ELIGIBLE | REPORTED | present
                self._reports[slot].add(row)
                taken += 1
        return taken

    def _score_page(self, slot: int, scores: Sequence[Score]) -> int:
        rows = np.array([self._rows.get(score.job_id, -1) for score in scores], np.intp)
        sizes = np.array([score.missing_nar_size for score in scores], np.float64)
        counts = np.array([score.missing_count for score in scores], np.float64)
        present = np.array([score.outputs_present for score in scores], np.uint8)
        states = (ELIGIBLE | REPORTED) | (present * np.uint8(PRESENT))
        taken = 0
        self._reports[slot].clear()
        for number in np.unique(rows // self._block_rows):
            if number < 0:  # unknown jobs
                continue
            block, start = self._blocks[number], number * self._block_rows
            of_page = np.flatnonzero((rows >= start) & (rows < start + self._block_rows))
            candidates = block.state[slot].take(rows[of_page] - start) & ELIGIBLE
            of_page = of_page[candidates.view(np.bool_)]
            at = rows[of_page] - start
            # Of a job that is twice in the page the last entry stays, as in a loop.
            block.missing_nar_size[slot, at] = sizes[of_page]
            block.missing_count[slot, at] = counts[of_page]
            block.state[slot, at] = states[of_page]
            taken += len(at)
        return taken

    def is_candidate(self, slot: int, job_id: str) -> bool:
        """Whether a worker may run a pending job."""
        block, at = self._locate(self._rows[job_id])
        return bool(block.state[slot, at] & ELIGIBLE)

    def reported(self, slot: int, job_id: str) -> Score | None:
        """What a worker said of a pending job, if anything."""
        block, at = self._locate(self._rows[job_id])
        state = int(block.state[slot, at])
        if not state & REPORTED:
            return None
        return Score(
            job_id=job_id,
            missing_count=int(block.missing_count[slot, at]),
            missing_nar_size=int(block.missing_nar_size[slot, at]),
            outputs_present=bool(state & PRESENT),
        )

    def seats(
        self, job_id: str, slots: NDArray[np.intp]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.float64]]:
        """Of a pending job, for each of these workers: whether it is a candidate, whether the
        worker reported it, and the missing bytes that it reported."""
        block, at = self._locate(self._rows[job_id])
        state = block.state[slots, at]
        missing = block.missing_nar_size[slots, at]
        return (state & ELIGIBLE) != 0, (state & REPORTED) != 0, missing

    # -- columns ---------------------------------------------------------------------------

    def blocks(self) -> Iterator[tuple[Block, int]]:
        """Every block with how many of its rows, from 0, may be in use."""
        size, width = self._block_rows, len(self._entries)
        for number, block in enumerate(self._blocks):
            rows = min(width - number * size, size)
            if rows <= 0:
                return
            yield block, rows

    @property
    def block_rows(self) -> int:
        """Row r of the pool is row r % `block_rows` of block r // `block_rows`."""
        return self._block_rows

    def block(self, number: int) -> Block | None:
        """None if there are not so many any more."""
        return self._blocks[number] if number < len(self._blocks) else None

    def locate(self, job_id: str) -> tuple[Block, int] | None:
        """The block and row in it of a pending job."""
        row = self._rows.get(job_id)
        return None if row is None else self._locate(row)

    def by_class(self, figure: Callable[[JobClass], float]) -> NDArray[np.float64]:
        """A figure of each class, by class id."""
        return self._classes.figures(figure)

    def entry_at(self, row: int) -> PoolEntry:
        """The job in a row of the pool."""
        entry = self._entries[row]
        assert entry is not None
        return entry

    # -- history ---------------------------------------------------------------------------

    def profile_of(self, entry: PoolEntry) -> Profile | None:
        """What is expected of a job; None when nothing is known."""
        known = self._known_evaluation if entry.cls.kind == "eval" else self._known_build
        return known(key_of(entry))

    def _known_build(self, key: Key) -> Profile | None:
        return self.history.of_build(key, self._clock)

    def _known_evaluation(self, key: Key) -> Profile | None:
        return self.history.of_evaluation(key[0])

    def _profile_changed(self, is_evaluation: bool, key: Key) -> None:
        profile, jobs = self.profiles["eval" if is_evaluation else "build"].changed(key)
        for job_id in jobs:
            block, at = self._locate(self._rows[job_id])
            block.profile[at] = profile

    # -- rows ------------------------------------------------------------------------------

    def _locate(self, row: int) -> tuple[Block, int]:
        return self._blocks[row // self._block_rows], row % self._block_rows

    def _take_row(self) -> int:
        if self._free:
            row = heapq.heappop(self._free)
            if row < len(self._entries):
                return row
            self._free.clear()  # all of them lie above the last row in use
        row = len(self._entries)
        self._entries.append(None)
        if row == len(self._blocks) * self._block_rows:
            self._blocks.append(Block(self._block_rows, self._capacity))
        return row

    def _free_row(self, row: int) -> None:
        self._entries[row] = None
        if row < len(self._entries) - 1:
            heapq.heappush(self._free, row)
            return
        while self._entries and self._entries[-1] is None:
            self._entries.pop()
        # One block stays in reserve: a pool about a block's edge shall not make it each time.
        used = -(-len(self._entries) // self._block_rows)
        del self._blocks[used + 1 :]

    def _move_last(self) -> None:
        last = len(self._entries) - 1
        entry = self._entries[last]
        assert entry is not None
        row = self._take_row()
        block, at = self._locate(row)
        source, source_at = self._locate(last)
        block.copy_row(at, source, source_at)
        source.clear(source_at)
        self._entries[row] = entry
        self._rows[entry.job_id] = row
        self.changes.move(last, row)
        self._free_row(last)

    # -- workers' slots --------------------------------------------------------------------

    def _workers(self) -> Iterator[tuple[int, WorkerView]]:
        return ((slot, view) for slot, view in enumerate(self._views) if view is not None)

    def _judge(self, slot: int, view: WorkerView) -> None:
        """Decides anew which jobs are candidates of the worker."""
        self._reports[slot].clear()
        self._classes.judge(slot, view)
        table = self._classes.of_worker(slot)
        for block, rows in self.blocks():
            state = block.state[slot, :rows]
            np.bitwise_and(state, REPORTED | PRESENT, out=state)
            np.bitwise_or(state, table.take(block.class_id[:rows]), out=state)

    def _grow_slots(self) -> None:
        self._capacity *= 2
        self._classes.grow(self._capacity)
        for block in self._blocks:
            block.resize(self._capacity)

    def check(self) -> None:
        """Asserts the invariants of this core; slow."""
        self._ranks.check()
        in_use = {row for row, entry in enumerate(self._entries) if entry is not None}
        assert in_use == set(self._rows.values())
        assert not self._entries or self._entries[-1] is not None
        assert len(self._entries) <= len(self._blocks) * self._block_rows
        assert len(self._entries) <= 2 * len(self._rows) + self._slack
        holes = [row for row in self._free if row < len(self._entries)]
        assert len(holes) == len(set(holes))
        assert set(holes) | in_use == set(range(len(self._entries)))
        jobs: dict[JobClass, int] = {}
        for job_id, row in self._rows.items():
            entry = self._entries[row]
            assert entry is not None
            assert entry.job_id == job_id
            block, at = self._locate(row)
            assert block.class_id[at] == self._classes[entry.cls]
            jobs[entry.cls] = jobs.get(entry.cls, 0) + 1
            code = KIND_CODES[entry.cls.kind] + (MEMBER if entry.is_cluster_member else 0)
            assert block.kind[at] == code
            assert block.rank[at] == self._ranks[job_id]
            assert block.prioritized[at] == entry.prioritized
            for slot, view in enumerate(self._views):
                judged = view is not None and eligible(entry.cls, view)
                assert bool(block.state[slot, at] & ELIGIBLE) == judged
        for block, rows in self.blocks():
            assert np.count_nonzero(block.kind[rows:]) == 0
        live = sum(np.count_nonzero(block.kind) for block in self._blocks)
        assert live == len(self._rows)
        self._classes.check(jobs)
        for block in self._blocks:
            block.check()
        for kind, table in self.profiles.items():
            entries = {e.job_id: e for e in self if e.cls.kind == kind}
            located = {job_id: self._locate(self._rows[job_id]) for job_id in entries}
            table.check(
                {job_id: int(block.profile[at]) for job_id, (block, at) in located.items()},
                {job_id: key_of(entry) for job_id, entry in entries.items()},
            )


def key_of(entry: PoolEntry) -> Key:
    """Under which its history is kept."""
    if entry.cls.kind == "eval":
        return (entry.cls.project, EVALUATION_SYSTEM)
    return (entry.package, entry.cls.system)


def _rights(view: WorkerView) -> tuple[object, ...]:
    """All of a worker that eligibility depends on."""
    return (
        view.can_eval, view.can_build, view.has_capabilities, view.architectures, view.features,
        view.projects,
    )  # fmt: skip
