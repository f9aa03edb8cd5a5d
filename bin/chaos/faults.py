"""Which faults happen when: a seed's schedule. Pure.

Faults are drawn like cards: each round of the deck has every kind in its number, shuffled, so
that a short run sees all kinds and a long one sees them in the same proportions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random
from typing import Literal, NamedTuple, get_args

from msgspec import Struct

Kind = Literal[
    "kill-server", "stop-server", "pause-server", "kill-worker", "stop-worker", "pause-worker",
    "suspend-worker", "kill-builder", "kill-actor", "reset-link", "close-link", "block-link",
    "slow-link", "full-ledger-disk", "full-build-disk", "lock-ledger",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTORS = (
    "gateway", "registry", "feeder", "assigner", "coordinator", "pager", "reaper", "ledger",
    "logbook", "health",
)  # fmt: skip

FIRST_SECS = 1.5
"""The farm works undisturbed before the first fault."""
LEAST_GAP_SECS, MOST_GAP_SECS = 0.2, 1.8
# A supervisor gives up beyond 5 restarts of an actor in 10 s: that is its own test.
ACTOR_WINDOW_SECS, MAX_ACTOR_KILLS = 12.0, 3


class Fault(Struct, frozen=True):
    """One fault. `secs` is how long it lasts; of an ended process, how long it stays down."""

    at: float
    kind: Kind
    target: str
    """A worker's name, an actor's, or nothing where there is one of the kind."""
    secs: float


class _Shape(NamedTuple):
    cards: int
    """Of the deck."""
    least: float
    most: float
    """Seconds."""


_SHAPES: dict[Kind, _Shape] = {
    "kill-server": _Shape(2, 0.0, 2.0),
    "stop-server": _Shape(1, 0.0, 2.0),
    "pause-server": _Shape(1, 0.2, 4.0),
    "kill-worker": _Shape(2, 0.0, 3.0),
    "stop-worker": _Shape(1, 0.0, 3.0),
    "pause-worker": _Shape(1, 0.2, 5.0),
    "suspend-worker": _Shape(1, 0.5, 6.0),
    "kill-builder": _Shape(2, 0.0, 0.0),
    "kill-actor": _Shape(4, 0.0, 0.0),
    "reset-link": _Shape(1, 0.0, 0.0),
    "close-link": _Shape(1, 0.0, 0.0),
    "block-link": _Shape(2, 0.5, 6.0),
    "slow-link": _Shape(1, 1.0, 5.0),
    "full-ledger-disk": _Shape(1, 0.5, 4.0),
    "full-build-disk": _Shape(1, 0.5, 3.0),
    "lock-ledger": _Shape(2, 0.2, 3.0),
}
# Now and then something lasts longer than a heartbeat is waited for.
_LONG: frozenset[Kind] = frozenset({"pause-worker", "suspend-worker", "block-link"})
_LONG_CHANCE, _LONG_SECS, _LONG_RUN_SECS = 0.25, 16.0, 50.0


def plan(
    seed: int, secs: float, workers: Sequence[str], kinds: Collection[Kind] = KINDS
) -> tuple[Fault, ...]:
    """The faults of a run of `secs` seconds, in their order; all have ended by then.

    The same arguments give the same faults.
    """
    random = Random(f"faults/{seed}")  # noqa: S311 - to be repeated, not to be secret
    faults: list[Fault] = []
    deck: list[Kind] = []
    at = FIRST_SECS
    while at < secs:
        if not deck:
            deck = [k for k in KINDS if k in kinds for _ in range(_SHAPES[k].cards)]
            random.shuffle(deck)
        fault = _fault(random, at, secs, deck.pop(), workers, faults)
        if fault.at + fault.secs <= secs:
            faults.append(fault)
        at += random.uniform(LEAST_GAP_SECS, MOST_GAP_SECS)
    return tuple(faults)


def _fault(
    random: Random,
    at: float,
    run_secs: float,
    kind: Kind,
    workers: Sequence[str],
    before: Sequence[Fault],
) -> Fault:
    shape = _SHAPES[kind]
    secs = random.uniform(shape.least, shape.most)
    if kind in _LONG and run_secs >= _LONG_RUN_SECS and random.random() < _LONG_CHANCE:
        secs = _LONG_SECS
    target = ""
    if kind == "kill-actor":
        recent = [f.target for f in before if f.kind == kind and f.at > at - ACTOR_WINDOW_SECS]
        target = random.choice([a for a in ACTORS if recent.count(a) < MAX_ACTOR_KILLS])
    elif kind.endswith(("-worker", "-link", "-builder")):
        target = random.choice(workers)
    return Fault(round(at, 3), kind, target, round(secs, 3))
