"""A worker's best candidates, kept from one request to the next.

Theory of operation. A pass over all candidates keeps the best `KEPT` with each rule's score of
them, and of the *rest* what none is above. As long as no rule's `key` changes, a job that did not
change itself scores as before by all rules but those that vary with time, which are cheap. So a
request ranks the kept jobs and those that changed since (the pool's journals name them), and is
done if the ones that it wants are better than whatever the rest may have become:

- by what the rest had: its best total then, and what time can have added to any (`risen`); this
  tells in queues of unlike jobs;
- by what the rest is: its best score by the lasting rules, and the wait of its oldest job; this
  tells in queues of like jobs, where the rank decides.

If neither tells, or too much changed, a whole pass is due. A row that left or changed is dead here;
the rest's bounds stay as they are, too high at worst.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actors.server.block import REPORTED, Block
from actors.server.scoring.best import Best, may_beat, rounded
from actors.server.scoring.columns import Columns, Floats, KeptColumns, Situation
from actors.server.scoring.rules import Varying
from actors.server.scoring.scan import Bounds, Policy, Scan, Scored

KEPT = 256
"""50 workers that take alike jobs use up each other's kept ones: fewer are used up too soon."""
ROOM = 64
"""For jobs that changed since. Many of them cost more than a whole pass."""
_LAST_RANK = np.iinfo(np.int64).max


class KeptRules:
    """The rules of a policy, by what they depend on."""

    def __init__(self, policy: Policy) -> None:
        rules: tuple[Any, ...] = policy.rules
        self.count = len(rules)
        self.varying: dict[int, Varying] = {
            number: rule for number, rule in enumerate(rules) if getattr(rule, "varies", False)
        }
        """By place in the policy."""
        self._keys: list[Callable[[Situation], object]] = [
            rule.key for rule in rules if hasattr(rule, "key")
        ]
        self.can_keep = len(self.varying) + len(self._keys) == self.count
        """Whether all tell it."""

    def key(self, request: Situation) -> list[object]:
        """Equal for two requests between which nothing but time changed any score."""
        return [key(request) for key in self._keys]


class Pick(NamedTuple):
    """One of the best, as whole millionths, with its row in the pool."""

    millionths: float
    row: int


class _Rest(NamedTuple):
    """What no job that is not kept is above. Of an empty rest all are as low as can be."""

    total: float = -np.inf
    lasting: float = -np.inf
    """By the rules that do not vary."""
    oldest_ready_at: float = np.inf
    first_rank: int = int(_LAST_RANK)

    def with_(self, other: _Rest) -> _Rest:
        return _Rest(
            max(self.total, other.total), max(self.lasting, other.lasting),
            min(self.oldest_ready_at, other.oldest_ready_at),
            min(self.first_rank, other.first_rank),
        )  # fmt: skip


class Shortlist:
    """Made of a pass over all candidates of a worker and kind."""

    def __init__(
        self,
        rules: KeptRules,
        scan: Scan,
        scored: Sequence[Scored],
        best: Best,
        skipped: Mapping[int, Block],
        bounds: Bounds | None,
    ) -> None:
        """`best` are of `scored`. `skipped` are blocks by number, which is their place in
        `bounds`, too."""
        pool = scan.pool
        self._rules = rules
        self._then = scan.situation
        self._changes_seen = pool.changes.end
        self._reports_seen = pool.reports(scan.slot).end
        self._has_unreported = not all(each.all_reported for each in scored) or any(
            _has_unreported(scan, block) for block in skipped.values()
        )
        self._key = self._key_of(scan)
        room = len(best.position) + ROOM
        self._used = 0
        self._parts = np.zeros((rules.count, room))
        self._is_zero = [True] * rules.count
        self._base: Floats = np.full(room, -np.inf)
        """0 for a job that is here, -inf for one that is gone."""
        self._ready_at: Floats = np.full(room, np.inf)
        self._rank: NDArray[np.int64] = np.full(room, _LAST_RANK)
        self._rows: NDArray[np.intp] = np.zeros(room, np.intp)
        self._index: dict[int, int] = {}
        self._rest = _Rest()
        for source, each in enumerate(scored):
            positions = best.position[best.source == source]
            self._take(scan, each, positions)
            self._rest = self._rest.with_(_rest_of(rules, each, positions))
        for number, block in skipped.items():
            assert bounds is not None
            if block.oldest_ready_at == np.inf:
                continue  # nothing is in it
            self._rest = self._rest.with_(_Rest(
                float(bounds.total[number]), float(bounds.lasting[number]),
                block.oldest_ready_at, block.first_rank,
            ))  # fmt: skip

    def best(self, scan: Scan, wanted: int) -> tuple[list[Pick], list[float]] | None:
        """The best `wanted` of all candidates, and the first one's score by each rule; None when
        that cannot be told from here."""
        if self._key_of(scan) != self._key or not self._follow(scan):
            return None
        used = self._used
        if not used:
            return None
        view = KeptColumns(self._ready_at[:used], scan.situation)
        total = view.subtotal = self._base[:used].copy()
        varying: dict[int, Floats | float] = {}
        for number in range(self._rules.count):
            rule = self._rules.varying.get(number)
            if rule is not None:
                varying[number] = part = rule.score(view)
                total += part
            elif not self._is_zero[number]:
                total += self._parts[number, :used]
        found = _first(rounded(total), self._rank[:used], wanted)
        if not found:
            return None
        picks = [Pick(value, int(self._rows[at])) for value, at in found]
        last = (picks[-1].millionths, int(self._rank[found[-1][1]]))
        if len(found) < wanted:
            last = (-np.inf, 0)
        if self._may_be_beaten(scan, *last):
            return None
        first = found[0][1]
        scores = [float(part) for part in self._parts[:, first]]
        for number, part in varying.items():
            scores[number] = part if isinstance(part, float) else float(part[first])
        return picks, scores

    # -- what changed ----------------------------------------------------------------------------

    def _key_of(self, scan: Scan) -> list[object]:
        key = self._rules.key(scan.situation)
        if self._has_unreported:
            # What is not reported is held back for some ticks, then expected to be as the mean.
            averages = scan.situation.averages
            key += (scan.pool.tick_count, averages.missing_nar_size, averages.missing_count)
        return key

    def _follow(self, scan: Scan) -> bool:
        """Takes in what changed; False if that cannot be told, or is too much."""
        changes, reports = scan.pool.changes, scan.pool.reports(scan.slot)
        changed = changes.since(self._changes_seen)
        reported = reports.since(self._reports_seen)
        if changed is None or reported is None:
            return False
        self._changes_seen, self._reports_seen = changes.end, reports.end
        # A report names the row of then: whether that was before a move is not known.
        again = dict.fromkeys([row for row, _ in reported])
        for source, target in changed:
            if source == target or source in again:
                self._drop(source)
                again[target] = None
            elif (at := self._index.pop(source, None)) is not None:
                self._index[target] = at
                self._rows[at] = target
        for row in again:
            self._drop(row)
        return not again or self._look_at(scan, again)

    def _drop(self, row: int) -> None:
        at = self._index.pop(row, None)
        if at is not None:
            self._base[at] = -np.inf
            self._ready_at[at] = np.inf
            self._rank[at] = _LAST_RANK

    def _look_at(self, scan: Scan, rows: Collection[int]) -> bool:
        by_block: dict[int, list[int]] = {}
        for row in rows:
            number, at = divmod(row, scan.pool.block_rows)
            block = scan.pool.block(number)
            if block is not None and scan.is_candidate(block, at):
                by_block.setdefault(number, []).append(at)
        if sum(map(len, by_block.values())) > len(self._rows) - self._used:
            return False
        for number, within in by_block.items():
            block = scan.pool.block(number)
            assert block is not None
            here = np.array(within, np.intp)
            view = Columns(block, here, scan.slot, scan.situation, None)
            parts, total, usable = scan.run(view, len(here))
            if not view.all_reported:
                # From the next request on it matters when the rest of them is reported.
                self._has_unreported = True
                self._key = self._key_of(scan)
            if usable is not None:
                total[~usable] = -np.inf
            scored = Scored(number, block, here, parts, total, len(here), view.all_reported)
            self._take(scan, scored, np.flatnonzero(total > -np.inf))
        return True

    def _take(self, scan: Scan, scored: Scored, positions: NDArray[np.intp]) -> None:
        """Keeps these of a block."""
        start, end = self._used, self._used + len(positions)
        self._used = end
        rows = positions if isinstance(scored.rows, slice) else scored.rows[positions]
        for number, part in enumerate(scored.parts):
            values = part if isinstance(part, float) else part[positions]
            self._parts[number, start:end] = values
            if not isinstance(values, float) or values != 0.0:
                self._is_zero[number] = False
        self._base[start:end] = 0.0
        self._ready_at[start:end] = scored.block.ready_at[rows]
        self._rank[start:end] = scored.block.rank[rows]
        self._rows[start:end] = rows + scored.number * scan.pool.block_rows
        self._index.update(zip(self._rows[start:end].tolist(), range(start, end), strict=True))

    # -- the rest --------------------------------------------------------------------------------

    def _may_be_beaten(self, scan: Scan, millionths: float, rank: int) -> bool:
        rest, now = self._rest, scan.situation
        if rest.total == -np.inf:
            return False
        risen, limit = rest.total, rest.lasting
        waited = max(0.0, math.floor(now.now - rest.oldest_ready_at))
        for rule in self._rules.varying.values():
            risen = rule.risen(risen, self._then, now, rest.oldest_ready_at)
            limit += rule.limit(limit, waited, now)
        return may_beat(min(risen, limit), rest.first_rank, millionths, rank)


def _first(millionths: Floats, ranks: NDArray[np.int64], wanted: int) -> list[tuple[float, int]]:
    """(Value, place) of the best, at most `wanted`. Overwrites `millionths`."""
    # Sorting all would take longer than finding so few one by one.
    found: list[tuple[float, int]] = []
    while len(found) < wanted:
        value = float(millionths[millionths.argmax()])
        if value == -np.inf:
            break
        equal = (millionths == value).nonzero()[0]
        if len(equal) > 1:
            equal = equal[ranks[equal].argsort()[: wanted - len(found)]]
        found += [(value, at) for at in equal.tolist()]
        millionths[equal] = -np.inf
    return found


def _has_unreported(scan: Scan, block: Block) -> bool:
    candidates = scan.candidates(block, len(block.kind))
    candidates &= (block.state[scan.slot] & REPORTED) == 0
    return bool(candidates.any())


def _rest_of(rules: KeptRules, scored: Scored, positions: NDArray[np.intp]) -> _Rest:
    """Of a block, all but what is kept."""
    is_rest = scored.total > -np.inf
    is_rest[positions] = False
    rest = is_rest.nonzero()[0]
    if not len(rest):
        return _Rest()
    lasting = scored.total[rest]
    total = float(lasting.max())
    for number in rules.varying:
        part = scored.parts[number]
        lasting -= part if isinstance(part, float) else part[rest]
    rows = rest if isinstance(scored.rows, slice) else scored.rows[rest]
    block = scored.block
    return _Rest(
        total, float(lasting.max()), float(block.ready_at[rows].min()), int(block.rank[rows].min())
    )
