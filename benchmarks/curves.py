"""How latency and throughput grow with pending jobs and with workers, and the plot of it.

Method. Each point has a server of its own and is measured as the rows `request` and `cycle` are:
latency of one worker's requests beside the others, which are idle with everything scored, next to
the echo of the same minute; throughput of all workers with 8 slots each. Along one axis 4 workers,
along the other the pending jobs of `cycle`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dispatch
from figures import Point, Run
from harness import quantile
from rows import Bench

WORKERS, SLOTS = 4, 8
PENDING_AT = (1_000, 3_000, 10_000, 30_000, 100_000)
WORKERS_AT = (1, 2, 5, 10, 20, 50)
GOAL_TIMES_ECHO = 3


def by_pending(bench: Bench) -> Iterator[Point]:
    for pending in PENDING_AT:
        if pending <= bench.sizes.many:
            yield _point(bench, pending, WORKERS)


def by_workers(bench: Bench) -> Iterator[Point]:
    for workers in WORKERS_AT:
        if workers <= bench.sizes.workers:
            yield _point(bench, bench.sizes.pending, workers)


def _point(bench: Bench, pending: int, workers: int) -> Point:
    samples, echo_us = bench.beside_echo(
        lambda: dispatch.request_beside(
            bench.folder, pending, bench.sizes.samples, others=workers - 1
        )
    )
    return Point(
        pending=pending,
        workers=workers,
        echo_us=echo_us,
        p50_us=quantile(samples, 0.5),
        p99_us=quantile(samples, 0.99),
        jobs_per_sec=bench.rate(pending, workers, SLOTS),
    )


def plot(run: Run, path: Path) -> None:
    """Draws both axes. Raises `ImportError` without matplotlib."""
    import matplotlib as mpl  # noqa: PLC0415 - an extra
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    # Text stays text, and the same figures give the same file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.size": 9}):
        figure = Figure(figsize=(8, 5.2), layout="constrained")
        axes = figure.subplots(2, 2, sharey="row")
        sides = ("pending jobs, 4 workers", run.by_pending), ("workers", run.by_workers)
        for column, (label, points) in enumerate(sides):
            at = [point.pending if column == 0 else point.workers for point in points]
            _latency(axes[0][column], at, points)
            axes[1][column].plot(at, [point.jobs_per_sec for point in points], "o-", color="C2")
            axes[1][column].set_xlabel(label)
            for axis in (axes[0][column], axes[1][column]):
                axis.set_xscale("log")
                axis.set_xticks(at, [f"{number:,}".replace(",", " ") for number in at])
                axis.minorticks_off()
                axis.grid(color="0.9")
        for row in axes:
            row[0].set_ylim(bottom=0)  # both columns share it, so once all is drawn
        axes[0][0].set_ylabel("request -> AssignJob, us")
        axes[1][0].set_ylabel(f"jobs/s, {SLOTS} slots a worker")
        handles, names = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper center", ncols=len(names))
        figure.savefig(path, metadata={"Date": None})


def _latency(axis: Any, at: list[int], points: list[Point]) -> None:
    axis.plot(at, [point.p99_us for point in points], "o-", color="C1", label="p99")
    axis.plot(at, [point.p50_us for point in points], "o-", color="C0", label="p50")
    goal = [GOAL_TIMES_ECHO * point.echo_us for point in points]
    axis.plot(at, goal, "--", color="0.4", label=f"{GOAL_TIMES_ECHO} x echo")
    axis.plot(at, [point.echo_us for point in points], ":", color="0.4", label="bare echo")
