"""The rows of docs/performance.md. A row's docstring states its method; harness.py states what all
have in common.

A baseline is of the same run: the echo is measured before and after what is compared with it.
Rates are medians of several runs, each on a server of its own. Where a row names so many pending
jobs, that many are left at its end.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import dispatch
import fleet
import graph_submission
import nix_scoring
import peers
from figures import Figure, Goal
from harness import quantile


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    pending: int = 10_000
    many: int = 100_000
    workers: int = 50
    samples: int = 2_000
    singles: int = 500
    seconds: float = 5.0
    repeats: int = 3
    idle_workers: int = 1_000
    idle_secs: float = 20.0
    store_paths: int = 500_000
    page: int = 1_000
    required: int = 20


FULL = Sizes()
QUICK = Sizes(
    pending=1_000, many=3_000, workers=8, samples=200, singles=50, seconds=0.5, repeats=1,
    idle_workers=100, idle_secs=2.0, store_paths=5_000,
)  # fmt: skip
"""Shows that everything runs, within a minute or two."""


class Bench:
    """What the rows of a run share."""

    def __init__(self, sizes: Sizes, folder: Path) -> None:
        self.sizes = sizes
        self.folder = folder
        self._rates: dict[tuple[int, int, int], float] = {}

    def beside_echo(self, measure: Callable[[], list[float]]) -> tuple[list[float], float]:
        """What `measure` returns, and the median echo before and after it, in microseconds."""
        before = dispatch.echo_us(self.folder, self.sizes.samples // 2)
        found = measure()
        after = dispatch.echo_us(self.folder, self.sizes.samples // 2)
        return found, statistics.median(before + after)

    def rate(self, pending: int, workers: int, slots: int) -> float:
        """Jobs a second; measured once in a run."""
        key = (pending, workers, slots)
        if key not in self._rates:
            self._rates[key] = statistics.median(
                dispatch.jobs_per_second(self.folder, *key, self.sizes.seconds)
                for _ in range(self.sizes.repeats)
            )
        return self._rates[key]


def echo(bench: Bench) -> Iterator[Figure]:
    """A `RequestJob`'s bytes to a ROUTER and back, one at a time, from a blocking DEALER in another
    process: with the ROUTER under Trio through the server's own adapter, which is the baseline of
    other rows, and with a blocking one. Beside them 4 KiB appended to a file and fsynced, in the
    folder where the ledgers and the peers' logs are."""
    samples = dispatch.echo_us(bench.folder, bench.sizes.samples)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield Figure(
            key=f"echo.{name}", what=f"bare echo, Trio, {name}", unit="us",
            value=quantile(samples, share),
        )  # fmt: skip
    blocking = dispatch.echo_us(bench.folder, bench.sizes.samples, blocking=True)
    yield Figure(
        key="echo.blocking", what="bare echo, blocking pyzmq, p50", unit="us",
        value=quantile(blocking, 0.5),
    )  # fmt: skip
    yield Figure(
        key="echo.fsync", what="4 KiB appended and fsynced, p50", unit="us",
        value=quantile(dispatch.fsync_us(bench.folder, bench.sizes.singles), 0.5),
    )  # fmt: skip


def request(bench: Bench) -> Iterator[Figure]:
    """One worker that has scored all pending jobs sends `RequestJob` and waits for `AssignJob`,
    whose row is committed before; it accepts, completes and waits for `Recorded` between the
    samples. Ratios are to the echo's p50."""
    yield from _request(bench, "request", bench.sizes.pending, p50=3, p99=8)


def request_many(bench: Bench) -> Iterator[Figure]:
    """The same with ten times as many pending."""
    yield from _request(bench, "request-many", bench.sizes.many, p50=4)


def _request(
    bench: Bench, key: str, pending: int, p50: float, p99: float | None = None
) -> Iterator[Figure]:
    samples, echo_us = bench.beside_echo(
        lambda: dispatch.request_beside(bench.folder, pending, bench.sizes.samples)
    )
    for name, share, limit in (("p50", 0.5, p50), ("p99", 0.99, p99)):
        yield Figure(
            key=f"{key}.{name}", what=f"request -> AssignJob, {_count(pending)} pending, {name}",
            unit="us", value=quantile(samples, share), baseline=echo_us, against="echo p50",
            goal=None if limit is None else Goal(limit, of_ratio=True),
        )  # fmt: skip


def cycle(bench: Bench) -> Iterator[Figure]:
    """4 workers, a process each; every slot goes request, assign, accept, complete, request, the
    last three in one message. An assignment counts when it arrives."""
    for slots, limit in ((8, 5_000), (1, 2_500)):
        yield Figure(
            key=f"cycle.4x{slots}", unit="jobs/s",
            what=f"full cycle, {_count(bench.sizes.pending)} pending, 4 workers x {slots}",
            value=bench.rate(bench.sizes.pending, 4, slots), goal=Goal(limit, at_least=True),
        )  # fmt: skip


def cycle_many(bench: Bench) -> Iterator[Figure]:
    """The same with ten times as many pending, as a ratio of it."""
    yield from _cycle(bench, "cycle-many", bench.sizes.many, 4)


def cycle_workers(bench: Bench) -> Iterator[Figure]:
    """The same with 50 workers, spread over 4 processes, as a ratio of it with 4."""
    yield from _cycle(bench, "cycle-workers", bench.sizes.pending, bench.sizes.workers)


def _cycle(bench: Bench, key: str, pending: int, workers: int) -> Iterator[Figure]:
    for slots in (8, 1):
        yield Figure(
            key=f"{key}.{slots}", unit="jobs/s",
            what=f"full cycle, {_count(pending)} pending, {workers} workers x {slots}",
            value=bench.rate(pending, workers, slots),
            baseline=bench.rate(bench.sizes.pending, 4, slots),
            against=f"{_count(bench.sizes.pending)} pending, 4 x {slots}:",
            goal=Goal(0.8, of_ratio=True, at_least=True),
        )  # fmt: skip


def single(bench: Bench) -> Iterator[Figure]:
    """Submission of one job to a server with one idle worker: from `CmdSubmit` to the worker's
    `JobOffer`, and to its `AssignJob` after score and request in one message. An accepted
    submission is durable, so one fsync is part of both."""
    offered: list[float] = []

    def measure() -> list[float]:
        found, assigned = dispatch.submit_to_assign_us(bench.folder, bench.sizes.singles)
        offered.extend(found)
        return assigned

    assigned, echo_us = bench.beside_echo(measure)
    for key, what, samples, goal in (
        ("assigned", "AssignJob at an idle worker", assigned, Goal(5, of_ratio=True)),
        ("offered", "JobOffer at an idle worker", offered, None),
    ):
        yield Figure(
            key=f"single.{key}", what=f"submit -> {what}, p50", unit="us",
            value=quantile(samples, 0.5), baseline=echo_us, against="echo p50", goal=goal,
        )  # fmt: skip


def heartbeats(bench: Bench) -> Iterator[Figure]:
    """What idle workers send, as processor time of the server: see `fleet.heartbeat_shares`."""
    workers = bench.sizes.idle_workers
    beating, silent = fleet.heartbeat_shares(bench.folder, workers, bench.sizes.idle_secs)
    yield Figure(
        key="heartbeats", what=f"{_count(workers)} idle workers' heartbeats", unit="% core",
        value=beating, baseline=silent, against="silent", goal=Goal(5),
    )  # fmt: skip


def first_list(bench: Bench) -> Iterator[Figure]:
    """The list of a worker that has just come, and what others wait for: see `fleet.first_list`."""
    count = _count(bench.sizes.many)
    found = fleet.first_list(bench.folder, bench.sizes.many)
    others_ms = [us / 1000 for us in found.others_us]
    for key, what, value, unit, goal in (
        ("secs", "first full list", found.list_secs, "s", Goal(1.5)),
        ("scored", "the same until its scores are taken", found.scored_secs, "s", None),
        ("others", "others' requests meanwhile, p50", quantile(others_ms, 0.5), "ms", None),
        ("others-max", "others' requests meanwhile, longest", max(others_ms), "ms", Goal(20)),
    ):
        yield Figure(
            key=f"list.{key}", what=f"list of {count}: {what}", unit=unit, value=value, goal=goal
        )


def memory(bench: Bench) -> Iterator[Figure]:
    """The server's memory once everybody has scored everything: see `fleet.memory_mb`."""
    sizes = bench.sizes
    now, peak = fleet.memory_mb(bench.folder, sizes.many, sizes.workers)
    for key, what, value in (("resident", "resident", now), ("peak", "at most", peak)):
        yield Figure(
            key=f"memory.{key}", unit="MB", value=value, goal=Goal(1_500),
            what=f"{_count(sizes.many)} candidates x {sizes.workers} workers, memory {what}",
        )  # fmt: skip


def graph(bench: Bench) -> Iterator[Figure]:
    """A large graph with its edges, and what others wait for: see graph_submission.py."""
    count = bench.sizes.many
    found = graph_submission.submit_graph(bench.folder, count)
    edges = _count(count * graph_submission.EDGES)
    for key, what, value, unit, limit in (
        ("secs", "accepted", found.secs, "s", 10),
        ("ping", "longest Pong to a worker meanwhile", max(found.pings_ms), "ms", 50),
        ("status", "longest status reply meanwhile", max(found.statuses_ms), "ms", 50),
    ):
        yield Figure(
            key=f"graph.{key}", what=f"submit {_count(count)} jobs, {edges} edges: {what}",
            unit=unit, value=value, goal=Goal(limit),
        )  # fmt: skip


def scoring(bench: Bench) -> Iterator[Figure]:
    """Pages of offers against a Nix store: see nix_scoring.py."""
    sizes = bench.sizes
    page = f"{_count(sizes.page)} candidates x {sizes.required}"
    missing, found = "", {}
    try:
        with tempfile.TemporaryDirectory(dir=bench.folder) as name:
            found = nix_scoring.measure(sizes.store_paths, sizes.page, sizes.required, Path(name))
    except nix_scoring.Missing as reason:
        missing = str(reason)
    for row in nix_scoring.ROWS:
        yield Figure(
            key=f"scoring.{row}", unit="ms", value=found.get(row), missing=missing,
            what=f"worker scores {page}, store of {_count(sizes.store_paths)} paths: {row}",
            goal=Goal(nix_scoring.GOAL_MS) if row in nix_scoring.WORKER_ROWS else None,
        )  # fmt: skip


def beside_peers(bench: Bench) -> Iterator[Figure]:
    """headrace's rate of `cycle`, with 1, 4 and 32 jobs in flight, as a multiple of that of other
    queues with as many: see peers.py."""
    sizes = bench.sizes
    for name in peers.PEERS:
        for workers, slots in peers.IN_FLIGHT:
            flight = workers * slots
            limit = peers.GOALS.get((name, flight))
            missing, rates = "", None
            try:
                rate = statistics.median(
                    peers.jobs_per_second(
                        name, workers, slots, sizes.pending, sizes.seconds, bench.folder.parent
                    )
                    for _ in range(sizes.repeats)
                )
            except peers.Missing as reason:
                missing = str(reason)
            else:
                rates = bench.rate(sizes.pending, workers, slots), rate
            yield Figure(
                key=f"peers.{name}.{flight}", what=f"beside {name}, {flight} in flight",
                unit="jobs/s", value=rates[0] if rates else None,
                baseline=rates[1] if rates else None, against=name, missing=missing,
                goal=None if limit is None else Goal(limit, of_ratio=True, at_least=True),
            )  # fmt: skip


ROWS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "echo": echo,
    "request": request,
    "request-many": request_many,
    "cycle": cycle,
    "cycle-many": cycle_many,
    "cycle-workers": cycle_workers,
    "single": single,
    "heartbeats": heartbeats,
    "list": first_list,
    "memory": memory,
    "graph": graph,
    "scoring": scoring,
    "peers": beside_peers,
}


def _count(number: int) -> str:
    return f"{number:,}".replace(",", " ")
