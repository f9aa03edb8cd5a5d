"""python -m tests.sim [--preset P | --shells] [--seed N | --seeds N] [--minutes M] [--trace]"""

from __future__ import annotations

import argparse
import sys
import time

from tests.sim.faults import PRESETS
from tests.sim.shells import simulate_shells
from tests.sim.watch import Violation
from tests.sim.world import simulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="one preset instead of all in turn")
    parser.add_argument("--shells", action="store_true", help="real shells on a virtual clock")
    parser.add_argument("--seed", type=int, help="replay this one")
    parser.add_argument("--seeds", type=int, default=100, help="how many, from 0 on")
    parser.add_argument("--minutes", type=float, default=20, help="stop after so long")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    args = parser.parse_args()
    seeds = [args.seed] if args.seed is not None else range(args.seeds)
    presets = [args.preset] if args.preset else list(PRESETS)
    if args.shells:
        presets = ["shells"]
    start, done, failed = time.monotonic(), 0, 0
    for seed in seeds:
        for preset in presets:
            if time.monotonic() - start > 60 * args.minutes:
                break
            try:
                trace = simulate_shells(seed) if args.shells else simulate(preset, seed)
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
