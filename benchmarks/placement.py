"""Milliseconds of a placement pass: clusters over idle workers, the solver included.

    python benchmarks/placement.py [--clusters 50] [--size 4] [--workers 200] [--json FILE]

Method. All workers have an idle slot and reported every member, each with other missing bytes; all
clusters wait. A pass looks at each in turn and finds its cheapest seats.

- plan: the pass alone, which clusters sit where;
- pass: with the seats taken and the rows made for the ledger;
- zones: a plan with `same_zone`, the workers in four zones;
- full: a plan with half the workers busy, so that half of the clusters find no seats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.ledger.records import Admitted, ClusterRecord, MemberRecord
from actors.server.assigner import Assigner
from actors.server.clusters.coordinator import Coordinator
from actors.server.config import ServerConfig
from actors.server.effects import Enter
from actors.server.feeder import Feeder
from actors.server.ids import Ids
from actors.server.jobs import build_record
from actors.server.policies import POLICIES
from actors.server.sessions import Session, SessionTable
from transport import messages as m

NOW = 10_000.0
ZONES = 4


class Farm:
    """Idle workers and waiting clusters."""

    def __init__(self, clusters: int, size: int, workers: int, *, same_zone: bool = False) -> None:
        self.rng = random.Random(1)
        self.sessions = SessionTable()
        self.feeder = Feeder()
        ids = Ids("b")
        self.assigner = Assigner(POLICIES["resource-aware"], lambda: ids.new("a"))
        self.coordinator = Coordinator(
            ServerConfig(state_dir=Path()), "s", lambda: ids.new("r"), self.assigner, self.feeder,
            self.sessions,
        )  # fmt: skip
        for number in range(workers):
            self.connect(f"w{number:03d}", f"z{number % ZONES}")
        for number in range(clusters):
            self.submit(f"k{number:03d}", size, same_zone=same_zone)
        for session in self.sessions:
            self.assigner.score(session, [
                m.Score(entry.job_id, 3, self.rng.randrange(10**10), outputs_present=False)
                for entry in self.assigner.pool
            ])  # fmt: skip

    def connect(self, name: str, zone: str) -> None:
        able = m.Capabilities(fetch=True, eval=True, build=True)
        session = Session(
            id=name, peer=name.encode(), worker=name, name=name, agent="", asked=able,
            capabilities=able, projects=None, last_seen=NOW,
        )  # fmt: skip
        session.announced = m.WorkerCapabilities(["x86_64-linux"], [], 2, zone=zone)
        self.sessions.add(session)
        self.assigner.attach(session, [])
        assert self.assigner.request(session, "build", NOW) is None

    def submit(self, name: str, size: int, *, same_zone: bool) -> None:
        jobs = [
            build_record(
                m.SubmittedJob(
                    drv_path=f"/nix/store/{name}-{n}.drv", name=f"{name}-{n}", input_srcs=[],
                    system="x86_64-linux", required_features=[], outputs={"out": f"/{name}-{n}"},
                    input_drvs=[],
                ),
                f"{name}-{n}", interactive=False, cluster=name,
            )
            for n in range(size)
        ]  # fmt: skip
        members = tuple(MemberRecord(job.job_id, "node", n) for n, job in enumerate(jobs))
        self.coordinator.added(
            [ClusterRecord(name, "default", "Queued", members, same_zone=same_zone)]
        )
        admitted = Admitted("s", {}, (), frozenset())
        for effect in self.feeder.merge(jobs, "s", admitted, NOW):
            if isinstance(effect, Enter):
                self.assigner.enter(effect.entry)

    def occupy(self, workers: int) -> None:
        """The first workers asked for too long ago to count as idle."""
        for session in list(self.sessions)[:workers]:
            self.assigner._idle[session.worker, "build"] = 0.0  # noqa: SLF001 - staged

    def plan(self) -> int:
        clusters = self.coordinator.clusters.values()
        return len(list(self.coordinator.planner.plans(clusters, NOW)))

    def run_pass(self) -> int:
        self.coordinator.kick()
        self.coordinator.place(NOW)
        return len(self.coordinator.attempts)


def sample(prepare: Callable[[], Farm], work: Callable[[Farm], int], repeats: int) -> Any:
    times, placed = [], 0
    for _ in range(repeats):
        farm = prepare()
        start = time.perf_counter()
        placed = work(farm)
        times.append((time.perf_counter() - start) * 1000)
    return {
        "placed": placed,
        "median_ms": round(statistics.median(times), 2),
        "worst_ms": round(max(times), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clusters", type=int, default=50)
    parser.add_argument("--size", type=int, default=4)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    shape = args.clusters, args.size, args.workers
    farm, zoned, full = Farm(*shape), Farm(*shape, same_zone=True), Farm(*shape)
    full.occupy(args.workers // 2)
    farm.plan()  # imports the solver
    rows = {
        "plan": sample(lambda: farm, Farm.plan, 100),
        "pass": sample(lambda: Farm(*shape), Farm.run_pass, 10),
        "zones": sample(lambda: zoned, Farm.plan, 100),
        "full": sample(lambda: full, Farm.plan, 100),
    }
    print(f"{args.clusters} clusters of {args.size} over {args.workers} workers")
    for name, row in rows.items():
        print(
            f"{name:<6} {row['median_ms']:>7.2f} ms, worst {row['worst_ms']:>7.2f} ms, "
            f"{row['placed']} placed"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
