"""The best of scored candidates.

Totals are compared as whole millionths, which is what 'rounded to 1e-6 before floor and ties'
means; only the rows near the maximum are rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.server.scoring.columns import Bools, Floats
from actors.server.scoring.scan import Scored

MILLIONTHS = 1e6
_FEW = 8
_LAST_RANK = np.iinfo(np.int64).max
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
    millionths = rounded(total)
    above = (millionths > floor).nonzero()[0]
    ranks = scored.block.rank[scored.rows]
    position = np.concatenate((above, _lowest(ranks, millionths == floor, wanted - len(above))))
    found = Best(millionths[position], ranks[position], np.full(len(position), source), position)
    return _sorted(found, wanted)


def _lowest(ranks: NDArray[np.int64], among: Bools, wanted: int) -> NDArray[np.intp]:
    """The places of the `wanted` lowest ranks, or of all if there are less."""
    count = np.count_nonzero(among)
    if count <= wanted or wanted > _FEW:
        places = among.nonzero()[0]
        if count <= wanted:
            return places
        return places[np.argpartition(ranks[places], wanted)[:wanted]]
    # Each takes 4 us in a block of 8 192, all at once 60 us.
    left = np.where(among, ranks, _LAST_RANK)
    lowest = np.zeros(wanted, np.intp)
    for number in range(wanted):
        lowest[number] = left.argmin()
        left[lowest[number]] = _LAST_RANK
    return lowest


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
