"""python -m tests.sim [--preset P | --shells] [--seed N | --seeds N] [--minutes M] [--trace]"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence

from tests.sim.faults import PRESETS
from tests.sim.shells import simulate_shells
from tests.sim.watch import Violation
from tests.sim.world import simulate

SHELLS = "shells"


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
    parser.add_argument("--trace", action="store_true", help="print what happened")
    args = parser.parse_args(arguments)
    presets = [SHELLS] if args.shells else [args.preset] if args.preset else [*PRESETS, SHELLS]
    if args.seed is not None:
        chosen = iter([(preset, args.seed) for preset in presets])
    else:
        chosen = runs(presets, args.seeds)
    logging.disable(logging.CRITICAL)
    start, done, failed = time.monotonic(), 0, 0
    for preset, seed in chosen:
        if time.monotonic() - start > 60 * args.minutes:
            break
        try:
            trace = run(preset, seed)
        except Violation as violation:
            failed += 1
            print(f"{preset}/{seed}: {violation}\n", flush=True)
        else:
            if args.trace:
                print(*trace, sep="\n")
        done += 1
    print(f"{done} seeds, {failed} violations, {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
