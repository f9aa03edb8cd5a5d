"""What the policy says of single jobs, for people and for memory that is to be kept free."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from actors.server.block import ELIGIBLE
from actors.server.memory import Load, Reservation
from actors.server.pool import Pool
from actors.server.scoring.best import MILLIONTHS
from actors.server.scoring.columns import Averages, Columns
from actors.server.scoring.scan import Policy, Scan, scores_at

HELD_AFTER_SECS = 60.0
"""How long a build that is not prioritized could start before memory is kept free for it."""
_IDLE = Load()
_NO_RULES = Policy("", "", ())


class Explanation(Struct, frozen=True):
    """What a policy says of one job on one worker."""

    eligible: bool
    """If not, the rest is empty."""
    scores: dict[str, float]
    total: float
    """Rounded to 1e-6."""
    vetoes: tuple[str, ...]
    """Names of the rules that veto it."""


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
    scan = Scan(policy, pool, slot, entry.cls.kind, now, averages, load)
    view = Columns(block, slice(at, at + 1), slot, scan.situation, None)
    parts, total, _ = scan.run(view, 1)
    return Explanation(
        eligible=True,
        scores=dict(zip([rule.name for rule in policy.rules], scores_at(parts, 0), strict=True)),
        total=float(np.rint(total[0] * MILLIONTHS)) / MILLIONTHS + 0.0,
        vetoes=tuple(name for name, veto in scan.vetoes if veto[0]),
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
    scan = Scan(policy, pool, slot, entry.cls.kind, now, averages, load)
    mine = explain(policy, pool, slot, job_id, now, averages, load=load)
    assert mine is not None
    total, rank = round(mine.total * MILLIONTHS), int(located[0].rank[located[1]])
    before = 0
    for number, (block, width) in enumerate(pool.blocks()):
        scored = scan.score(number, block, width, scan.candidates(block, width))
        if scored is None:
            continue
        millionths = np.rint(scored.total * MILLIONTHS)
        before += int(np.count_nonzero(millionths > total))
        equal = millionths == total
        before += int(np.count_nonzero(block.rank[scored.rows][equal] < rank))
    return before


def find_held(
    pool: Pool, slot: int, now: float, averages: Averages, load: Load
) -> Reservation | None:
    """The build whose memory is to be kept free on a worker that keeps none free: the oldest of
    those that wait for memory there and are prioritized or could start 60 s ago."""
    scan = Scan(_NO_RULES, pool, slot, "build", now, averages, load)
    held = scan.situation.held
    if held is None:
        return None
    best: tuple[float, int, int, int] | None = None
    for number, (block, width) in enumerate(pool.blocks()):
        mask = scan.candidates(block, width)
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
    entry = pool.entry_at(best[2] * pool.block_rows + best[3])
    profile = pool.profile_of(entry)
    assert profile is not None
    return Reservation(entry.job_id, profile.peak_mb, entry.ready_at)
