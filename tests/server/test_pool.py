"""Eligibility, ranks, and the pool against a model that keeps everything in dicts."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from actors.server.classes import KEPT_CLASSES
from actors.server.model import JobClass, PoolEntry, WorkerView, eligible
from actors.server.pool import FleetMean, Pool
from actors.server.ranks import Ranks
from transport.messages import Score

LINUX = JobClass("build", "p", "x86_64-linux", frozenset(), False)


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


def entry(job_id: str, cls: JobClass = LINUX, **changes: Any) -> PoolEntry:
    return PoolEntry(job_id=job_id, cls=cls, name=job_id, **({"ready_at": 0.0} | changes))


def score(job_id: str, size: int = 0, *, present: bool = False) -> Score:
    return Score(job_id=job_id, missing_count=1, missing_nar_size=size, outputs_present=present)


# -- eligibility -------------------------------------------------------------------------------

SYSTEMS = ["x86_64-linux", "aarch64-linux", "builtin"]
FEATURES = st.frozensets(st.sampled_from(["kvm", "big-parallel", "benchmark"]))
VIEWS = st.builds(
    view,
    can_eval=st.booleans(),
    can_build=st.booleans(),
    has_capabilities=st.booleans(),
    architectures=st.frozensets(st.sampled_from(SYSTEMS[:2])),
    features=FEATURES,
    projects=st.none() | st.frozensets(st.sampled_from("pq")),
    draining=st.booleans(),
)
BUILDS = st.builds(
    JobClass, st.just("build"), st.sampled_from("pq"), st.sampled_from(SYSTEMS), FEATURES,
    st.just(False),
)  # fmt: skip
EVALUATIONS = st.builds(
    JobClass, st.just("eval"), st.sampled_from("pq"), st.just(""), st.just(frozenset()),
    st.booleans(),
)  # fmt: skip
CLASSES = BUILDS | EVALUATIONS


@settings(max_examples=10_000, deadline=None)
@given(cls=CLASSES, worker=VIEWS)
def test_eligibility_is_what_the_protocol_says(cls: JobClass, worker: WorkerView) -> None:
    told = worker.has_capabilities and {cls.system} <= worker.architectures | {"builtin"}
    may = worker.can_build and told and not cls.features - worker.features
    authorized = worker.projects is None or cls.project in worker.projects
    assert eligible(cls, worker) == (
        authorized and (worker.can_eval if cls.kind == "eval" else may)
    )


def test_a_builtin_job_still_needs_its_features_and_a_builder() -> None:
    builtin = LINUX._replace(system="builtin")
    assert eligible(builtin, view(architectures=frozenset()))
    assert not eligible(builtin._replace(features=frozenset({"kvm"})), view())
    assert not eligible(builtin, view(can_build=False))


# -- ranks -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.text("abé\U0001f600", max_size=3), st.booleans())))
def test_ranks_sort_like_ids(steps: list[tuple[str, bool]]) -> None:
    ranks = Ranks()
    held: set[str] = set()
    for job_id, adds in steps:
        if adds:
            ranks.add(job_id)
            held.add(job_id)
        elif job_id in held:
            ranks.drop(job_id)
            held.discard(job_id)
        ranks.check()
    assert sorted(held, key=ranks.__getitem__) == sorted(held)


def test_ranks_of_ascending_ids_in_one_gap_rarely_change() -> None:
    ranks = Ranks()
    ranks.add("a")
    ranks.add("z")
    changed = sum(ranks.add(f"b{number:06}") for number in range(20_000))
    assert changed <= 2
    changed = sum(ranks.add(f"a{number:06}") for number in reversed(range(20_000)))
    assert changed <= 2
    ranks.check()


def test_ranks_of_ids_that_halve_a_gap_are_given_out_anew() -> None:
    ranks = Ranks()
    low, high = "a", "b"
    ranks.add(low)
    ranks.add(high)
    changed = 0
    for number in range(200):  # alternately just above `low` and just below `high`
        middle = low + "a" if number % 2 else low + "b"
        changed += ranks.add(middle)
        low, high = (middle, high) if number % 2 else (low, middle)
    assert changed
    ranks.check()


def test_dropped_ids_are_forgotten_in_time() -> None:
    ranks = Ranks()
    for number in range(20_000):
        ranks.add(f"{number:06}")
        ranks.drop(f"{number:06}")
    assert len(ranks._ids) <= 2048
    ranks.check()


# -- the pool ----------------------------------------------------------------------------------


def test_a_score_ends_with_its_job_and_with_its_worker() -> None:
    pool = Pool()
    one, two = pool.add_worker(view()), pool.add_worker(view())
    pool.enter(entry("a"))
    assert pool.score(one, [score("a", 5)]) == pool.score(two, [score("a", 6)]) == 1
    pool.remove_worker(one)
    one = pool.add_worker(view())
    assert pool.reported(one, "a") is None
    assert pool.reported(two, "a") == score("a", 6)
    pool.leave("a")
    pool.enter(entry("a"))
    assert pool.reported(two, "a") is None
    pool.check()


def test_scores_of_unknown_foreign_and_ineligible_jobs_are_ignored() -> None:
    pool = Pool()
    slot = pool.add_worker(view(projects=frozenset("q")))
    pool.enter(entry("a"))
    assert pool.score(slot, [score("a"), score("b")]) == 0
    page = [score(f"b{number}") for number in range(1000)]
    assert pool.score(slot, [*page, score("a")]) == 0
    pool.update_worker(slot, view())
    assert pool.reported(slot, "a") is None


def test_scores_outlast_a_right_that_was_lost_and_comes_back() -> None:
    pool = Pool()
    slot = pool.add_worker(view())
    pool.enter(entry("a"))
    pool.score(slot, [score("a", 5)])
    pool.update_worker(slot, view(architectures=frozenset()))
    pool.check()
    pool.update_worker(slot, view())
    pool.check()
    assert pool.reported(slot, "a") == score("a", 5)


def test_a_page_of_scores_is_taken_like_single_ones() -> None:
    rng = random.Random(1)
    pool = Pool(block_rows=64)
    page, single = pool.add_worker(view()), pool.add_worker(view())
    for number in range(300):
        pool.enter(entry(f"j{number}", LINUX if number % 3 else LINUX._replace(system="other")))
    scores = [
        score(f"j{rng.randrange(400)}", rng.randrange(2**40), present=rng.random() < 0.3)
        for _ in range(1000)
    ]
    taken = pool.score(page, scores)
    assert taken == sum(pool.score(single, [one]) for one in scores) > 400
    for number in range(300):
        assert pool.reported(page, f"j{number}") == pool.reported(single, f"j{number}")


def test_ticks_are_counted_from_the_entry_and_saturate() -> None:
    pool = Pool()
    pool.enter(entry("a"))
    for _ in range(300):
        pool.tick()
    pool.enter(entry("b"))
    pool.tick()
    assert (pool.ticks("a"), pool.ticks("b")) == (255, 1)


def test_a_second_entry_changes_nothing() -> None:
    pool = Pool()
    assert pool.enter(entry("a", ready_at=1.0))
    assert not pool.enter(entry("a", ready_at=2.0))
    assert len(pool) == 1
    assert pool.leave("a") == entry("a", ready_at=1.0)
    assert pool.leave("a") is None


def test_a_pool_that_shrank_is_as_small_as_what_is_pending() -> None:
    pool = Pool(block_rows=64, slots=2)
    slot = pool.add_worker(view())
    order = list(range(2000))
    for number in order:
        pool.enter(entry(f"j{number:04}"))
        pool.score(slot, [score(f"j{number:04}", number)])
    random.Random(2).shuffle(order)
    for number in order[:-20]:
        pool.leave(f"j{number:04}")
    pool.check()
    assert sum(rows for _, rows in pool.blocks()) <= 2 * 20 + 8
    for number in order[-20:]:
        assert pool.reported(slot, f"j{number:04}") == score(f"j{number:04}", number)


def test_classes_are_forgotten_some_time_after_their_last_job() -> None:
    pool = Pool()
    slot = pool.add_worker(view(projects=frozenset({"p7"})))
    for number in range(3 * KEPT_CLASSES):
        pool.enter(entry("a", LINUX._replace(project=f"p{number}")))
        assert pool.score(slot, [score("a")]) == (number == 7)
        pool.leave("a")
        pool.check()


def test_the_fleet_mean_keeps_unknown_apart_from_zero() -> None:
    mean = FleetMean()
    assert mean.mean is None
    mean.replace(None, 0.0)
    assert mean.mean == 0.0
    mean.replace(None, 30.0)
    mean.replace(0.0, None)
    assert mean.mean == 30.0
    mean.replace(30.0, None)
    assert mean.mean is None


def test_the_pool_knows_the_fleets_mean_speeds() -> None:
    pool = Pool()
    pool.add_worker(view(download_speed_mbps=100.0))
    slot = pool.add_worker(view(download_speed_mbps=300.0, upload_speed_mbps=8.0))
    assert (pool.download_mbps.mean, pool.upload_mbps.mean) == (200.0, 8.0)
    pool.update_worker(slot, view(download_speed_mbps=500.0))
    assert (pool.download_mbps.mean, pool.upload_mbps.mean) == (300.0, None)
    pool.remove_worker(slot)
    assert pool.download_mbps.mean == 100.0


class PoolMachine(RuleBasedStateMachine):
    """Small blocks and few slots, so that every way to grow, move and shrink is taken."""

    slots = Bundle("slots")

    @initialize()
    def start(self) -> None:
        self.pool = Pool(block_rows=8, slots=2)
        self.entries: dict[str, PoolEntry] = {}
        self.ticks: dict[str, int] = {}
        self.views: dict[int, WorkerView] = {}
        self.scores: dict[tuple[int, str], Score] = {}

    @rule(
        job_id=st.text("abc", min_size=1, max_size=3),
        cls=CLASSES,
        ready_at=st.floats(0, 100),
        prioritized=st.booleans(),
        member=st.booleans(),
    )
    def enter(
        self, job_id: str, cls: JobClass, ready_at: float, prioritized: bool, member: bool
    ) -> None:
        made = entry(
            job_id, cls, ready_at=ready_at, prioritized=prioritized, is_cluster_member=member
        )
        assert self.pool.enter(made) == (job_id not in self.entries)
        if job_id not in self.entries:
            self.entries[job_id] = made
            self.ticks[job_id] = 0

    @rule(data=st.data(), many=st.booleans())
    def leave(self, data: st.DataObject, many: bool) -> None:
        for job_id in sorted(self.entries):
            if data.draw(st.integers(0, 5)) < (5 if many else 1):
                assert self.pool.leave(job_id) == self.entries.pop(job_id)
                del self.ticks[job_id]
                for key in [key for key in self.scores if key[1] == job_id]:
                    del self.scores[key]

    @rule(target=slots, seen=VIEWS)
    def connect(self, seen: WorkerView) -> int:
        slot = self.pool.add_worker(seen)
        assert slot not in self.views
        self.views[slot] = seen
        return slot

    @rule(slot=slots, seen=VIEWS)
    def change(self, slot: int, seen: WorkerView) -> None:
        self.pool.update_worker(slot, seen)
        self.views[slot] = seen

    @rule(slot=consumes(slots))
    def disconnect(self, slot: int) -> None:
        self.pool.remove_worker(slot)
        del self.views[slot]
        for key in [key for key in self.scores if key[0] == slot]:
            del self.scores[key]

    @rule(slot=slots, size=st.integers(0, 2**50), present=st.booleans(), page=st.booleans())
    def report(self, slot: int, size: int, present: bool, page: bool) -> None:
        reports = [score(job_id, size, present=present) for job_id in (*self.entries, "zzz")]
        if page:
            reports += [score("zzz")] * 50
        taken = self.pool.score(slot, reports)
        mine = {j for j, e in self.entries.items() if eligible(e.cls, self.views[slot])}
        assert taken == len(mine)
        self.scores |= {(slot, r.job_id): r for r in reports if r.job_id in mine}

    @rule()
    def tick(self) -> None:
        self.pool.tick()
        self.ticks = {job_id: count + 1 for job_id, count in self.ticks.items()}

    @rule(data=st.data())
    def prioritize(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from([*sorted(self.entries), "zzz"]))
        self.pool.set_prioritized(job_id, True)
        if job_id in self.entries:
            old = self.entries[job_id]
            self.entries[job_id] = entry(
                job_id, old.cls, ready_at=old.ready_at, prioritized=True,
                is_cluster_member=old.is_cluster_member,
            )  # fmt: skip

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert len(self.pool) == len(self.entries)
        assert {e.job_id: e for e in self.pool} == self.entries
        for job_id, made in self.entries.items():
            assert self.pool.get(job_id) == made
            assert self.pool.ticks(job_id) == self.ticks[job_id]
            located = self.pool.locate(job_id)
            assert located is not None
            block, at = located
            assert block.ready_at[at] == made.ready_at
            for slot in self.views:
                assert self.pool.reported(slot, job_id) == self.scores.get((slot, job_id))


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolMachine.TestCase
