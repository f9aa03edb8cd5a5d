"""Profiles of packages and projects, promises of memory, and how both follow what happens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.records import AddMetric, AddPrefetch, PastWait, Snapshot
from actors.server import history as h
from actors.server.assigner import Assigner
from actors.server.averages import MIN_PREFETCHES, SECS_PER_PATH, Instance, PathFit
from actors.server.claims import Claim
from actors.server.config import ServerConfig
from actors.server.farm import Farm
from actors.server.ids import Ids
from actors.server.memory import Load, load_of
from actors.server.model import JobClass, PoolEntry, WorkerView
from actors.server.policies import POLICIES
from actors.server.pool import Pool
from actors.server.profiles import KEPT_PROFILES
from actors.server.sessions import Session, SessionTable
from transport import messages as m

DAY = h.DAY_SECS
KEY = ("hello", "x")


def metric(at: float = 0.0, **changes: Any) -> AddMetric:
    fields: dict[str, Any] = {
        "assignment_id": "a", "package": "hello", "system": "x", "at": at, "wall_time_ms": None,
        "cpu_time_ms": None, "peak_ram_mb": None, "output_nar_size": None, "oom": False,
        "contention": 1.0, "core_score": None,
    }  # fmt: skip
    return AddMetric(**(fields | changes))


def profile(history: h.History, now: float = 0.0) -> h.Profile:
    found = history.of_build(KEY, now)
    assert found is not None
    return found


def test_times_are_divided_by_their_contention_and_unknowns_left_out() -> None:
    history = h.History()
    history.add(metric(wall_time_ms=2_000, contention=1.0, peak_ram_mb=0))
    history.add(metric(wall_time_ms=4_800, contention=1.2, oom=True))
    history.add(metric(output_nar_size=10, core_score=2.0))
    told = profile(history)
    assert told.secs == pytest.approx(3.0)
    assert (told.peak_mb, told.output_size, told.core_score) == (0.0, 10.0, 2.0)
    assert told.oom_rate == pytest.approx(1 / 3)


def test_the_latest_20_of_90_days_count() -> None:
    history = h.History()
    for number in range(25):
        history.add(metric(at=float(number), peak_ram_mb=number))
    assert profile(history).peak_mb == 23  # 95 % of 5..24, by nearest rank: the second largest
    assert profile(history, 90 * DAY + 23.0).peak_mb == 24
    assert history.of_build(KEY, 90 * DAY + 25.0) is None
    assert len(history) == 0


def test_packages_built_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(h, "MAX_PACKAGES", 2)
    told: list[h.Key] = []
    history = h.History(lambda _, key: told.append(key))
    for package in ("a", "b", "a", "c"):
        history.add(metric(package=package))
    assert history.of_build(("b", "x"), 0.0) is None
    assert history.of_build(("a", "x"), 0.0) is not None
    assert told[-1] == ("b", "x")
    history.expire(91 * DAY)
    assert len(history) == 0


def test_the_median_is_of_the_last_day() -> None:
    history = h.History()
    assert history.median_build_secs is None
    for at, secs in ((0.0, 100), (10.0, 1), (20.0, 2), (30.0, 9)):
        history.add(metric(at=at, wall_time_ms=secs * 1_000))
    assert history.median_build_secs == 5.5
    history.expire(DAY + 5.0)
    assert history.median_build_secs == 2.0


def test_evaluations_are_averaged_by_project_over_a_week() -> None:
    history = h.History()
    for at, project, secs in ((0.0, "p", 10), (5.0, "p", 20), (9.0, "q", 60)):
        history.add(metric(at=at, package=project, system="", wall_time_ms=secs * 1_000))
    assert history.of_evaluation("p") == h.Profile(secs=15.0)
    assert history.any_evaluation.secs == 30.0
    assert history.of_build(("p", ""), 0.0) is None
    history.expire(7 * DAY + 1.0)
    assert history.of_evaluation("p") == h.Profile(secs=20.0)
    history.expire(7 * DAY + 6.0)
    assert history.of_evaluation("p") is None
    assert history.any_evaluation.secs == 60.0


def entry(job_id: str, package: str, system: str = "x") -> PoolEntry:
    cls = JobClass("build", "p", system, frozenset(), False)
    return PoolEntry(job_id=job_id, cls=cls, name=job_id, ready_at=0.0, package=package)


def test_pending_jobs_get_a_profile_when_their_package_is_built_first() -> None:
    pool = Pool(block_rows=4)
    for number in range(10):
        pool.enter(entry(f"j{number}", ("hello", "gcc", "llvm")[number % 3]))
    pool.enter(entry("b", "hello", "builtin"))
    pool.history.add(metric(wall_time_ms=1_000))
    pool.check()
    pool.leave("j3")
    pool.enter(entry("j3", "hello"))
    pool.history.add(metric(wall_time_ms=3_000))
    pool.check()
    located = pool.locate("j3")
    assert located is not None
    block, at = located
    assert pool.profiles["build"].column("secs")[block.profile[at]] == 2.0
    for number in range(10):
        pool.leave(f"j{number}")
    pool.leave("b")
    pool.check()


def test_a_history_that_is_too_old_leaves_jobs_without_one() -> None:
    pool = Pool()
    pool.tick(100 * DAY)
    pool.enter(entry("j", "hello"))
    pool.history.add(metric(at=0.0, wall_time_ms=1_000))
    pool.check()
    pool.history.add(metric(at=100 * DAY, wall_time_ms=5_000))
    pool.check()
    assert pool.profiles["build"].has_history
    pool.leave("j")
    pool.check()


def test_profiles_are_given_to_others_some_time_after_their_last_job() -> None:
    pool = Pool()
    for number in range(3 * KEPT_PROFILES):
        pool.history.add(metric(package=f"p{number}", wall_time_ms=number))
        pool.enter(entry("j", f"p{number}"))
        pool.check()
        pool.leave("j")
    assert len(pool.profiles["build"]) <= KEPT_PROFILES + 4


def claim(predicted: float, observed: int | None, kind: Any = "build") -> Claim:
    return Claim("a", "j", kind, "w", "s", 0.0, None, predicted_mb=predicted, peak_ram_mb=observed)


def view(**changes: Any) -> WorkerView:
    return WorkerView(
        worker="w", can_fetch=False, can_eval=False, can_build=True, has_capabilities=True,
        **({"has_metrics": True} | changes),
    )  # fmt: skip


def test_promises_are_the_larger_of_predicted_and_observed() -> None:
    load = load_of([claim(1_000, 400), claim(500, 900), claim(0, None), claim(9, 9, "eval")], None)
    assert load == Load(3, 1_900.0, 1_300.0, None)
    assert load.room_mb(view(ram_free_mb=5_000, ram_total_mb=6_000)) == 4_100.0
    assert load.room_mb(view(ram_free_mb=5_000, ram_total_mb=9_000)) == 4_400.0
    assert load.room_later_mb(view(ram_free_mb=5_000, ram_total_mb=9_000)) == 6_300.0
    assert load.room_mb(view()) == math.inf
    assert load.room_mb(view(has_metrics=False, ram_total_mb=1)) == math.inf


def test_the_time_of_a_path_is_fitted_after_100_prefetches() -> None:
    fit = PathFit()
    for _ in range(MIN_PREFETCHES - 1):
        fit.add(AddPrefetch(10, 1.0))
    assert fit.path_secs == SECS_PER_PATH
    fit.add(AddPrefetch(10, 1.0))
    assert fit.path_secs == pytest.approx(0.1)
    fit.add(AddPrefetch(1_000, 0.0))
    assert 0 <= fit.path_secs < 0.1


def test_averages_are_those_of_before_a_restart() -> None:
    before, after, pool = Instance(), Instance(), Pool()
    past = []
    for number in range(5):
        now = 100.0 + number
        before._assigned(10.0 * number, (number, 1), now)
        past.append(PastWait(now, 10.0 * number, (number, 1)))
    fetched = [AddPrefetch(1, 0.5)] * MIN_PREFETCHES
    for prefetch in fetched:
        before.paths.add(prefetch)
    after.load(past, fetched)
    assert after.averages(pool, 200.0) == before.averages(pool, 200.0)
    assert after.averages(pool, 200.0).wait_secs == 20.0
    assert after.averages(pool, 200.0).path_secs == 0.5
    assert after.averages(pool, 100.0 + 3_700.0).wait_secs is None


def farm(**remembered: Any) -> Farm:
    snapshot = Snapshot(
        jobs=(),
        claims=(),
        requesters={},
        failed_children={},
        inputs={},
        sizes={},
        counts={},
        cordons={},
        **remembered,
    )
    config = ServerConfig(state_dir=Path("nowhere"))
    return Farm(
        config, "s", Ids("e"), POLICIES["resource-aware"], SessionTable(), None, snapshot, 1_000.0
    )


def test_a_new_server_goes_on_with_what_the_ledger_remembers() -> None:
    started = farm(
        metrics=(metric(500.0, wall_time_ms=7_000), metric(900.0, system="", wall_time_ms=3_000)),
        waits=(PastWait(950.0, 12.0, (6, 2)),),
    )
    averages = started.assigner.averages(1_000.0)
    assert averages.build_secs == 7.0
    assert averages.evaluation_secs == 3.0
    assert (averages.wait_secs, averages.missing_nar_size, averages.missing_count) == (12, 6, 2)
    known = started.assigner.pool.history.of_build(KEY, 1_000.0)
    assert known is not None
    assert known.secs == 7.0


def session_of(worker: str, *, fetch: bool) -> Session:
    capabilities = m.Capabilities(fetch=fetch, eval=True, build=True)
    session = Session(
        id=f"c-{worker}", peer=b"p", worker=worker, name=worker, agent="", asked=capabilities,
        capabilities=capabilities, projects=None, last_seen=0.0,
    )  # fmt: skip
    session.announced = m.WorkerCapabilities(["x"], [], 4)
    return session


def test_transfers_and_idle_fetchers_are_counted_from_claims_and_their_progress() -> None:
    numbers = iter(range(100))
    assigner = Assigner(POLICIES["simple"], lambda: f"a{next(numbers)}")
    session, other = session_of("w1", fetch=True), session_of("w2", fetch=True)
    for one in (session, other, session_of("w3", fetch=False)):
        assigner.attach(one, [])
    for job_id in ("j1", "j2"):
        assigner.enter(entry(job_id, "hello"))
        assigner.score(session, [m.Score(job_id, 3, 10**6, False)])
    assert assigner.averages(0.0).idle_fetch_workers == 2
    claims = [assigner.request(session, "build", 0.0) for _ in range(2)]
    for number, phase in ((0, "prefetch"), (1, "prefetch"), (1, "build"), (1, "upload")):
        claimed = claims[number]
        assert claimed is not None
        progress = m.BuildProgress(claimed.job_id, claimed.assignment_id, phase)  # type: ignore[arg-type]
        assigner.progressed(claimed, progress)
        assigner.check()
    averages = assigner.averages(0.0)
    assert (averages.downloads, averages.uploads) == (1, 1)
    assert (averages.fetch_workers, averages.idle_fetch_workers) == (2, 1)
    for claimed in claims:
        assert claimed is not None
        assigner.release(claimed)
        assigner.check()
    averages = assigner.averages(0.0)
    assert (averages.downloads, averages.uploads, averages.idle_fetch_workers) == (0, 0, 2)
    assigner.detach(other, 0.0, wait=False)
    assert assigner.averages(0.0).fetch_workers == 1


def test_peaks_that_a_heartbeat_tells_raise_the_promise() -> None:
    assigner = Assigner(POLICIES["resource-aware"], lambda: "a")
    assigner.learn(metric(peak_ram_mb=1_000))
    session = session_of("w1", fetch=False)
    assigner.attach(session, [])
    assigner.enter(entry("j1", "hello"))
    assigner.score(session, [m.Score("j1", 0, 0, False)])
    assert assigner.request(session, "build", 0.0) is not None
    assert assigner.load_on("w1", 0.0) == Load(1, 1_000.0, 0.0, None)
    session.metrics = m.WorkerMetrics(build_peak_ram_mb={"j1": 1_500, "other": 9})
    assigner.changed(session)
    assert assigner.load_on("w1", 0.0) == Load(1, 1_500.0, 1_500.0, None)
