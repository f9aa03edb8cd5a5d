"""Rules and decisions, against a plain reading of the scoring rules, one job at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest
from msgspec import Struct

from actors.ledger.records import AddMetric
from actors.server import policies
from actors.server.model import JobClass, PoolEntry, WorkerView
from actors.server.policies import DEFAULT_POLICY, POLICIES, PolicyError, UnknownPolicy, load_policy
from actors.server.pool import Pool
from actors.server.scoring import (
    Averages,
    Columns,
    Decision,
    Floats,
    NoWinner,
    Policy,
    decide,
    explain,
)
from actors.server.scoring.columns import seconds_per_byte
from transport.messages import Kind, Score

SIMPLE = POLICIES["simple"]
BUILD = JobClass("build", "p", "x86_64-linux", frozenset(), False)
FOREIGN = BUILD._replace(system="riscv64-linux")
EVALUATION = JobClass("eval", "p", "", frozenset(), False)


def view(**changes: Any) -> WorkerView:
    fields: dict[str, Any] = {
        "worker": "w",
        "can_fetch": True,
        "can_eval": True,
        "can_build": True,
        "has_capabilities": True,
        "architectures": frozenset({"x86_64-linux"}),
    }
    return WorkerView(**(fields | changes))


def entry(job_id: str, cls: JobClass = BUILD, **changes: Any) -> PoolEntry:
    return PoolEntry(job_id=job_id, cls=cls, name=job_id, **({"ready_at": 0.0} | changes))


def metric(**changes: Any) -> AddMetric:
    """A build of the package that `entry` makes."""
    fields: dict[str, Any] = {
        "assignment_id": "a", "package": "", "system": "x86_64-linux", "at": 0.0,
        "wall_time_ms": None, "cpu_time_ms": None, "peak_ram_mb": None, "output_nar_size": None,
        "oom": False, "contention": 1.0, "core_score": None,
    }  # fmt: skip
    return AddMetric(**(fields | changes))


def score(job_id: str, size: int = 0, count: int = 0, *, present: bool = False) -> Score:
    return Score(job_id=job_id, missing_count=count, missing_nar_size=size, outputs_present=present)


class Job(Struct, frozen=True):
    """A pending job, what the worker said of it, and how many ticks it saw."""

    entry: PoolEntry
    report: Score | None
    ticks: int


NOW = 10_000.0


def pool_of(jobs: Sequence[Job], worker: WorkerView) -> tuple[Pool, int]:
    """A pool in blocks of 4, where each job saw as many ticks as it says."""
    pool = Pool(block_rows=4, slots=1)
    slot = pool.add_worker(worker)
    for missing in range(5, -1, -1):
        for job in jobs:
            if job.ticks == missing:
                pool.enter(job.entry)
        if missing:
            pool.tick()
    pool.score(slot, [job.report for job in jobs if job.report is not None])
    return pool, slot


def decided(
    jobs: Sequence[Job],
    policy: Policy = SIMPLE,
    kind: Kind = "build",
    averages: Averages = Averages(),  # noqa: B008 - frozen
    **worker: Any,
) -> Decision | NoWinner:
    pool, slot = pool_of(jobs, view(**worker))
    return decide(policy, pool, slot, kind, NOW, averages)


def winner(decision: Decision | NoWinner) -> str | None:
    return decision.job_id if isinstance(decision, Decision) else None


def reported(job_id: str, size: int = 0, **changes: Any) -> Job:
    return Job(entry(job_id, **({"ready_at": NOW} | changes)), score(job_id, size), 0)


# -- decisions ---------------------------------------------------------------------------------


def test_equal_totals_go_to_the_smaller_id_whatever_the_order_of_entry() -> None:
    for order in ("bca", "acb", "cab"):
        assert winner(decided([reported(job_id) for job_id in order])) == "a"
    many = [reported(f"j{number:03}") for number in reversed(range(100))]
    assert winner(decided(many)) == "j000"


def test_totals_that_differ_by_less_than_a_millionth_are_equal() -> None:
    class Given:
        name, description = "given", "by row"

        def score(self, view: Columns) -> Floats:
            return np.array([3e-7, 2e-7, 1e-7])

        def veto(self, view: Columns) -> None:
            return None

    jobs = [reported(job_id) for job_id in "cba"]  # "c" has 3e-7
    assert decided(jobs, Policy("given", "", (Given(),))) == Decision("a", 0.0, {"given": 1e-7}, 3)


class Constant:
    """Gives the same to all, and vetoes some."""

    name, description = "constant", "the same for all"

    def __init__(self, value: float, vetoed: Sequence[bool] = ()) -> None:
        self.value, self.vetoed = value, vetoed

    def score(self, view: Columns) -> float:
        return self.value

    def veto(self, view: Columns) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        return np.array(self.vetoed) if self.vetoed else None


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, 0.0), (-4e-7, 0.0), (-6e-7, None), (-1.0, None), (3.0, 3.0), (math.nan, None)],
)
def test_the_floor_is_zero_inclusive_after_rounding(value: float, expected: float | None) -> None:
    decision = decided([reported("a")], Policy("constant", "", (Constant(value),)))
    assert (decision.total if isinstance(decision, Decision) else None) == expected
    if isinstance(decision, Decision):
        assert math.copysign(1.0, decision.total) == 1.0


def test_a_vetoed_best_gives_way_to_the_next_and_stays_pending() -> None:
    jobs = [reported("a", prioritized=True), reported("b"), reported("c")]
    policy = Policy("veto", "", (*SIMPLE.rules, Constant(0.0, [True, False, False])))
    pool, slot = pool_of(jobs, view())
    assert winner(decide(policy, pool, slot, "build", NOW, Averages())) == "b"
    assert "a" in pool


def test_a_total_that_is_no_number_hides_nobody_else() -> None:
    class Broken:
        name, description = "broken", "no number for the first"

        def score(self, view: Columns) -> Floats:
            return np.where(np.arange(len(view.ticks)) == 0, np.nan, 1.0)

        def veto(self, view: Columns) -> None:
            return None

    jobs = [reported(job_id) for job_id in "ab"]
    assert winner(decided(jobs, Policy("broken", "", (Broken(),)))) == "b"


def test_a_rule_sees_the_sum_of_those_before_it() -> None:
    class Undo:
        name, description = "undo", "back to zero"

        def score(self, view: Columns) -> Floats:
            return np.negative(view.subtotal, dtype=np.float64)

        def veto(self, view: Columns) -> None:
            return None

    decision = decided([reported("a")], Policy("undo", "", (*SIMPLE.rules, Undo())))
    assert isinstance(decision, Decision)
    assert (decision.total, decision.scores["undo"]) == (0.0, -3600.0)


def test_kinds_do_not_mix_and_members_of_clusters_are_passed_over() -> None:
    build, evaluation = reported("a"), Job(entry("b", EVALUATION), None, 0)
    member = reported("c", is_cluster_member=True, prioritized=True)
    jobs = [build, evaluation, member]
    assert winner(decided(jobs)) == "a"
    assert winner(decided(jobs, kind="eval")) == "b"
    assert winner(decided([build], kind="eval")) is None
    assert winner(decided([member])) is None


def test_excluded_jobs_are_passed_over() -> None:
    pool, slot = pool_of([reported(job_id) for job_id in "abc"], view())
    averages = Averages()
    decision = decide(SIMPLE, pool, slot, "build", NOW, averages, exclude=["a", "zzz"])
    assert isinstance(decision, Decision)
    assert (decision.job_id, decision.candidates) == ("b", 2)
    assert decide(SIMPLE, pool, slot, "build", NOW, averages, exclude="abc") == NoWinner(0, ())


def test_jobs_without_a_row_and_without_rights_are_explained_too() -> None:
    pool, slot = pool_of([Job(entry("a", FOREIGN), None, 0)], view())
    foreign = explain(SIMPLE, pool, slot, "a", NOW, Averages())
    assert foreign is not None
    assert (foreign.eligible, foreign.scores, foreign.vetoes) == (False, {}, ())
    assert explain(SIMPLE, pool, slot, "zzz", NOW, Averages()) is None


# -- rules -------------------------------------------------------------------------------------


def test_an_unscored_build_waits_for_its_report_or_four_ticks() -> None:
    pool = Pool()
    slot = pool.add_worker(view())
    pool.enter(entry("a"))
    pool.enter(entry("e", EVALUATION))

    def ask(kind: Kind) -> str | None:
        return winner(decide(SIMPLE, pool, slot, kind, NOW, Averages()))

    assert ask("eval") == "e"
    for _ in range(3):
        pool.tick()
        assert ask("build") is None
    pool.tick()
    assert ask("build") == "a"
    pool.enter(entry("b", prioritized=True))
    assert ask("build") == "a"
    pool.score(slot, [score("b")])
    assert ask("build") == "b"


def test_a_prioritized_job_beats_one_that_starves() -> None:
    starving = reported("a", ready_at=NOW - 86_400)
    assert winner(decided([starving, reported("b", prioritized=True)])) == "b"


def test_a_measured_average_wait_of_zero_is_a_zero() -> None:
    fresh, waiting = reported("a"), reported("b", ready_at=NOW - 1)
    zero = decided([fresh, waiting], averages=Averages(wait_secs=0.0))
    assert zero is not None
    assert (zero.job_id, zero.scores["wait-time"]) == ("b", 4000.0)
    unknown = decided([fresh, waiting])
    assert unknown is not None
    assert unknown.scores["wait-time"] == 1.0
    only_fresh = decided([fresh], averages=Averages(wait_secs=0.0))
    assert only_fresh is not None
    assert only_fresh.scores["wait-time"] == 0.0


@pytest.mark.parametrize(
    ("speed", "mean", "in_flight", "expected"),
    [
        (100.0, None, 0, 8e-8),
        (None, 50.0, 0, 1.6e-7),
        (None, None, 0, 8e-6 / 1200),
        (5000.0, None, 3, 8e-6 / 300),
        (0.0, 50.0, 0, 1e12),
        (None, 0.0, 0, 1e12),
    ],
)
def test_transfers_share_what_there_is(
    speed: float | None, mean: float | None, in_flight: int, expected: float
) -> None:
    assert seconds_per_byte(speed, mean, 1200.0, in_flight) == pytest.approx(expected)


def test_no_bytes_take_no_time_even_at_no_speed() -> None:
    still = decided([reported("a")], download_speed_mbps=0.0)
    assert still is not None
    assert still.scores["estimated-time"] == 3600.0
    stuck = decided([reported("a", size=1)], download_speed_mbps=0.0)
    assert stuck is not None
    assert stuck.scores["estimated-time"] == 0.0


def test_present_outputs_only_cost_their_upload() -> None:
    job = Job(entry("a", ready_at=NOW), score("a", 10**12, 50, present=True), 0)
    pool, slot = pool_of([job], view(upload_speed_mbps=80.0))
    pool.history.add(metric(output_nar_size=10**9, wall_time_ms=10**9))
    decision = decide(SIMPLE, pool, slot, "build", NOW, Averages())
    assert isinstance(decision, Decision)
    assert decision.scores["estimated-time"] == pytest.approx(3500.0)


def test_what_a_worker_did_not_report_counts_with_the_mean() -> None:
    unreported = Job(entry("a", ready_at=NOW), None, 4)
    decision = decided(
        [unreported],
        averages=Averages(missing_nar_size=1e9, missing_count=100.0),
        download_speed_mbps=80.0,
    )
    assert isinstance(decision, Decision)
    assert decision.scores["estimated-time"] == pytest.approx(3600 - 100 - 18)
    without = decided([unreported], download_speed_mbps=80.0)
    assert without is not None
    assert without.scores["estimated-time"] == 3600.0


# -- policies ----------------------------------------------------------------------------------


def test_both_policies_exist_and_the_default_is_one_of_them() -> None:
    assert set(POLICIES) == {"simple", "resource-aware"}
    assert load_policy(DEFAULT_POLICY) is POLICIES["resource-aware"]
    for policy in POLICIES.values():
        names = [rule.name for rule in policy.rules]
        others = ["resource-saturation"] if policy.name == "resource-aware" else []
        assert names == [
            "estimated-time", "wait-time", "qos", "rescore-wait", "reserve-fetch-workers",
            "transfer-limit", *others, "overdue",
        ]  # fmt: skip
        assert all(rule.description for rule in policy.rules)


THIRD_PARTY = Policy("theirs", "of another package", (Constant(1.0),))
NO_POLICY = 5


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry points as packages would bring them."""
    points = EntryPoints(
        EntryPoint(name, target, policies.ENTRY_POINT_GROUP)
        for name, target in (
            ("theirs", "third_party:THIRD_PARTY"),
            ("number", "third_party:NO_POLICY"),
            ("broken", "no_such_module_anywhere:POLICY"),
        )
    )
    module = type(policies)("third_party")
    module.__dict__.update(THIRD_PARTY=THIRD_PARTY, NO_POLICY=NO_POLICY)
    monkeypatch.setitem(__import__("sys").modules, "third_party", module)
    monkeypatch.setattr(policies, "entry_points", points.select)


@pytest.mark.usefixtures("installed")
def test_policies_of_other_packages_are_found() -> None:
    assert load_policy("theirs") is THIRD_PARTY
    with pytest.raises(UnknownPolicy, match=r": broken, number, resource-aware, simple, theirs$"):
        load_policy("fast")
    with pytest.raises(PolicyError, match=r"policy 'number' .* is not a headrace Policy"):
        load_policy("number")
    with pytest.raises(PolicyError, match=r"policy 'broken' .* cannot be loaded: No module"):
        load_policy("broken")


def test_an_unknown_policy_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UnknownPolicy, match=r"^unknown policy 'x'; known are: .*simple.*$"):
        load_policy("x")
