"""Microseconds per decision, by number of pending jobs, under the whole resource-aware policy.

    python benchmarks/scoring.py [--pending 1000,10000,100000,1000000] [--json FILE]

Method. A pool of builds with 200 workers connected; one has metrics, 8 slots of which 7 are taken,
and reported every job. A sample is what a request costs the assigner: the load, the decision, the
winner leaving the pool and the next job entering it with the worker's report. `decide` alone is
the part that ranks, `pass` the same from nothing, as for a worker's first request or after a build
has ended whose history counts. Two kinds of queue:

- mixed: each job lacks other bytes and paths, became ready at another moment of the last hour;
  a third belong to 300 packages with a history, the rest to packages never built;
- alike: nothing is missing anywhere and all became ready together, as after a submission.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from actors.ledger.records import AddMetric
from actors.server.averages import Instance
from actors.server.claims import Claim
from actors.server.memory import MARGIN, load_of
from actors.server.model import JobClass, PoolEntry, WorkerView
from actors.server.policies import POLICIES
from actors.server.pool import Pool
from actors.server.scoring import Decider, Decision, decide, find_held
from transport.messages import Score

WORKERS = 200
NOW = 10_000.0
POLICY = POLICIES["resource-aware"]
CLASS = JobClass("build", "default", "x86_64-linux", frozenset(), False)


def worker(number: int) -> WorkerView:
    return WorkerView(
        worker=f"w{number}", can_fetch=True, can_eval=True, can_build=True, has_capabilities=True,
        architectures=frozenset({"x86_64-linux"}), max_builds=8, has_metrics=True,
        cpu_core_score=1.0, cpu_usage_pct=60.0, ram_total_mb=64_000, ram_free_mb=30_000,
        download_speed_mbps=900.0, upload_speed_mbps=900.0,
    )  # fmt: skip


class Queue:
    """A pool in a steady state: what is taken out comes in anew."""

    def __init__(self, pending: int, kind: str) -> None:
        self.rng = random.Random(1)
        self.kind = kind
        # Memory for reports is only touched for the one worker that asks.
        self.pool = Pool(slots=WORKERS if pending <= 100_000 else 8)
        self.instance = Instance()
        self.decider = Decider(POLICY, self.pool)
        self.slot = self.pool.add_worker(worker(0))
        for number in range(1, WORKERS if pending <= 100_000 else 8):
            self.pool.add_worker(worker(number))
        if kind == "mixed":
            self.learn()
        self.number = 0
        scores = [self.enter() for _ in range(pending)]
        for first in range(0, pending, 1_000):
            self.pool.score(self.slot, scores[first : first + 1_000])
        for _ in range(100):
            self.instance.assigned(30.0, Score("j", 20, 10_000_000, False), NOW)
        self.claims = [
            Claim(f"a{n}", f"r{n}", "build", "w0", "s", 0.0, None, predicted_mb=2_000.0)
            for n in range(7)
        ]

    def learn(self) -> None:
        for number in range(900):
            metric = AddMetric(
                assignment_id=f"m{number}", package=f"p{number % 300}", system="x86_64-linux",
                at=NOW - 3_600 + number, wall_time_ms=self.rng.randrange(1_000_000),
                cpu_time_ms=None, peak_ram_mb=self.rng.randrange(4_000),
                output_nar_size=self.rng.randrange(10**9), oom=False, contention=1.0,
                core_score=1.0,
            )  # fmt: skip
            self.pool.history.add(metric)

    def enter(self) -> Score:
        self.number += 1
        job_id, rng = f"j{self.number:08}", self.rng
        if self.kind == "alike":
            entry = PoolEntry(
                job_id=job_id, cls=CLASS, name=job_id, ready_at=NOW - 10, package="none"
            )
            self.pool.enter(entry)
            return Score(job_id, 0, 0, False)
        known = rng.random() < 1 / 3
        package = f"p{rng.randrange(300)}" if known else f"q{self.number}"
        ready_at = NOW - rng.random() * 3_600
        self.pool.enter(
            PoolEntry(job_id=job_id, cls=CLASS, name=job_id, ready_at=ready_at, package=package)
        )
        return Score(job_id, rng.randrange(200), rng.randrange(10**10), False)

    def request(self, now: float) -> tuple[float, float, float]:
        """Seconds that `decide` took, that it takes from nothing, and all of it."""
        plain = self.plain(now)
        start = time.perf_counter()
        averages = self.instance.averages(self.pool, now)
        load = load_of(self.claims, None)
        if self.pool.profiles["build"].largest_peak_mb * MARGIN > load.room_mb(self.pool.worker(0)):
            find_held(self.pool, self.slot, now, averages, load)
        before = time.perf_counter()
        decision = self.decider.decide(self.slot, "build", now, averages, load=load, rejected=3)
        after = time.perf_counter()
        assert isinstance(decision, Decision)
        self.pool.leave(decision.job_id)
        self.pool.score(self.slot, [self.enter()])
        return after - before, plain, time.perf_counter() - start

    def plain(self, now: float) -> float:
        averages, load = self.instance.averages(self.pool, now), load_of(self.claims, None)
        start = time.perf_counter()
        decide(POLICY, self.pool, self.slot, "build", now, averages, load=load, rejected=3)
        return time.perf_counter() - start


def measure(pending: int, kind: str, samples: int) -> dict[str, Any]:
    queue = Queue(pending, kind)
    figures = [queue.request(NOW + n / 1_000) for n in range(samples + 20)][20:]
    return {
        "pending": pending,
        "queue": kind,
        "decide_us": round(statistics.median(f[0] for f in figures) * 1e6, 1),
        "pass_us": round(statistics.median(f[1] for f in figures) * 1e6, 1),
        "request_us": round(statistics.median(f[2] for f in figures) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pending", default="1000,10000,100000,1000000")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    print("pending   queue    decide        pass      request")
    rows = []
    for pending in map(int, args.pending.split(",")):
        for kind in ("mixed", "alike"):
            row = measure(pending, kind, 500 if pending < 500_000 else 100)
            rows.append(row)
            names = ("decide_us", "pass_us", "request_us")
            times = "  ".join(f"{row[name]:>7.0f} us" for name in names)
            print(f"{pending:>7}   {kind:<6} {times}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
