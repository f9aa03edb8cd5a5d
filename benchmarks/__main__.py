"""Runs the rows of docs/performance.md and prints one table of them.

    python -m benchmarks [--quick] [--only ROW[,ROW]] [--folder DIR] [--json FILE]
                         [--compare OLD.json] [--markdown] [--plot FILE.svg]
    python -m benchmarks --from FILE.json [--compare OLD.json] [--markdown] [--plot FILE.svg]

The table has a line for each figure: its baseline of the same run, the ratio to it, its goal, and
whether that is met. `--compare` adds what the goal is about, ratio or value, in an earlier run, and
marks what is worse by more than 10 %; the exit code is 1 then. Progress goes to stderr. A whole run
takes about an hour and wants a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import sqlite3
import sys
import tempfile
import time
import traceback
from pathlib import Path

import curves
import msgspec
import zmq
from figures import Figure, Run, remarks, table, worse
from rows import FULL, QUICK, ROWS, Bench


def machine() -> dict[str, str | int]:
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "zmq": zmq.zmq_version(),
        "pyzmq": zmq.pyzmq_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def measure(rows: list[str], parent: Path | None, *, is_quick: bool, with_curves: bool) -> Run:
    """Runs the rows; one that fails becomes a line that says so."""
    sizes = QUICK if is_quick else FULL
    run = Run(
        machine=machine(), sizes=dataclasses.asdict(sizes), is_quick=is_quick, figures=[]
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=parent) as folder:
        bench = Bench(sizes, Path(folder))
        for name in rows:
            start = time.monotonic()
            try:
                run.figures += ROWS[name](bench)
            except Exception as error:  # noqa: BLE001 - the other rows are worth an hour
                traceback.print_exc()
                text = f"failed: {error}"
                run.figures.append(Figure(key=name, what=name, unit="", missing=text))
            _tell(f"{name}: {time.monotonic() - start:.0f} s")
        if with_curves:
            start = time.monotonic()
            run.by_pending = list(curves.by_pending(bench))
            run.by_workers = list(curves.by_workers(bench))
            _tell(f"curves: {time.monotonic() - start:.0f} s")
    return run


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rows(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    return names


def _run_file(text: str) -> Run:
    try:
        return Run.read(Path(text))
    except (OSError, msgspec.DecodeError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def main() -> int:
    methods = "\n\n".join(f"{name}:\n    {row.__doc__}" for name, row in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, epilog=f"Rows:\n\n{methods}",
        formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS,
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it all runs")
    parser.add_argument("--only", type=_rows, default=list(ROWS), help="these rows", metavar="ROW")
    parser.add_argument("--folder", type=Path, help="where ledgers are made, on a real disk")
    parser.add_argument("--from", dest="made", type=_run_file, help="show a run that was saved")
    parser.add_argument("--json", type=Path, help="save the run to this file", metavar="FILE")
    parser.add_argument("--compare", type=_run_file, help="beside a saved run", metavar="OLD")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--plot", type=Path, help="draw the curves into this SVG", metavar="FILE")
    args = parser.parse_args()
    run: Run | None = args.made
    if run is None:
        run = measure(
            args.only, args.folder, is_quick=args.quick, with_curves=args.plot is not None
        )
    if args.json is not None:
        run.save(args.json)
    print(table(run, args.compare, markdown=args.markdown))
    for remark in remarks(run, args.compare):
        print(remark)
    if args.plot is not None:
        curves.plot(run, args.plot)
    return 1 if args.compare is not None and worse(run, args.compare) else 0


if __name__ == "__main__":
    sys.exit(main())
