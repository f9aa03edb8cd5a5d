"""Policies that other packages bring, well made or not, and the switches of our own."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.ledger.records import AddMetric
from actors.server import policies
from actors.server.model import JobClass, PoolEntry, WorkerView
from actors.server.policies import POLICIES, PolicyError, load_policy, with_fair_share
from actors.server.pool import Pool
from actors.server.scoring import (
    Averages,
    Columns,
    Decision,
    Faults,
    NeverVetoes,
    NoWinner,
    Policy,
    decide,
    explain,
)
from transport.messages import Score

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "policy"
NOW = 100.0


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package, as if it were installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((name, target),) = project["entry-points"]["headrace.policies"].items()
    spec = importlib.util.spec_from_file_location("night_shift", EXAMPLE / "night_shift.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "night_shift", module)
    points = EntryPoints([EntryPoint(name, target, policies.ENTRY_POINT_GROUP)])
    monkeypatch.setattr(policies, "entry_points", points.select)


def pool_of(
    count: int = 6, block_rows: int = 4, projects: str = "p", **worker: Any
) -> tuple[Pool, int]:
    pool = Pool(block_rows=block_rows)
    view = WorkerView(
        worker="w", can_fetch=False, can_eval=False, can_build=True, has_capabilities=True,
        architectures=frozenset({"x"}), **worker,
    )  # fmt: skip
    slot = pool.add_worker(view)
    for number in range(count):
        cls = JobClass("build", projects[number % len(projects)], "x", frozenset(), False)
        job_id = "abcdefghij"[number]
        pool.enter(
            PoolEntry(job_id=job_id, cls=cls, name=job_id, package=job_id, ready_at=NOW - number)
        )
        pool.score(slot, [Score(job_id, 0, 0, False)])
    return pool, slot


def ranking(policy: Policy, pool: Pool, slot: int, faults: Faults | None = None) -> list[str]:
    decision = decide(
        policy, pool, slot, "build", NOW, Averages(), rejected=9, faults=faults or Faults()
    )
    if isinstance(decision, NoWinner):
        return []
    return [decision.job_id, *(j for j, _ in decision.rejected)]


@pytest.mark.usefixtures("example")
def test_the_example_package_adds_a_policy_and_a_rule() -> None:
    policy = load_policy("night-shift")
    pool, slot = pool_of(2, cpu_count=64)
    for package, wall_time_ms in (("a", 60_000), ("b", 900_000)):
        pool.history.add(
            AddMetric("m", package, "x", 0, wall_time_ms, None, None, None, False, 1.0, None)
        )
    told = [explain(policy, pool, slot, j, NOW, Averages()) for j in "ab"]
    assert [t.scores["big-on-big"] for t in told if t is not None] == [-500.0, 0.0]
    small, slot = pool_of(2, cpu_count=8)
    assert explain(policy, small, slot, "a", NOW, Averages()).scores["big-on-big"] == 0.0  # type: ignore[union-attr]


class Reversed(NeverVetoes):
    """1000 - score, without a bound: every block is looked at."""

    name, description = "reversed", "the worst first"

    def score(self, view: Columns) -> Any:
        return 1_000.0 - 2 * np.asarray(view.subtotal)


def test_a_policy_may_turn_the_order_around() -> None:
    wait = next(r for r in POLICIES["simple"].rules if r.name == "wait-time")
    pool, slot = pool_of()
    assert ranking(Policy("wait", "", (wait,)), pool, slot) == list("fedcba")
    assert ranking(Policy("turned", "", (wait, Reversed())), pool, slot) == list("abcdef")


class Nothing(NeverVetoes):
    name, description = "nothing", "all below the floor"

    def score(self, view: Columns) -> float:
        return -1.0

    def best(self, extremes: object) -> float:
        return -1.0


def test_a_policy_that_gives_all_less_than_nothing_hands_out_nothing() -> None:
    pool, slot = pool_of()
    assert ranking(Policy("nothing", "", (Nothing(),)), pool, slot) == []


class Broken(NeverVetoes):
    """Raises for one job."""

    name, description = "broken", "raises for job b"

    def score(self, view: Columns) -> Any:
        if (view.waited == 1.0).any():
            raise ZeroDivisionError("b")
        return view.waited

    def best(self, extremes: object) -> float:
        raise KeyError("no bound")


def test_a_rule_that_raises_for_one_job_skips_that_job_and_is_told_once() -> None:
    told: list[str] = []
    faults = Faults(told.append)
    pool, slot = pool_of()
    for _ in range(3):
        assert ranking(Policy("broken", "", (Broken(),)), pool, slot, faults) == list("fedca")
    assert len(told) == 1
    assert "broken" in told[0]
    broken = explain(Policy("broken", "", (Broken(),)), pool, slot, "b", NOW, Averages())
    assert broken is not None
    assert broken.vetoes == ("broken",)


def test_one_project_does_not_fill_the_farm_when_shares_are_fair() -> None:
    policy = with_fair_share(POLICIES["resource-aware"])
    assert policy.rules[-1].name == "overdue"
    pool, slot = pool_of(projects="ab", count=2)
    averages = Averages(project_claims={"a": 3, "b": 1})
    told = [explain(policy, pool, slot, j, NOW, averages) for j in "ab"]
    assert [t.scores["fair-share"] for t in told if t is not None] == [-375.0, -125.0]
    decision = decide(policy, pool, slot, "build", NOW, averages)
    assert isinstance(decision, Decision)
    assert decision.job_id == "b"
    with pytest.raises(PolicyError, match="no fair-share"):
        with_fair_share(POLICIES["simple"])
