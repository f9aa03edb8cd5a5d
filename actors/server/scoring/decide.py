"""From rules to one decision, and its explanation.

A decision takes a pass over the worker's candidates of a kind, block by block: each rule gives
a column, their sum is compared, the best row of the best block wins. Where each rule of the
policy can say what no job of a block scores above, blocks are taken in the order of these bounds,
and those that cannot beat what was found are passed over.

Totals are compared as whole millionths, which is what 'rounded to 1e-6 before floor and ties'
means; only the rows near the maximum are rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from actors.server.block import ELIGIBLE, KIND_CODES, Block
from actors.server.memory import Load, Reservation
from actors.server.pool import Pool
from actors.server.scoring.columns import (
    Averages,
    Bools,
    Columns,
    Extremes,
    Floats,
    Rows,
    Situation,
)
from actors.server.scoring.rules import Rule
from transport.messages import Kind

_MILLIONTHS = 1e6
_LOWEST = -np.finfo(np.float64).max
_MAX_SORTED = 64
"""Of a block's best, what is sorted one by one; more of them are all alike."""
_LAST_RANK = np.iinfo(np.int64).max
HELD_AFTER_SECS = 60.0
"""How long a build that is not prioritized could start before memory is kept free for it."""
_IDLE = Load()


class Policy(Struct, frozen=True):
    """A named list of rules; a rule sees the sum of those before it."""

    name: str
    description: str
    rules: tuple[Rule, ...]

    @property
    def holds_memory(self) -> bool:
        """Whether a rule holds builds back until there is memory for them."""
        return any(getattr(rule, "holds_memory", False) for rule in self.rules)


class Decision(Struct, frozen=True):
    """The best candidate of a request."""

    job_id: str
    total: float
    """Rounded to 1e-6."""
    scores: dict[str, float]
    """By rule."""
    candidates: int
    """How many were looked at, vetoed ones included. What could not win is not looked at."""
    rejected: tuple[tuple[str, float], ...] = ()
    """The next best and their totals."""


class NoWinner(Struct, frozen=True):
    """A request that nothing was found for."""

    candidates: int
    """How many were looked at."""
    best: tuple[tuple[str, float], ...]
    """Those without a veto that came nearest, and their totals, all below 0."""


class Explanation(Struct, frozen=True):
    """What a policy says of one job on one worker."""

    eligible: bool
    """If not, the rest is empty."""
    scores: dict[str, float]
    total: float
    """Rounded to 1e-6."""
    vetoes: tuple[str, ...]
    """Names of the rules that veto it."""


class Faults:
    """Rules that raised. Each is told once; the candidates it raised for are passed over."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._known: set[str] = set()

    def add(self, rule: str, error: Exception) -> None:
        if rule not in self._known:
            self._known.add(rule)
            self._tell(f"rule {rule} failed, its jobs are passed over: {error!r}")


_SILENT = Faults()


class _Found(NamedTuple):
    """A candidate among the best; a greater tuple is a better one."""

    millionths: float
    minus_rank: int
    number: int
    """Of the block."""
    row: int


class _Scored(NamedTuple):
    """A block's candidates."""

    rows: Rows
    parts: list[Floats | float]
    total: Floats
    """-inf where vetoed or no candidate."""
    size: int


class _Request:
    """One request for a job, and how blocks are scored for it."""

    def __init__(
        self, policy: Policy, pool: Pool, slot: int, kind: Kind, now: float, averages: Averages,
        load: Load, faults: Faults,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.pool = pool
        self.slot = slot
        self.faults = faults
        self.code = KIND_CODES[kind]
        self.vetoes: list[tuple[str, Bools]] = []
        """What rules vetoed, of all that was scored."""
        reserved = None if load.reserved is None else pool.locate(load.reserved.job_id)
        self.situation = Situation(
            kind, slot, pool.worker(slot), now, averages, load, pool.profiles[kind],
            may_have_outputs=pool.has_present(slot),
            reserved_rank=0 if reserved is None else int(reserved[0].rank[reserved[1]]),
            project_shares=_shares(pool, averages),
        )  # fmt: skip

    def candidates(self, block: Block, width: int, excluded: Sequence[tuple[Block, int]]) -> Bools:
        mask: Bools = block.kind[:width] == self.code
        mask &= (block.state[self.slot, :width] & ELIGIBLE).view(np.bool_)
        for other, at in excluded:
            if other is block:
                mask[at] = False
        return mask

    def bounds(self, blocks: Sequence[Block]) -> Floats | None:
        """What no total of each block is above; None when a rule cannot say."""
        extremes = Extremes(blocks, self.situation)
        for rule in self.policy.rules:
            best = getattr(rule, "best", None)
            if best is None:
                return None
            try:
                extremes.subtotal += best(extremes)
            except Exception as error:  # noqa: BLE001 - whatever a package's rule raises
                self.faults.add(rule.name, error)
                return None
        return extremes.subtotal

    def score(self, block: Block, width: int, mask: Bools) -> _Scored | None:
        """All candidates of a block; None when there are none."""
        count = int(np.count_nonzero(mask))
        if not count:
            return None
        # Gathering takes 5 us a column of 8 192. Where most rows are candidates it costs more
        # than it saves: their scores are computed with the others' and struck out.
        dense = 4 * count >= 3 * width
        rows: Rows = slice(0, width) if dense else np.flatnonzero(mask)
        view = Columns(block, rows, self.slot, self.situation, mask if dense else None)
        parts, total, usable = self.run(view, width if dense else count)
        if dense and count < width:
            usable = mask if usable is None else usable & mask
        if usable is not None:
            np.copyto(total, -np.inf, where=~usable)
        return _Scored(rows, parts, total, count)

    def run(self, view: Columns, count: int) -> tuple[list[Floats | float], Floats, Bools | None]:
        """Each rule's column, their sum, and what is not vetoed (None = all)."""
        parts: list[Floats | float] = []
        total = view.subtotal = np.zeros(count)
        usable: Bools | None = None
        for rule in self.policy.rules:
            try:
                part, veto = rule.score(view), rule.veto(view)
            except Exception as error:  # noqa: BLE001 - whatever a package's rule raises
                part, veto = self._one_by_one(rule, view, count, error)
            parts.append(part)
            if not isinstance(part, float) or part != 0.0:
                total += part
            if veto is not None:
                self.vetoes.append((rule.name, veto))
                usable = ~veto if usable is None else usable & ~veto
        return parts, total, usable

    def _one_by_one(
        self, rule: Rule, view: Columns, count: int, error: Exception
    ) -> tuple[Floats, Bools]:
        """A rule that failed, for each job alone: a job that it fails for is vetoed."""
        self.faults.add(rule.name, error)
        part, veto = np.zeros(count), np.zeros(count, np.bool_)
        subtotal = np.broadcast_to(view.subtotal, count)
        for at in range(count):
            single = view.only(at)
            single.subtotal = subtotal[at : at + 1]
            try:
                score, vetoed = rule.score(single), rule.veto(single)
            except Exception:  # noqa: BLE001 - as above
                veto[at] = True
            else:
                part[at] = score if isinstance(score, float) else score[0]
                veto[at] = vetoed is not None and bool(vetoed[0])
        return part, veto


def decide(
    policy: Policy,
    pool: Pool,
    slot: int,
    kind: Kind,
    now: float,
    averages: Averages,
    exclude: Collection[str] = (),
    *,
    load: Load = _IDLE,
    rejected: int = 0,
    faults: Faults = _SILENT,
) -> Decision | NoWinner:
    """The candidate to assign to a worker: the highest total without a veto and not below 0,
    equal totals to the smaller job id. `exclude` holds job ids that
    are passed over; `rejected` is how many of the next best are named too."""
    request = _Request(policy, pool, slot, kind, now, averages, load, faults)
    excluded = [located for job_id in exclude if (located := pool.locate(job_id)) is not None]
    wanted = 1 + rejected
    best: list[_Found] = []
    scores: dict[str, float] = {}
    considered = 0
    blocks = list(pool.blocks())
    order: Sequence[int] = range(len(blocks))
    bounds = None
    if len(blocks) > 1:
        bounds = request.bounds([block for block, _ in blocks])
        if bounds is not None:
            first_ranks = np.array([block.first_rank for block, _ in blocks])
            order = np.lexsort((first_ranks, -bounds)).tolist()
    for number in order:
        block, width = blocks[number]
        if (
            bounds is not None
            and len(best) == wanted
            and not _may_beat(float(bounds[number]), block, best[-1])
        ):
            continue
        scored = request.score(block, width, request.candidates(block, width, excluded))
        if scored is None:
            continue
        considered += scored.size
        if len(best) == wanted and np.maximum.reduce(scored.total) < (
            best[-1].millionths / _MILLIONTHS - 1e-6
        ):
            continue
        first = best[0] if best else None
        best = _merged(best, _top(scored, block, number, wanted), wanted)
        if best and best[0] is not first and best[0].number == number:
            at = _position(scored.rows, best[0].row)
            scores = _named(policy, _at(scored.parts, at))
    ranking = tuple(
        (pool.entry_at(found.number, found.row).job_id, found.millionths / _MILLIONTHS)
        for found in best
    )
    if not best or best[0].millionths < 0:
        return NoWinner(considered, ranking)
    job_id, total = ranking[0]
    return Decision(job_id, total, scores, considered, ranking[1:])


def explain(
    policy: Policy,
    pool: Pool,
    slot: int,
    job_id: str,
    now: float,
    averages: Averages,
    *,
    load: Load = _IDLE,
) -> Explanation | None:
    """What the policy says of a job on a worker; None if the job is not pending."""
    located, entry = pool.locate(job_id), pool.get(job_id)
    if located is None or entry is None:
        return None
    block, at = located
    if not block.state[slot, at] & ELIGIBLE:
        return Explanation(eligible=False, scores={}, total=0.0, vetoes=())
    request = _Request(policy, pool, slot, entry.cls.kind, now, averages, load, _SILENT)
    view = Columns(block, slice(at, at + 1), slot, request.situation, None)
    parts, total, _ = request.run(view, 1)
    return Explanation(
        eligible=True,
        scores=_named(policy, _at(parts, 0)),
        total=float(np.rint(total[0] * _MILLIONTHS)) / _MILLIONTHS + 0.0,
        vetoes=tuple(name for name, veto in request.vetoes if veto[0]),
    )


def outranking(
    policy: Policy,
    pool: Pool,
    slot: int,
    job_id: str,
    now: float,
    averages: Averages,
    *,
    load: Load = _IDLE,
) -> int:
    """How many candidates of the worker come before a pending one that is not vetoed."""
    located, entry = pool.locate(job_id), pool.get(job_id)
    assert located is not None
    assert entry is not None
    request = _Request(policy, pool, slot, entry.cls.kind, now, averages, load, _SILENT)
    mine = explain(policy, pool, slot, job_id, now, averages, load=load)
    assert mine is not None
    total, rank = round(mine.total * _MILLIONTHS), int(located[0].rank[located[1]])
    before = 0
    for block, width in pool.blocks():
        scored = request.score(block, width, request.candidates(block, width, ()))
        if scored is None:
            continue
        millionths = np.rint(scored.total * _MILLIONTHS)
        before += int(np.count_nonzero(millionths > total))
        equal = millionths == total
        before += int(np.count_nonzero(block.rank[scored.rows][equal] < rank))
    return before


def find_held(
    pool: Pool, slot: int, now: float, averages: Averages, load: Load
) -> Reservation | None:
    """The build whose memory is to be kept free on a worker that keeps none free: the oldest of
    those that wait for memory there and are prioritized or could start 60 s ago."""
    request = _Request(_NO_RULES, pool, slot, "build", now, averages, load, _SILENT)
    held = request.situation.held
    if held is None:
        return None
    best: tuple[float, int, int, int] | None = None
    for number, (block, width) in enumerate(pool.blocks()):
        mask = request.candidates(block, width, ())
        mask &= held.take(block.profile[:width], mode="clip")
        rows = np.flatnonzero(mask)
        if not len(rows):
            continue
        old = np.floor(now - block.ready_at[rows]) >= HELD_AFTER_SECS
        rows = rows[old | block.prioritized[rows]]
        if not len(rows):
            continue
        ready_at = block.ready_at[rows]
        oldest = rows[ready_at == ready_at.min()]
        row = int(oldest[block.rank[oldest].argmin()])
        key = (float(block.ready_at[row]), int(block.rank[row]), number, row)
        best = key if best is None else min(best, key)
    if best is None:
        return None
    entry = pool.entry_at(best[2], best[3])
    profile = pool.profile_of(entry)
    assert profile is not None
    return Reservation(entry.job_id, profile.peak_mb, entry.ready_at)


_NO_RULES = Policy("", "", ())


def _shares(pool: Pool, averages: Averages) -> Floats | None:
    total = sum(averages.project_claims.values())
    if not total:
        return None
    claims = averages.project_claims
    return pool.by_class(lambda cls: claims.get(cls.project, 0) / total)


def _may_beat(bound: float, block: Block, worst: _Found) -> bool:
    """Whether a block can have something better; bounds are rounded like totals, and a unit more
    for what rounding does to sums."""
    millionths = bound * _MILLIONTHS
    if millionths < worst.millionths - 0.5 - 1e-3:
        return False
    if millionths >= worst.millionths + 0.5 - 1e-3:
        return True
    return -block.first_rank > worst.minus_rank


def _top(scored: _Scored, block: Block, number: int, wanted: int) -> list[_Found]:
    """The best rows of a block, at most `wanted`. Overwrites totals."""
    total, rows = scored.total, scored.rows
    last = max(0, len(total) - wanted)
    millionths = np.multiply(total, _MILLIONTHS, out=total)
    parted = np.partition(millionths, last)
    worst = float(parted[last])
    if np.isnan(parted[last:]).any():  # these sort last
        # Some rule's: such a row cannot be compared, the others can.
        millionths[np.isnan(millionths)] = -np.inf
        worst = float(np.partition(millionths, last)[last])
    np.rint(millionths, out=millionths)
    worst = float(np.rint(worst))
    # What rounds to more than the last of the best is itself among them: there are few. Those
    # that round to the same may be many.
    floor = worst if worst > -np.inf else _LOWEST
    is_best = millionths >= floor
    is_alike = np.count_nonzero(is_best) > _MAX_SORTED
    best = (millionths > floor if is_alike else is_best).nonzero()[0]
    at = best if isinstance(rows, slice) else rows[best]
    found = [
        _Found(value + 0.0, -rank, number, row)  # + 0.0: never -0.0
        for value, rank, row in zip(
            millionths[best].tolist(), block.rank[at].tolist(), at.tolist(), strict=True
        )
    ]
    found.sort(reverse=True)
    del found[wanted:]
    if is_alike:
        ranks = np.where(millionths == worst, block.rank[rows], _LAST_RANK)
        while len(found) < wanted:
            first = int(ranks.argmin())
            rank = int(ranks[first])
            if rank == _LAST_RANK:
                break
            ranks[first] = _LAST_RANK
            row = first if isinstance(rows, slice) else int(rows[first])
            found.append(_Found(worst + 0.0, -rank, number, row))
    return found


def _merged(best: list[_Found], more: list[_Found], wanted: int) -> list[_Found]:
    return sorted([*best, *more], reverse=True)[:wanted] if best else more


def _position(rows: Rows, row: int) -> int:
    return row if isinstance(rows, slice) else int(np.searchsorted(rows, row))


def _at(parts: Sequence[Floats | float], at: int) -> list[float]:
    return [part if isinstance(part, float) else float(part[at]) for part in parts]


def _named(policy: Policy, scores: Sequence[float]) -> dict[str, float]:
    return {rule.name: score for rule, score in zip(policy.rules, scores, strict=True)}
