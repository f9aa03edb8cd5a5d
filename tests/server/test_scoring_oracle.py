"""The rules of both policies against a plain reading of them: no numpy, one job at a time.

A case is drawn from a `random.Random`: hypothesis gives one, and so does a loop over fixed seeds.
`HEADRACE_ORACLE_CASES` sets how many of each (default 1 000 by hypothesis, 20 000 by seed).
"""

from __future__ import annotations

import math
import os
import random
import statistics
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from actors.ledger.records import AddMetric
from actors.server.claims import Claim
from actors.server.memory import Load, Reservation, load_of
from actors.server.model import JobClass, PoolEntry, WorkerView, eligible
from actors.server.policies import POLICIES, with_fair_share
from actors.server.pool import Pool
from actors.server.scoring import (
    Averages,
    Decision,
    NoWinner,
    Policy,
    decide,
    explain,
    find_held,
    outranking,
)
from transport.messages import Score

DAY = 86_400.0
NOW = 200 * DAY
MARGIN = 1.1
CASES = os.environ.get("HEADRACE_ORACLE_CASES")
SYSTEMS = ("x86_64-linux", "x86_64-linux", "x86_64-linux", "builtin", "riscv64-linux")
WAITS = (-5.0, 0.0, 0.5, 59.5, 60.0, 1_800.5, 1_900.0)
PACKAGES = ("gcc", "hello", "llvm", "none")


class Job(Struct, frozen=True):
    entry: PoolEntry
    report: Score | None
    ticks: int


class Case(Struct, frozen=True):
    """Everything that a decision depends on."""

    policy: Policy
    kind: str
    worker: WorkerView
    jobs: tuple[Job, ...]
    metrics: tuple[AddMetric, ...]
    averages: Averages
    running: tuple[tuple[float, int | None], ...]
    """Builds of the worker: (predicted, observed) peak in MiB."""
    excluded: tuple[str, ...]


# -- the oracle --------------------------------------------------------------------------------


class Oracle:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.w = case.worker
        self.avg = case.averages
        self.promised = sum(max(p, o or 0) for p, o in case.running)
        self.used = float(sum(o or 0 for _, o in case.running))
        self.unused = self.promised - self.used
        self.aware = any(r.name == "resource-saturation" for r in case.policy.rules)
        self.candidates = [
            j
            for j in case.jobs
            if j.entry.cls.kind == case.kind
            and eligible(j.entry.cls, self.w)
            and not j.entry.is_cluster_member
            and j.entry.job_id not in case.excluded
        ]
        self.reserved = self.reservation() if self.aware else None

    # history

    def builds(self, job: Job) -> list[AddMetric]:
        key = (job.entry.package, job.entry.cls.system)
        mine = [x for x in self.case.metrics if (x.package, x.system) == key]
        latest = sorted(mine, key=lambda x: x.at)[-20:]
        return [x for x in latest if x.at >= NOW - 90 * DAY]

    def secs(self, x: AddMetric) -> float:
        assert x.wall_time_ms is not None
        return x.wall_time_ms / 1000 / x.contention

    def evaluations(self, project: str | None) -> list[AddMetric]:
        return [
            x
            for x in self.case.metrics
            if x.system == "" and x.at >= NOW - 7 * DAY and project in (None, x.package)
            and x.wall_time_ms is not None
        ]  # fmt: skip

    def peak(self, job: Job) -> float | None:
        peaks = sorted(x.peak_ram_mb for x in self.builds(job) if x.peak_ram_mb is not None)
        return peaks[math.ceil(0.95 * len(peaks)) - 1] if peaks else None

    def output_size(self, job: Job) -> float | None:
        sizes = [x.output_nar_size for x in self.builds(job) if x.output_nar_size is not None]
        return statistics.fmean(sizes) if sizes else None

    def core_factor(self, samples: list[AddMetric]) -> float:
        cores = [x.core_score for x in samples if x.core_score is not None]
        mine = self.w.cpu_core_score
        if not cores or mine is None:
            return 1.0
        measured = statistics.fmean(cores)
        if mine == 0:
            return 2.0 if measured > 0 else 1.0
        return min(max(measured / mine, 0.5), 2.0)

    # seconds

    def run_secs(self, job: Job) -> float:
        contention = 1 + 0.04 * len(self.case.running)
        if job.entry.cls.kind == "eval":
            samples = self.evaluations(job.entry.cls.project) or self.evaluations(None)
            if not samples:
                return 0.0
            mean = statistics.fmean(self.secs(x) for x in samples)
            return mean * self.core_factor(samples) * contention
        samples = self.builds(job)
        timed = [self.secs(x) for x in samples if x.wall_time_ms is not None]
        day = [
            self.secs(x)
            for x in self.case.metrics
            if x.system != "" and x.at >= NOW - DAY and x.wall_time_ms is not None
        ]
        if timed:
            build = statistics.fmean(timed) * self.core_factor(samples)
        else:
            build = statistics.median(day) if day else 0.0
        build *= contention
        risk = sum(x.oom for x in samples) / len(samples) if samples else 0.0
        peak, free = self.peak(job), self.w.ram_free_mb
        if free and peak is not None:
            risk += max(0.0, peak - free) / free
        return build + build * min(1.0, risk)

    def transfer(
        self, size: float, speed: float | None, mean: float | None, share: float, in_flight: int
    ) -> float:
        if size == 0:
            return 0.0
        rate = share / (in_flight + 1)
        known = mean if speed is None else speed
        if known is not None:
            rate = min(known, rate)
        return size * 8 / 10**6 / rate if rate > 0 else math.inf

    def missing(self, job: Job) -> tuple[float, float]:
        if job.report is None:
            return self.avg.missing_nar_size or 0.0, self.avg.missing_count or 0.0
        return float(job.report.missing_nar_size), float(job.report.missing_count)

    def seconds(self, job: Job) -> float:
        if job.entry.cls.kind == "eval":
            return self.run_secs(job)
        a, w = self.avg, self.w
        upload = self.transfer(
            self.output_size(job) or 0.0, w.upload_speed_mbps, a.upload_mbps, 1120, a.uploads
        )
        if job.report is not None and job.report.outputs_present:
            return upload
        size, count = self.missing(job)
        down = self.transfer(size, w.download_speed_mbps, a.download_mbps, 1200, a.downloads)
        return down + count * 0.18 + self.run_secs(job) + upload

    # memory

    def room(self) -> float:
        rooms = [math.inf]
        if self.w.ram_free_mb is not None:
            rooms.append(self.w.ram_free_mb - self.unused)
        if self.w.ram_total_mb is not None:
            rooms.append(self.w.ram_total_mb - self.promised)
        return min(rooms)

    def fit(self, job: Job) -> str:
        """fits, held, or never (as far as one can see)."""
        peak = self.peak(job)
        if not self.w.has_metrics or peak is None or peak * MARGIN <= self.room():
            return "fits"
        later = [math.inf]
        if self.w.ram_free_mb is not None:
            later.append(self.w.ram_free_mb + self.used)
        if self.w.ram_total_mb is not None:
            later.append(float(self.w.ram_total_mb))
        return "held" if peak * MARGIN <= min(later) else "never"

    def reservation(self) -> Reservation | None:
        if self.case.kind != "build" or not self.promised:
            return None
        waiting = [
            j
            for j in self.case.jobs
            if j.entry.cls.kind == "build" and eligible(j.entry.cls, self.w)
            and not j.entry.is_cluster_member and self.fit(j) == "held"
            and (j.entry.prioritized or NOW - j.entry.ready_at >= 60)
        ]  # fmt: skip
        if not waiting:
            return None
        oldest = min(waiting, key=lambda j: (j.entry.ready_at, j.entry.job_id))
        peak = self.peak(oldest)
        assert peak is not None
        return Reservation(oldest.entry.job_id, peak, oldest.entry.ready_at)

    def is_held(self, job: Job) -> bool:
        if self.fit(job) == "held":
            return True
        peak, kept = self.peak(job), self.reserved
        if kept is None or peak is None or not self.w.has_metrics:
            return False
        is_later = (job.entry.ready_at, job.entry.job_id) > (kept.ready_at, kept.job_id)
        left = self.room() - kept.peak_mb * MARGIN
        return is_later and peak <= kept.peak_mb and peak * MARGIN > left

    # the table

    def scores(self, job: Job) -> dict[str, float]:
        e, a, w = job.entry, self.avg, self.w
        is_build = e.cls.kind == "build"
        waited = max(0, math.floor(NOW - e.ready_at))
        average = 60.0 if a.wait_secs is None else a.wait_secs
        if average == 0:
            wait = 4000.0 if waited > 0 else 0.0
        else:
            wait = min(4000.0, 60 * waited / average)
        reserve = 0.0
        if not is_build and w.can_fetch and not e.cls.needs_fetch:
            reserve = -300 * (1 - a.idle_fetch_workers / a.fetch_workers)
        limit = 0.0
        if is_build:
            present = job.report is not None and job.report.outputs_present
            too_much = self.missing(job)[0] > (a.missing_nar_size or 0.0)
            if a.downloads >= 16 and too_much and not present:
                limit = -4000.0
            if a.uploads >= 8 and (self.output_size(job) or 0.0) > 2**20:
                limit = -4000.0
        scores = {
            "estimated-time": 3600.0 - min(3600.0, self.seconds(job)),
            "wait-time": wait,
            "qos": 5000.0 * e.prioritized + 1000.0 * e.interactive,
            "rescore-wait": 0.0,
            "reserve-fetch-workers": reserve,
            "transfer-limit": limit,
        }
        if self.aware:
            scores["resource-saturation"] = self.saturation(job) if is_build else 0.0
        if any(r.name == "fair-share" for r in self.case.policy.rules):
            running = a.project_claims
            total = sum(running.values())
            scores["fair-share"] = -500 * running.get(e.cls.project, 0) / total if total else 0.0
        lacking = -sum(scores.values())
        scores["overdue"] = (
            min(5.0 * (waited - 1800), lacking) if waited > 1800 and lacking > 0 else 0.0
        )
        return scores

    def saturation(self, job: Job) -> float:
        w = self.w
        if not w.has_metrics:
            return 0.0
        score = 0.0
        busy = 90 if job.entry.cls.system == "builtin" else 80
        is_hot = w.cpu_usage_pct is not None and w.cpu_usage_pct >= busy
        is_scarce = (
            w.ram_free_mb is not None and bool(w.ram_total_mb)
            and w.ram_free_mb / (w.ram_total_mb or 1) <= 0.10
        )  # fmt: skip
        if is_hot or is_scarce:
            score -= 8600
        if self.fit(job) == "never" and not self.is_held(job):
            score -= 8600
        return score

    def vetoes(self, job: Job) -> set[str]:
        vetoes = set()
        if job.entry.cls.kind == "build":
            if job.report is None and job.ticks < 4:
                vetoes.add("rescore-wait")
            if self.aware and self.is_held(job):
                vetoes.add("resource-saturation")
        return vetoes

    def ranking(self) -> list[tuple[int, str]]:
        """(millionths, job id) of all that are not vetoed, best first."""
        ranked = [
            (round(math.fsum(self.scores(j).values()) * 10**6), j.entry.job_id)
            for j in self.candidates
            if not self.vetoes(j)
        ]
        return sorted(ranked, key=lambda r: (-r[0], r[1]))


# -- cases -------------------------------------------------------------------------------------


def maybe(rng: random.Random, value: Any, odds: float = 0.75) -> Any:
    return value if rng.random() < odds else None


def a_metric(rng: random.Random, number: int) -> AddMetric:
    is_eval = rng.random() < 0.2
    age = rng.choice((100.0, 0.5 * DAY, 3 * DAY, 20 * DAY, 89 * DAY, 95 * DAY))
    return AddMetric(
        assignment_id=f"a{number}",
        package=rng.choice("pq") if is_eval else rng.choice(PACKAGES[:3]),
        system="" if is_eval else rng.choice(SYSTEMS),
        at=NOW - age - number,
        wall_time_ms=maybe(rng, rng.choice((0, 1_000, rng.randrange(5_000_000)))),
        cpu_time_ms=None,
        peak_ram_mb=maybe(rng, rng.choice((0, 1_000, rng.randrange(20_000)))),
        output_nar_size=maybe(rng, rng.choice((0, 2**20, rng.randrange(10**10)))),
        oom=rng.random() < 0.1,
        contention=1 + 0.04 * rng.randrange(8),
        core_score=maybe(rng, rng.choice((0.0, 1.0, 2.0, rng.uniform(0.1, 5)))),
    )


def a_size(rng: random.Random, total: int) -> int:
    return rng.choice((0, total // 10, total // 2, total, rng.randrange(64_000)))


def a_worker(rng: random.Random) -> WorkerView:
    total = rng.choice((4_000, 16_000, rng.randrange(1, 64_000)))
    has_metrics = rng.random() < 0.85
    return WorkerView(
        worker="w",
        can_fetch=rng.random() < 0.5,
        can_eval=True,
        can_build=True,
        has_capabilities=True,
        architectures=frozenset({"x86_64-linux"}),
        projects=maybe(rng, frozenset("p"), 0.1),
        max_builds=9,
        has_metrics=has_metrics,
        cpu_core_score=maybe(rng, rng.choice((0.0, 1.0, 2.0, rng.uniform(0.1, 5)))),
        ram_total_mb=maybe(rng, total, 0.9),
        cpu_usage_pct=maybe(rng, rng.choice((0.0, 79.9, 80.0, 85.0, 90.0, 100.0)))
        if has_metrics else None,
        ram_free_mb=maybe(rng, a_size(rng, total))
        if has_metrics else None,
        download_speed_mbps=maybe(rng, rng.choice((0.0, 1.0, 100.0, 5_000.0))),
        upload_speed_mbps=maybe(rng, rng.choice((0.0, 1.0, 100.0, 5_000.0))),
    )  # fmt: skip


def a_job(rng: random.Random, job_id: str) -> Job:
    if rng.random() < 0.25:
        cls = JobClass("eval", rng.choice("pq"), "", frozenset(), rng.random() < 0.5)
    else:
        cls = JobClass("build", rng.choice("pq"), rng.choice(SYSTEMS), frozenset(), False)
    entry = PoolEntry(
        job_id=job_id,
        cls=cls,
        name=job_id,
        package=rng.choice(PACKAGES),
        ready_at=NOW - rng.choice((*WAITS, rng.uniform(0, 9_000))),
        prioritized=rng.random() < 0.15,
        interactive=rng.random() < 0.15,
        is_cluster_member=rng.random() < 0.05,
    )  # fmt: skip
    report = None
    if cls.system != "riscv64-linux" and rng.random() < 0.8:
        report = Score(
            job_id=job_id,
            missing_count=rng.choice((0, 0, 1, rng.randrange(100_000), 2**32 - 1)),
            missing_nar_size=rng.choice((0, 0, 1, 10**6, rng.randrange(10**11), 2**63 - 1)),
            outputs_present=rng.random() < 0.2,
        )
    return Job(entry, report, rng.randrange(6))


def a_case(rng: random.Random) -> Case:
    fetchers = rng.randrange(1, 5)
    claims = {p: rng.randrange(1, 9) for p in "pqr" if rng.random() < 0.5}
    metrics = [a_metric(rng, n) for n in range(rng.choice((0, 3, 12, 60)))]
    ids = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randrange(9))
    policy = rng.choice(tuple(POLICIES.values()))
    if policy.name == "resource-aware" and rng.random() < 0.3:
        policy = with_fair_share(policy)
    return Case(
        policy=policy,
        kind=rng.choice(("build", "build", "build", "eval")),
        worker=a_worker(rng),
        jobs=tuple(a_job(rng, job_id) for job_id in ids),
        metrics=tuple(sorted(metrics, key=lambda x: x.at)),
        averages=Averages(
            wait_secs=maybe(rng, rng.choice((0.0, 60.0, rng.uniform(0.01, 1e5)))),
            missing_nar_size=maybe(rng, rng.choice((0.0, 1e6, rng.uniform(1, 1e11)))),
            missing_count=maybe(rng, rng.uniform(0, 1e4)),
            download_mbps=maybe(rng, rng.choice((0.0, 50.0, 2_000.0))),
            upload_mbps=maybe(rng, rng.choice((0.0, 50.0, 2_000.0))),
            downloads=rng.choice((0, 3, 15, 16, 40)),
            uploads=rng.choice((0, 3, 7, 8, 40)),
            fetch_workers=fetchers,
            idle_fetch_workers=rng.randrange(fetchers + 1),
            project_claims=claims,
        ),
        running=tuple(
            (rng.choice((0.0, 500.0, rng.uniform(0, 9_000))), maybe(rng, rng.randrange(9_000)))
            for _ in range(rng.choice((0, 1, 4)))
        ),
        excluded=tuple(i for i in ids if rng.random() < 0.1),
    )


def pool_of(case: Case, block_rows: int) -> tuple[Pool, int]:
    """Half of the jobs enter before their history is known, half after."""
    pool = Pool(block_rows=block_rows, slots=1)
    slot = pool.add_worker(case.worker)
    pool.tick(NOW)
    half = len(case.metrics) // 2
    pool.history.load(case.metrics[:half], NOW)
    for missing in range(5, -1, -1):
        for job in case.jobs:
            if job.ticks == missing:
                pool.enter(job.entry)
        if missing == 3:
            pool.history.load(case.metrics[half:], NOW)
        if missing:
            pool.tick(NOW)
    pool.score(slot, [job.report for job in case.jobs if job.report is not None])
    return pool, slot


def check(case: Case, block_rows: int = 3) -> None:
    oracle = Oracle(case)
    pool, slot = pool_of(case, block_rows)
    pool.check()
    history = pool.history
    averages = case.averages
    evaluations = history.any_evaluation
    averages = Averages(
        **{f: getattr(averages, f) for f in averages.__struct_fields__
           if f not in ("build_secs", "evaluation_secs", "evaluation_core_score")},
        build_secs=history.median_build_secs,
        evaluation_secs=None if math.isnan(evaluations.secs) else evaluations.secs,
        evaluation_core_score=None if math.isnan(evaluations.core_score)
        else evaluations.core_score,
    )  # fmt: skip
    claims = [
        Claim(f"a{n}", f"j{n}", "build", "w", "s", 0.0, None, predicted_mb=p, peak_ram_mb=o)
        for n, (p, o) in enumerate(case.running)
    ]
    load = load_of(claims, None)
    if case.policy.holds_memory and case.kind == "build" and load.promised_mb:
        reserved = find_held(pool, slot, NOW, averages, load)
        assert reserved == oracle.reserved
        load = Load(load.open_builds, load.promised_mb, load.used_mb, reserved)
    for job in case.jobs:
        if job.entry.cls.kind != case.kind:
            continue
        told = explain(case.policy, pool, slot, job.entry.job_id, NOW, averages, load=load)
        assert told is not None
        assert told.eligible == eligible(job.entry.cls, case.worker)
        if told.eligible:
            expected = oracle.scores(job)
            assert told.scores == pytest.approx(expected, rel=0, abs=1e-9)
            assert told.total == pytest.approx(math.fsum(expected.values()), rel=0, abs=0.51e-6)
            assert set(told.vetoes) == oracle.vetoes(job)
    ranking = oracle.ranking()
    decision = decide(
        case.policy, pool, slot, case.kind, NOW, averages, case.excluded,  # type: ignore[arg-type]
        load=load, rejected=3,
    )  # fmt: skip
    if not ranking or ranking[0][0] < 0:
        assert isinstance(decision, NoWinner)
        assert [job_id for job_id, _ in decision.best] == [job_id for _, job_id in ranking[:4]]
        return
    assert isinstance(decision, Decision)
    assert decision.job_id == ranking[0][1]
    assert decision.total == pytest.approx(ranking[0][0] / 10**6, rel=0, abs=1e-9)
    winner = next(j for j in case.jobs if j.entry.job_id == decision.job_id)
    assert decision.scores == pytest.approx(oracle.scores(winner), rel=0, abs=1e-9)
    assert [job_id for job_id, _ in decision.rejected] == [job_id for _, job_id in ranking[1:4]]
    if not case.excluded:
        last = len(ranking) - 1
        before = outranking(
            case.policy, pool, slot, ranking[last][1], NOW, averages, load=load
        )  # fmt: skip
        assert before == last


@settings(max_examples=int(CASES or 1_000), deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_decisions_are_what_the_rules_say(rng: random.Random) -> None:
    check(a_case(rng))


def test_decisions_of_20_000_seeds_are_what_the_rules_say() -> None:
    for seed in range(int(CASES or 20_000)):
        try:
            check(a_case(random.Random(seed)), block_rows=(3, 4, 8_192)[seed % 3])
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
