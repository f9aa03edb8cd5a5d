"""One request's pass over blocks of candidates: each rule gives a column, and their sum counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from actors.server.block import ELIGIBLE, KIND_CODES, Block
from actors.server.memory import Load
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


class Policy(Struct, frozen=True):
    """A named list of rules; a rule sees the sum of those before it."""

    name: str
    description: str
    rules: tuple[Rule, ...]

    @property
    def holds_memory(self) -> bool:
        """Whether a rule holds builds back until there is memory for them."""
        return any(getattr(rule, "holds_memory", False) for rule in self.rules)


class Faults:
    """Rules that raised. Each is told once; the candidates it raised for are passed over."""

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self._tell = tell
        self._known: set[str] = set()

    def add(self, rule: str, error: Exception) -> None:
        if rule not in self._known:
            self._known.add(rule)
            self._tell(f"rule {rule} failed, its jobs are passed over: {error!r}")


SILENT = Faults()


class Bounds(NamedTuple):
    """What no job of each block is above."""

    total: Floats
    lasting: Floats
    """The rules that do not vary with time alone."""


class Scored(NamedTuple):
    """A block's candidates."""

    number: int
    """Of the block."""
    block: Block
    rows: Rows
    parts: list[Floats | float]
    total: Floats
    """-inf where vetoed or no candidate."""
    size: int
    all_reported: bool

    def row(self, position: int) -> int:
        """The row of the block at a position of the columns."""
        return position if isinstance(self.rows, slice) else int(self.rows[position])


class Scan:
    """One request for a job, and how blocks are scored for it."""

    def __init__(
        self, policy: Policy, pool: Pool, slot: int, kind: Kind, now: float, averages: Averages,
        load: Load, faults: Faults = SILENT,
    ) -> None:  # fmt: skip
        self.policy = policy
        self.pool = pool
        self.slot = slot
        self.faults = faults
        self.code = KIND_CODES[kind]
        self.vetoes: list[tuple[str, Bools]] = []
        """What rules vetoed, of all that was scored."""
        self.situation = Situation(kind, slot, pool, now, averages, load)

    def candidates(
        self, block: Block, width: int, excluded: Sequence[tuple[Block, int]] = ()
    ) -> Bools:
        mask: Bools = block.kind[:width] == self.code
        mask &= (block.state[self.slot, :width] & ELIGIBLE).view(np.bool_)
        for other, at in excluded:
            if other is block:
                mask[at] = False
        return mask

    def is_candidate(self, block: Block, row: int) -> bool:
        return bool(block.kind[row] == self.code and block.state[self.slot, row] & ELIGIBLE)

    def bounds(self, blocks: Sequence[Block]) -> Bounds | None:
        """None when a rule cannot say."""
        extremes = Extremes(blocks, self.situation)
        lasting: Floats = np.zeros(len(blocks))
        for rule in self.policy.rules:
            best = getattr(rule, "best", None)
            if best is None:
                return None
            try:
                part = best(extremes)
                extremes.subtotal += part
                if not getattr(rule, "varies", False):
                    lasting += part
            except Exception as error:  # noqa: BLE001 - whatever a package's rule raises
                self.faults.add(rule.name, error)
                return None
        return Bounds(extremes.subtotal, lasting)

    def score(self, number: int, block: Block, width: int, mask: Bools) -> Scored | None:
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
        return Scored(number, block, rows, parts, total, count, view.all_reported)

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


def scores_at(parts: Sequence[Floats | float], position: int) -> list[float]:
    """Each rule's score of the job at one position."""
    return [part if isinstance(part, float) else float(part[position]) for part in parts]
