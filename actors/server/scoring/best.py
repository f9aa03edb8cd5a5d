"""The best of scored candidates.

Totals are compared as whole millionths, which is what 'rounded to 1e-6 before floor and ties'
means; only the rows near the maximum are rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.server.scoring.columns import Floats
from actors.server.scoring.scan import Scored

MILLIONTHS = 1e6
_LOWEST = -np.finfo(np.float64).max


class Best(NamedTuple):
    """Candidates, the best first: higher total, then lower rank. Columns of equal length."""

    millionths: Floats
    rank: NDArray[np.int64]
    source: NDArray[np.intp]
    """Which of the scored blocks."""
    position: NDArray[np.intp]
    """In the block's columns."""


NOTHING = Best(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.intp), np.zeros(0, np.intp))


def best_of(scored: Scored, source: int, wanted: int) -> Best:
    """At most `wanted` of a block, those that are not vetoed."""
    total = scored.total
    last = max(0, len(total) - wanted)
    parted = np.partition(total, last)
    worst = float(parted[last])
    if np.isnan(parted[last:]).any():  # these sort last
        # Some rule's: such a row cannot be compared, the others can.
        total = np.where(np.isnan(total), -np.inf, total)
        worst = float(np.partition(total, last)[last])
    # What rounds to more than the last of the best is itself among them: there are few. Those
    # that round to the same may be many.
    floor = max(float(rounded(worst)), _LOWEST)
    near = np.flatnonzero(total >= (floor - 1) / MILLIONTHS)
    millionths = rounded(total[near])
    above, equal = near[millionths > floor], near[millionths == floor]
    ranks = scored.block.rank[scored.rows]
    missing = wanted - len(above)
    if len(equal) > missing:
        equal = equal[np.argpartition(ranks[equal], missing)[:missing]]
    position = np.concatenate((above, equal))
    found = Best(
        rounded(total[position]), ranks[position], np.full(len(position), source), position
    )
    return _sorted(found, wanted)


def merged(best: Best, more: Best, wanted: int) -> Best:
    """At most `wanted` of both."""
    if not len(best.millionths):
        return more
    both = Best(
        np.concatenate((best.millionths, more.millionths)),
        np.concatenate((best.rank, more.rank)),
        np.concatenate((best.source, more.source)),
        np.concatenate((best.position, more.position)),
    )
    return _sorted(both, wanted)


def may_beat(bound: float, first_rank: int, millionths: float, rank: int) -> bool:
    """Whether a total of at most `bound`, of a rank of at least `first_rank`, can be better than
    this candidate; bounds are rounded like totals, and a unit more for what rounding does to
    sums."""
    limit = bound * MILLIONTHS
    if limit < millionths - 0.5 - 1e-3:
        return False
    if limit >= millionths + 0.5 - 1e-3:
        return True
    return first_rank < rank


def rounded(total: Floats | float) -> Floats:
    """Whole millionths, never -0.0."""
    return np.rint(np.multiply(total, MILLIONTHS)) + 0.0


def _sorted(best: Best, wanted: int) -> Best:
    order = np.lexsort((best.rank, -best.millionths))[:wanted]
    return Best(best.millionths[order], best.rank[order], best.source[order], best.position[order])
