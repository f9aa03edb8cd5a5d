"""From rules to one decision.

A decision takes a pass over the worker's candidates of a kind, block by block: each rule gives
a column, their sum is compared, the best row of the best block wins. Where each rule of the
policy can say what no job of a block scores above, blocks are taken in the order of these bounds,
and those that cannot beat what was found are passed over. What a pass found is kept for the next
requests, if the policy allows it (shortlist.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct

from actors.server.block import Block
from actors.server.memory import Load
from actors.server.pool import Pool
from actors.server.scoring.best import MILLIONTHS, NOTHING, Best, best_of, may_beat, merged
from actors.server.scoring.columns import Averages
from actors.server.scoring.scan import SILENT, Bounds, Faults, Policy, Scan, Scored, scores_at
from actors.server.scoring.shortlist import KEPT, KeptRules, Pick, Shortlist
from transport.messages import Kind

_IDLE = Load()
_USEFUL, _PATIENCE = 3, 16
"""Where what was kept served fewer requests than that, so many passes follow without keeping."""


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


class Decider:
    """Decides for all workers of a pool; what it keeps changes no decision.

    `kept` is how many of the best of a pass are; 0 = nothing. Where fewer jobs than `worth_keeping`
    are pending, a pass takes no longer than to look at what changed since."""

    def __init__(
        self,
        policy: Policy,
        pool: Pool,
        faults: Faults = SILENT,
        *,
        kept: int = KEPT,
        worth_keeping: int = 2_000,
    ) -> None:
        self._sought = kept
        self._policy = policy
        self._pool = pool
        self._faults = faults
        self._rules = KeptRules(policy)
        self._can_keep = self._rules.can_keep and kept > 0
        self._worth_keeping = worth_keeping
        self._kept: dict[tuple[int, Kind], tuple[Shortlist, int]] = {}
        """By slot and kind, with the number of requests that each served."""
        self._pauses: dict[tuple[int, Kind], int] = {}
        """Where keeping was no use: passes until it is tried again."""

    def decide(
        self,
        slot: int,
        kind: Kind,
        now: float,
        averages: Averages,
        exclude: Collection[str] = (),
        *,
        load: Load = _IDLE,
        rejected: int = 0,
    ) -> Decision | NoWinner:
        """The candidate to assign to a worker: the highest total without a veto and not below 0,
        equal totals to the smaller job id. `exclude` holds job ids that are passed over;
        `rejected` is how many of the next best are named too."""
        scan = Scan(self._policy, self._pool, slot, kind, now, averages, load, self._faults)
        where = slot, kind
        kept = self._kept.get(where)
        if kept is not None and not exclude:
            shortlist, served = kept
            found = shortlist.best(scan, 1 + rejected)
            # Who gets nothing is told of all that was looked at.
            if found is not None and found[0][0].millionths >= 0:
                self._kept[where] = shortlist, served + 1
                return _decision(scan, *found, self._sought)
            del self._kept[where]
            if served < _USEFUL:
                self._pauses[where] = _PATIENCE
        keeps = self._can_keep and not exclude and self._may_keep(where)
        return self._pass(scan, where, exclude, 1 + rejected, keeps=keeps)

    def forget(self, slot: int) -> None:
        """The worker of this slot is gone."""
        for table in (self._kept, self._pauses):
            for where in [where for where in table if where[0] == slot]:
                del table[where]

    def _may_keep(self, where: tuple[int, Kind]) -> bool:
        if len(self._pool) < self._worth_keeping:
            return False
        pause = self._pauses.pop(where, 0)
        if pause > 1:
            self._pauses[where] = pause - 1
        return not pause

    def _pass(
        self, scan: Scan, where: tuple[int, Kind], exclude: Collection[str], wanted: int,
        *, keeps: bool,
    ) -> Decision | NoWinner:  # fmt: skip
        pool = self._pool
        excluded = [at for job_id in exclude if (at := pool.locate(job_id)) is not None]
        sought = self._sought if keeps else wanted
        blocks = list(pool.blocks())
        bounds = scan.bounds([block for block, _ in blocks]) if len(blocks) > 1 else None
        best, scored = NOTHING, list[Scored]()
        skipped: dict[int, Block] = {}
        for number in _order(blocks, bounds):
            block, width = blocks[number]
            if bounds is not None and _is_out(best, sought, bounds.total[number], block):
                skipped[number] = block
                continue
            found = scan.score(number, block, width, scan.candidates(block, width, excluded))
            if found is None:
                continue
            scored.append(found)
            if _is_out(best, sought, np.maximum.reduce(found.total), block):
                continue
            best = merged(best, best_of(found, len(scored) - 1, sought), sought)
        if keeps:
            made = Shortlist(self._rules, scan, scored, best, skipped, bounds)
            self._kept[where] = made, 0
        picks, scores = [], list[float]()
        for place in range(min(wanted, len(best.position))):
            each, position = scored[best.source[place]], int(best.position[place])
            row = each.number * pool.block_rows + each.row(position)
            picks.append(Pick(float(best.millionths[place]), row))
            if not place:
                scores = scores_at(each.parts, position)
        return _decision(scan, picks, scores, sum(each.size for each in scored))


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
    faults: Faults = SILENT,
) -> Decision | NoWinner:
    """One decision from nothing; see `Decider.decide`."""
    decider = Decider(policy, pool, faults, kept=0)
    return decider.decide(slot, kind, now, averages, exclude, load=load, rejected=rejected)


def _order(blocks: Sequence[tuple[Block, int]], bounds: Bounds | None) -> Sequence[int]:
    if bounds is None:
        return range(len(blocks))
    first_ranks = np.array([block.first_rank for block, _ in blocks])
    order: list[int] = np.lexsort((first_ranks, -bounds.total)).tolist()
    return order


def _is_out(best: Best, wanted: int, bound: float, block: Block) -> bool:
    """Whether nothing of a block, none of it above a bound, is among the best."""
    if len(best.position) < wanted:
        return False
    return not may_beat(
        float(bound), block.first_rank, float(best.millionths[-1]), int(best.rank[-1])
    )


def _decision(
    scan: Scan, picks: Sequence[Pick], scores: Sequence[float], candidates: int
) -> Decision | NoWinner:
    ranking = tuple(
        (scan.pool.entry_at(pick.row).job_id, pick.millionths / MILLIONTHS) for pick in picks
    )
    if not picks or picks[0].millionths < 0:
        return NoWinner(candidates, ranking)
    job_id, total = ranking[0]
    named = {rule.name: score for rule, score in zip(scan.policy.rules, scores, strict=True)}
    return Decision(job_id, total, named, candidates, ranking[1:])
