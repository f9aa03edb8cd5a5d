"""What a decider keeps between requests never changes a decision."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from actors.ledger.records import AddMetric
from actors.server.averages import Instance
from actors.server.memory import Load, Reservation
from actors.server.model import JobClass, PoolEntry, WorkerView
from actors.server.policies import POLICIES, with_fair_share
from actors.server.pool import Pool
from actors.server.scoring import Decider, Decision, NoWinner, Policy, decide, shortlist
from transport.messages import Kind, Score

SYSTEMS = ("x86_64-linux", "riscv64-linux")
BUILDS = [
    JobClass("build", project, system, frozenset(), False)
    for project in ("a", "b")
    for system in SYSTEMS
]
EVALUATIONS = [JobClass("eval", "a", "", frozenset(), fetch) for fetch in (False, True)]
LIVES = 60
PACKAGES = ("gcc", "hello", "none")


def a_worker(number: int) -> WorkerView:
    return WorkerView(
        worker=f"w{number}", can_fetch=True, can_eval=True, can_build=True, has_capabilities=True,
        architectures=frozenset(SYSTEMS), max_builds=8,
        download_speed_mbps=900.0 if number else None, cpu_core_score=1.0,
    )  # fmt: skip


class Life:
    """A pool that things happen to, and what is decided meanwhile."""

    def __init__(self, rng: random.Random, policy: Policy, *, alike: bool) -> None:
        self.rng, self.policy, self.alike = rng, policy, alike
        self.now = 1_000_000.0
        self.pool = Pool(block_rows=8, slots=2)
        self.decider = Decider(policy, self.pool, kept=20, worth_keeping=0)
        self.instance = Instance()
        self.slots = [self.pool.add_worker(a_worker(n)) for n in range(2)]
        self.known: list[str] = []
        self.made = 0
        self.served = 0
        """Decisions without a pass over all candidates."""
        self.load = Load()
        self.passes = 0
        a_pass = self.decider._pass

        def counted(*arguments: Any, **more: Any) -> Any:
            self.passes += 1
            return a_pass(*arguments, **more)

        self.decider._pass = counted

    def enter(self) -> None:
        for _ in range(self.rng.choice((1, 3, 12, 30))):
            self.made += 1
            rng, is_eval = self.rng, self.rng.random() < 0.1
            job_id = f"j{self.made if rng.random() < 0.9 else 5_000 - self.made:05}"
            age = 0.0 if self.alike else rng.choice((0.0, 0.4, rng.random() * 100, 1_900.0))
            self.pool.enter(
                PoolEntry(
                    job_id=job_id,
                    cls=rng.choice(EVALUATIONS if is_eval else BUILDS),
                    name=job_id,
                    ready_at=self.now - age,
                    package="none" if self.alike else rng.choice(PACKAGES),
                    prioritized=not self.alike and rng.random() < 0.1,
                    interactive=not self.alike and rng.random() < 0.1,
                )
            )
            self.known.append(job_id)
            if rng.random() < 0.98:
                self.report(job_id)

    def report(self, job_id: str | None = None) -> None:
        rng = self.rng
        names = [job_id] if job_id else [rng.choice(self.known or ["x"]) for _ in range(3)]
        for slot in self.slots:
            if rng.random() < 0.98:
                self.pool.score(slot, [
                    Score(name, 0, 0, False) if self.alike
                    else Score(name, rng.randrange(9), rng.randrange(10**9), rng.random() < 0.05)
                    for name in names
                ])  # fmt: skip

    def report_page(self) -> None:
        scores = [Score(name, 0, self.rng.randrange(10**9), False) for name in self.known]
        if len(scores) >= 50:
            self.pool.score(self.rng.choice(self.slots), scores)

    def leave(self) -> None:
        if self.known:
            self.pool.leave(self.known.pop(self.rng.randrange(len(self.known))))

    def thin_out(self) -> None:
        """So that rows are moved."""
        for _ in range(len(self.known) // 2):
            self.leave()

    def wait(self) -> None:
        self.now += self.rng.choice((0.0, 0.001, 0.01, 0.3, 1.0, 7.0, 500.0))

    def tick(self) -> None:
        self.pool.tick(self.now)

    def prioritize(self) -> None:
        if self.known:
            self.pool.set_prioritized(self.rng.choice(self.known), self.rng.random() < 0.5)

    def change_worker(self) -> None:
        slot, rng = self.rng.choice(self.slots), self.rng
        view = replace(
            self.pool.worker(slot),
            has_metrics=True,
            cpu_usage_pct=rng.choice((10.0, 85.0, 95.0)),
            ram_total_mb=8_000,
            ram_free_mb=rng.choice((500, 3_000, 7_000)),
            architectures=frozenset(rng.sample(SYSTEMS, rng.choice((1, 2)))),
            download_speed_mbps=rng.choice((None, 100.0, 900.0)),
        )
        self.pool.update_worker(slot, view)

    def replace_worker(self) -> None:
        slot = self.slots.pop()
        self.pool.remove_worker(slot)
        self.decider.forget(slot)
        self.slots.append(self.pool.add_worker(a_worker(self.made)))

    def learn(self) -> None:
        rng = self.rng
        self.pool.history.add(AddMetric(
            f"m{rng.random()}", rng.choice(PACKAGES[:2]), rng.choice(SYSTEMS),
            self.now, rng.randrange(10**6), None, rng.randrange(6_000), rng.randrange(10**7), False,
            1.0, 1.0,
        ))  # fmt: skip

    def occupy(self) -> None:
        rng = self.rng
        reserved = None
        if self.known and rng.random() < 0.3:
            reserved = Reservation(rng.choice(self.known), 2_000.0, self.now - 100)
        self.load = Load(rng.randrange(4), rng.choice((0.0, 3_000.0)), 0.0, reserved)
        phases = self.instance.phases
        phases["prefetch"], phases["upload"] = rng.choice((0, 16)), rng.choice((0, 8))
        self.instance.project_claims = {"a": rng.randrange(1, 3), "b": 1}

    def request(self) -> None:
        rng = self.rng
        for _ in range(rng.choice((1, 4, 12))):
            slot = rng.choice(self.slots)
            kind: Kind = "eval" if rng.random() < 0.1 else "build"
            averages = self.instance.averages(self.pool, self.now)
            exclude = [rng.choice(self.known)] if self.known and rng.random() < 0.05 else []
            passes = self.passes
            found = self.decider.decide(
                slot, kind, self.now, averages, exclude, load=self.load, rejected=2
            )
            plain = decide(
                self.policy, self.pool, slot, kind, self.now, averages, exclude,
                load=self.load, rejected=2,
            )  # fmt: skip
            self.compare(found, plain)
            self.served += self.passes == passes
            if isinstance(found, Decision):
                entry = self.pool.leave(found.job_id)
                assert entry is not None
                self.known.remove(found.job_id)
                score = Score(found.job_id, 1, rng.randrange(10**8), False)
                self.instance.assigned(self.now - entry.ready_at, score, self.now)
                self.now += 0.0005

    def compare(self, found: Decision | NoWinner, plain: Decision | NoWinner) -> None:
        assert type(found) is type(plain)
        if isinstance(found, Decision) and isinstance(plain, Decision):
            assert (found.job_id, found.total) == (plain.job_id, plain.total)
            assert found.rejected == plain.rejected
            assert found.scores == plain.scores
        elif isinstance(found, NoWinner) and isinstance(plain, NoWinner):
            assert found.best == plain.best

    def run(self, steps: int) -> None:
        often: list[Callable[[], None]] = [self.enter, self.request, self.request, self.wait]
        seldom = [
            self.report, self.report_page, self.leave, self.thin_out, self.tick, self.prioritize,
            self.change_worker, self.replace_worker, self.learn, self.occupy,
        ]  # fmt: skip
        if self.alike:
            seldom = [self.report, self.leave, self.tick, self.thin_out]
        for _ in range(steps):
            self.rng.choice(often if self.rng.random() < 0.9 else seldom)()
        self.pool.check()


ALL = [*POLICIES.values(), with_fair_share(POLICIES["resource-aware"])]


@pytest.mark.parametrize("alike", [False, True])
def test_what_is_kept_changes_no_decision(monkeypatch: pytest.MonkeyPatch, alike: bool) -> None:
    monkeypatch.setattr(shortlist, "ROOM", 12)
    decide_module = importlib.import_module("actors.server.scoring.decide")
    monkeypatch.setattr(decide_module, "_PATIENCE", 1)
    lives = []
    for seed in range(LIVES):
        life = Life(random.Random(seed), ALL[seed % len(ALL)], alike=alike)
        life.run(80)
        lives.append(life)
    assert sum(life.served for life in lives) > 500, "next to nothing was decided from it"
