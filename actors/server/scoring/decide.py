"""From rules to one decision, and its explanation.

A decision takes one pass over the worker's candidates of a kind, block by block: each rule gives
a column, their sum is compared, the best row of the best block wins. Totals are compared as whole
millionths, which is what 'rounded to 1e-6 before floor and ties' means; only the rows near the
maximum are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from actors.server.block import ELIGIBLE, KIND_CODES
from actors.server.pool import Pool
from actors.server.scoring.columns import Averages, Bools, Columns, Floats, Rows
from actors.server.scoring.rules import Rule
from transport.messages import Kind

_MILLIONTHS = 1e6


class Policy(Struct, frozen=True):
    """A named list of rules; a rule sees the sum of those before it."""

    name: str
    description: str
    rules: tuple[Rule, ...]


class Decision(Struct, frozen=True):
    """The best candidate of a request."""

    job_id: str
    total: float
    """Rounded to 1e-6."""
    scores: dict[str, float]
    """By rule."""
    candidates: int
    """How many were considered, vetoed ones included."""


class Explanation(Struct, frozen=True):
    """What a policy says of one job on one worker."""

    eligible: bool
    """If not, the rest is empty."""
    scores: dict[str, float]
    total: float
    """Rounded to 1e-6."""
    vetoes: tuple[str, ...]
    """Names of the rules that veto it."""


class _Best(Struct, frozen=True):
    """The best row of a block."""

    millionths: float
    rank: int
    at: int
    """Its position among the candidates of the block."""

    def beats(self, other: _Best) -> bool:
        return (self.millionths, -self.rank) > (other.millionths, -other.rank)


def decide(
    policy: Policy,
    pool: Pool,
    slot: int,
    kind: Kind,
    now: float,
    averages: Averages,
    exclude: Collection[str] = (),
) -> Decision | None:
    """The candidate to assign to a worker: the highest total without a veto and not below 0,
    equal totals to the smaller job id. None if there is none. `exclude` holds job ids that
    are passed over."""
    worker = pool.worker(slot)
    excluded = [located for job_id in exclude if (located := pool.locate(job_id)) is not None]
    best: _Best | None = None
    winner, scores, considered = "", [], 0
    for number, (block, width) in enumerate(pool.blocks()):
        mask: Bools = block.kind[:width] == KIND_CODES[kind]
        mask &= (block.state[slot, :width] & ELIGIBLE).view(np.bool_)
        for other, at in excluded:
            if other is block:
                mask[at] = False
        count = int(np.count_nonzero(mask))
        if not count:
            continue
        considered += count
        # Gathering takes 5 us a column of 8 192. Where most rows are candidates it costs more
        # than it saves: their scores are computed with the others' and struck out.
        dense = 4 * count >= 3 * width
        rows: Rows = slice(0, width) if dense else np.flatnonzero(mask)
        view = Columns(block, rows, slot, kind, worker, now, averages)
        parts, total = _scores(policy, view, width if dense else count)
        if count < width and dense:
            np.putmask(total, ~mask, -np.inf)
        for _, veto in _vetoes(policy, view):
            np.putmask(total, veto, -np.inf)
        found = _best_of(total, block.rank, rows)
        if found is not None and (best is None or found.beats(best)):
            best = found
            row = found.at if isinstance(rows, slice) else int(rows[found.at])
            winner = pool.entry_at(number, row).job_id
            scores = _at(parts, found.at)
    if best is None:
        return None
    return Decision(
        job_id=winner,
        total=best.millionths / _MILLIONTHS,
        scores=_named(policy, scores),
        candidates=considered,
    )


def explain(
    policy: Policy, pool: Pool, slot: int, job_id: str, now: float, averages: Averages
) -> Explanation | None:
    """What the policy says of a job on a worker; None if the job is not pending."""
    located, entry = pool.locate(job_id), pool.get(job_id)
    if located is None or entry is None:
        return None
    block, at = located
    if not block.state[slot, at] & ELIGIBLE:
        return Explanation(eligible=False, scores={}, total=0.0, vetoes=())
    rows = slice(at, at + 1)
    view = Columns(block, rows, slot, entry.cls.kind, pool.worker(slot), now, averages)
    parts, total = _scores(policy, view, 1)
    return Explanation(
        eligible=True,
        scores=_named(policy, _at(parts, 0)),
        total=float(np.rint(total[0] * _MILLIONTHS)) / _MILLIONTHS + 0.0,
        vetoes=tuple(rule.name for rule, veto in _vetoes(policy, view) if veto[0]),
    )


def _scores(policy: Policy, view: Columns, count: int) -> tuple[list[Floats | float], Floats]:
    """Each rule's column, and their sum."""
    parts: list[Floats | float] = []
    total = view.subtotal = np.zeros(count)
    for rule in policy.rules:
        part = rule.score(view)
        parts.append(part)
        total += part
    return parts, total


def _vetoes(policy: Policy, view: Columns) -> Iterator[tuple[Rule, Bools]]:
    for rule in policy.rules:
        veto = rule.veto(view)
        if veto is not None:
            yield rule, veto


def _best_of(total: Floats, ranks: NDArray[np.int64], rows: Rows) -> _Best | None:
    """The row with the highest total, not below 0, and of these the one with the lowest rank."""
    top = float(total.max())
    if math.isnan(top):  # some rule's: such a row cannot be compared, the others can
        total = np.where(np.isnan(total), -np.inf, total)
        top = float(total.max())
    if top < -1e-6:
        return None
    near = np.flatnonzero(total >= top - 2e-6)
    millionths = np.rint(total[near] * _MILLIONTHS)
    highest = float(millionths.max())
    if highest < 0:
        return None
    equal = near[millionths == highest]
    rank = ranks[rows][equal]
    first = int(rank.argmin())
    return _Best(highest + 0.0, int(rank[first]), int(equal[first]))  # + 0.0: never -0.0


def _at(parts: Sequence[Floats | float], at: int) -> list[float]:
    return [part if isinstance(part, float) else float(part[at]) for part in parts]


def _named(policy: Policy, scores: Sequence[float]) -> dict[str, float]:
    return {rule.name: score for rule, score in zip(policy.rules, scores, strict=True)}
