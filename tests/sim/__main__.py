"""python -m tests.sim [--preset P | --shells] [--seed N | --seeds N] [--minutes M] [--jobs J]"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.pool import Pool

from tests.sim.faults import PRESETS
from tests.sim.shells import simulate_shells
from tests.sim.watch import Violation
from tests.sim.world import simulate

SHELLS = "shells"
BATCH = 50


def run(preset: str, seed: int) -> list[str]:
    """One seed of either tier; returns its trace, raises `Violation`."""
    return simulate_shells(seed) if preset == SHELLS else simulate(preset, seed)


def runs(presets: Sequence[str], count: int) -> Iterator[tuple[str, int]]:
    """So many runs, all presets in turn."""
    for number in range(count):
        yield presets[number % len(presets)], number // len(presets)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="one preset instead of all in turn")
    parser.add_argument("--shells", action="store_true", help="real shells on a virtual clock")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=1_000, help="how many runs in all")
    parser.add_argument("--minutes", type=float, default=20, help="begin no run after so long")
    parser.add_argument("--jobs", type=int, default=1, help="processes to spread them over")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    args = parser.parse_args(arguments)
    presets = [SHELLS] if args.shells else [args.preset] if args.preset else [*PRESETS, SHELLS]
    if args.seed is not None:
        chosen = iter([(preset, args.seed) for preset in presets])
    else:
        chosen = runs(presets, args.seeds)
    logging.disable(logging.CRITICAL)
    start, done, failed = time.monotonic(), 0, 0
    timely = itertools.takewhile(lambda _: time.monotonic() - start <= 60 * args.minutes, chosen)
    with multiprocessing.Pool(args.jobs) if args.jobs > 1 else nullcontext() as pool:
        for trace, violation in _attempts(timely, pool):
            done += 1
            if violation is not None:
                failed += 1
                print(f"{violation}\n", flush=True)
            elif args.trace:
                print(*trace, sep="\n")
    print(f"{done} seeds, {failed} violations, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def _attempts(
    chosen: Iterator[tuple[str, int]], pool: Pool | None
) -> Iterator[tuple[list[str], str | None]]:
    if pool is None:
        yield from map(_attempt, chosen)
        return
    # A pool would take all of an iterator at once, whatever the time.
    while batch := list(itertools.islice(chosen, BATCH)):
        yield from pool.imap(_attempt, batch)


def _attempt(what: tuple[str, int]) -> tuple[list[str], str | None]:
    """Its trace, or what is wrong."""
    preset, seed = what
    try:
        return run(preset, seed), None
    except Violation as violation:
        return [], f"{preset}/{seed}: {violation}"


if __name__ == "__main__":
    sys.exit(main())
