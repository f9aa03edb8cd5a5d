"""The schedule of faults."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from bin.chaos.faults import (
    _SHAPES,
    ACTOR_WINDOW_SECS,
    ACTORS,
    FIRST_SECS,
    KINDS,
    MAX_ACTOR_KILLS,
    plan,
)

WORKERS = ("w1", "w2", "w3")


@given(st.integers(0, 10_000), st.floats(3, 400))
def test_faults_are_in_order_within_the_run_and_of_things_that_exist(seed, secs):
    faults = plan(seed, secs, WORKERS)
    assert [f.at for f in faults] == sorted(f.at for f in faults)
    for fault in faults:
        assert fault.at >= FIRST_SECS
        assert fault.at + fault.secs <= secs + 0.002  # both are rounded
        if fault.kind == "kill-actor":
            assert fault.target in ACTORS
        elif fault.kind.endswith(("-worker", "-link", "-builder")):
            assert fault.target in WORKERS
        else:
            assert fault.target == ""


@given(st.integers(0, 10_000))
def test_no_actor_is_killed_as_often_as_ends_the_server(seed):
    kills = [f for f in plan(seed, 600, WORKERS) if f.kind == "kill-actor"]
    for last in kills:
        window = [k for k in kills if last.at - ACTOR_WINDOW_SECS < k.at <= last.at]
        assert Counter(k.target for k in window)[last.target] <= MAX_ACTOR_KILLS


def test_a_seed_decides_all():
    assert plan(7, 60, WORKERS) == plan(7, 60, WORKERS)
    assert plan(7, 60, WORKERS) != plan(8, 60, WORKERS)


def test_a_run_of_a_minute_sees_every_kind_in_proportion():
    for seed in range(20):
        seen = Counter(f.kind for f in plan(seed, 80, WORKERS))
        assert set(seen) == set(KINDS), seed
    long = Counter(f.kind for f in plan(1, 2_000, WORKERS))
    rounds = long["kill-server"] / _SHAPES["kill-server"].cards
    for kind in KINDS:
        assert abs(long[kind] / _SHAPES[kind].cards - rounds) <= 3, kind


def test_kinds_that_are_not_possible_are_left_out():
    kinds = frozenset(KINDS) - {"full-build-disk", "kill-server"}
    assert {f.kind for f in plan(1, 200, WORKERS, kinds)} == kinds
