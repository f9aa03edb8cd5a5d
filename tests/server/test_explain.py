"""One staged cause after the other: the dominant reason, and what is said of each worker."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from actors.ledger.records import AddMetric, Admitted, ClaimRecord, JobInfo, PastClaim, SeenWorker
from actors.server import explain
from actors.server.assigner import Assigner
from actors.server.claims import breakdown
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.shown import ClusterViews
from actors.server.config import ServerConfig
from actors.server.effects import Effect, Enter, Leave, Record
from actors.server.explain import Explainer
from actors.server.feeder import Feeder
from actors.server.jobs import build_record, evaluation_record
from actors.server.policies import POLICIES
from actors.server.roster import Roster
from actors.server.sessions import Session, SessionTable
from transport import messages as m
from transport.codec import encode_value

LINUX, ARM = "x86_64-linux", "aarch64-linux"
NOW = 1_000.0


class Staged:
    """The cores that an explanation reads."""

    def __init__(self, policy: str = "resource-aware", seen: Iterable[SeenWorker] = ()) -> None:
        self.sessions = SessionTable()
        self.feeder = Feeder()
        numbers = iter(range(10_000))
        self.assigner = Assigner(POLICIES[policy], lambda: f"a{next(numbers)}")
        self.roster = Roster(self.sessions, seen)
        self.past: list[PastClaim] = []
        coordinator = Coordinator(
            ServerConfig(state_dir=Path()), "s", lambda: "r", self.assigner, self.feeder,
            self.sessions,
        )  # fmt: skip
        views = ClusterViews(coordinator, self.assigner, self.feeder)
        self.explainer = Explainer(self.feeder, self.assigner, self.sessions, self.roster, views)

    def route(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Enter):
                self.assigner.enter(effect.entry)
            elif isinstance(effect, Leave):
                self.assigner.pool.leave(effect.job_id)

    def submit(self, job_id: str, system: str = LINUX, features: Iterable[str] = (),
               inputs: Iterable[str] = (), project: str = "p", **more: Any) -> None:  # fmt: skip
        job = m.SubmittedJob(
            drv_path=f"/{job_id}.drv", name=job_id, system=system,
            required_features=list(features), outputs={"out": f"/{job_id}"},
            input_drvs=[f"/{i}.drv" for i in inputs], input_srcs=[], project=project, **more,
        )  # fmt: skip
        record = build_record(job, job_id, interactive=False)
        self.route(self.feeder.merge([record], "s", Admitted("s", {}, (), frozenset()), NOW - 10))

    def connect(self, worker: str, systems: Iterable[str] = (LINUX,), features: Iterable[str] = (),
                slots: int = 1, *, build: bool = True, evaluate: bool = False,
                projects: frozenset[str] | None = None) -> Session:  # fmt: skip
        capabilities = m.Capabilities(fetch=False, eval=evaluate, build=build)
        session = Session(
            id=f"c-{worker}", peer=worker.encode(), worker=worker, name=worker, agent="",
            asked=capabilities, capabilities=capabilities, projects=projects, last_seen=NOW,
        )  # fmt: skip
        session.announced = m.WorkerCapabilities(
            architectures=list(systems), system_features=list(features),
            max_concurrent_builds=slots,
        )  # fmt: skip
        self.sessions.add(session)
        self.assigner.attach(session, [])
        self.assigner.changed(session)
        self.roster.announced(session, NOW)
        return session

    def score(self, session: Session, *job_ids: str, size: int = 0) -> None:
        self.assigner.score(session, [m.Score(j, 1, size, False) for j in job_ids])

    def run(self, session: Session) -> str:
        """Gives the session's next request its job."""
        claim = self.assigner.request(session, "build", NOW)
        assert claim is not None
        self.feeder.claimed(claim.job_id)
        self.assigner.won(claim, NOW)
        self.assigner.accepted(session, claim)
        return claim.job_id

    def explain(self, job_id: str, now: float = NOW) -> dict[str, Any]:
        told = self.explainer.waiting(job_id, self.past, now)
        assert told is not None
        return told

    def code(self, job_id: str, now: float = NOW) -> str:
        code: str = self.explain(job_id, now)["reason"]["code"]
        return code


@pytest.fixture
def staged() -> Staged:
    return Staged()


def test_nobody_is_connected(staged: Staged) -> None:
    staged.submit("j", ARM, ["kvm"])
    told = staged.explain("j")
    assert told["reason"]["code"] == "no_worker"
    assert "aarch64-linux with kvm" in told["reason"]["text"]
    assert told["workers"] == []


def test_who_could_is_away_or_was_never_seen(staged: Staged) -> None:
    staged.submit("j", ARM)
    here = staged.connect("w1")
    never = staged.explain("j")["reason"]
    assert never["code"] == "no_system"
    assert never["text"].startswith("no connected worker builds for aarch64-linux; none that was")
    away = staged.connect("w2", [ARM])
    staged.assigner.detach(away, NOW, wait=False)
    staged.sessions.remove(away)
    staged.roster.left(away)
    told = staged.explain("j", NOW + 60)
    assert told["reason"]["code"] == "no_system"
    assert told["reason"]["text"].endswith("w2 could, last seen 60 s ago")
    assert told["away"][0]["worker"] == "w2"
    assert told["away"][0]["eligible"]
    staged.assigner.detach(here, NOW, wait=False)
    staged.sessions.remove(here)
    assert staged.explain("j", NOW + 60)["reason"]["code"] == "no_worker"


def test_who_was_here_is_remembered_by_the_ledger() -> None:
    first = Staged()
    session = first.connect("w2", [ARM], ["kvm"], slots=3)
    assert first.roster.announced(session, NOW + 1) == []
    (recorded,) = first.roster.announced(session, NOW + 60)
    assert isinstance(recorded, Record)
    seen = SeenWorker("w2", "w2", recorded.write.capabilities, NOW - 5)  # type: ignore[union-attr,arg-type]
    later = Staged(seen=[seen])
    later.submit("j", ARM, ["kvm"])
    assert later.explain("j")["reason"]["text"].endswith("w2 could, last seen 5 s ago")


def test_a_feature_is_missing_on_all(staged: Staged) -> None:
    staged.submit("j", LINUX, ["big-parallel"])
    for worker in ("w1", "w2"):
        staged.connect(worker, features=["kvm"])
    staged.connect("arm", [ARM], features=["big-parallel"])
    told = staged.explain("j")
    assert told["reason"]["code"] == "no_feature"
    assert "big-parallel" in told["reason"]["text"]
    why = {w["worker"]: w["why_not"] for w in told["workers"]}
    assert why == {
        "w1": "missing feature: big-parallel", "w2": "missing feature: big-parallel",
        "arm": "does not build for x86_64-linux",
    }  # fmt: skip
    assert not any(w["eligible"] for w in told["workers"])


def test_nobody_takes_the_kind(staged: Staged) -> None:
    evaluation = m.SubmittedEvaluation(source=m.EvalSource("graph-file", "/g.json"), project="p")
    record = evaluation_record(evaluation, "e", NOW - 10, interactive=False)
    staged.route(staged.feeder.merge([record], "s", Admitted("s", {}, (), frozenset()), NOW - 10))
    staged.connect("w1")
    told = staged.explain("e")
    assert told["reason"]["code"] == "wrong_kind"
    assert told["reason"]["text"].startswith("no connected worker takes evaluations")
    staged.submit("j")
    staged.connect("w2", build=False, evaluate=True)
    assert staged.code("e") == "next"


def test_nobody_is_authorized(staged: Staged) -> None:
    staged.submit("j", project="secret")
    staged.connect("w1", projects=frozenset({"open"}))
    told = staged.explain("j")
    assert told["reason"]["code"] == "not_authorized"
    assert "secret" in told["reason"]["text"]


def test_all_are_full_paused_or_have_not_said_what_they_lack(staged: Staged) -> None:
    staged.submit("j1")
    staged.submit("j2")
    session = staged.connect("w1")
    assert staged.code("j2") == "unscored"
    staged.score(session, "j1", "j2")
    assert staged.code("j1") == "next"
    told = staged.explain("j2")
    assert told["reason"]["code"] == "outranked"
    assert told["workers"][0]["outranked_by"] == 1
    assert staged.run(session) == "j1"
    assert staged.code("j2") == "all_full"
    session.cordon = "new disk"
    staged.assigner.changed(session)
    told = staged.explain("j2")
    assert told["reason"]["code"] == "drained"
    assert "new disk" in told["reason"]["text"]
    other = staged.connect("w2")
    staged.score(other, "j2")
    assert staged.code("j2") == "next"


def test_a_total_below_the_floor_and_what_lifts_it(staged: Staged) -> None:
    staged.submit("j")
    session = staged.connect("w1")
    staged.score(session, "j", size=0)
    session.metrics = m.WorkerMetrics(cpu_usage_pct=99.0)
    staged.assigner.changed(session)
    told = staged.explain("j")
    assert told["reason"]["code"] == "below_floor"
    (worker,) = told["workers"]
    assert worker["rules"]["resource-saturation"] == -8600.0
    assert worker["total"] < 0
    assert staged.code("j", NOW + 4_000) == "next"


def test_a_request_that_nothing_was_found_for_is_remembered(staged: Staged) -> None:  # 60
    session = staged.connect("w1", slots=2)
    session.metrics = m.WorkerMetrics(cpu_usage_pct=99.0)
    staged.assigner.changed(session)
    for job_id in ("j1", "j2", "j3"):
        staged.submit(job_id)
    staged.score(session, "j1", "j2")
    (worker,) = staged.explain("j1")["workers"]
    assert worker["last_request"] is None
    assert staged.assigner.request(session, "build", NOW) is None
    (worker,) = staged.explain("j1", NOW + 3)["workers"]
    total = staged.explain("j1")["workers"][0]["total"]
    assert worker["last_request"] == {
        "secs_ago": 3.0, "candidates": 3,
        "best": [{"job_id": "j1", "total": total}, {"job_id": "j2", "total": total}],
    }  # fmt: skip
    session.metrics = m.WorkerMetrics(cpu_usage_pct=9.0)
    staged.assigner.changed(session)
    staged.run(session)
    assert staged.explain("j2")["workers"][0]["last_request"] is None


def test_memory_that_was_promised_holds_a_build(staged: Staged) -> None:
    for package in ("small", "big"):
        staged.assigner.learn(
            AddMetric(package, package, LINUX, NOW - 50, 1_000, None, 5_000, None, False, 1.0, None)
        )
    staged.submit("j1", pname="small")
    staged.submit("j2", pname="big")
    session = staged.connect("w1", slots=4)
    session.announced = m.WorkerCapabilities([LINUX], [], 4, ram_total_mb=8_000)
    session.metrics = m.WorkerMetrics(ram_free_mb=8_000)
    staged.assigner.changed(session)
    staged.score(session, "j1", "j2")
    assert staged.run(session) == "j1"
    told = staged.explain("j2")
    assert told["reason"]["code"] == "held_memory"
    assert told["workers"][0]["vetoes"] == ["resource-saturation"]


def test_a_worker_that_declined(staged: Staged) -> None:
    staged.submit("j")
    session = staged.connect("w1")
    staged.score(session, "j")
    claim = staged.assigner.request(session, "build", NOW)
    assert claim is not None
    staged.feeder.claimed("j")
    staged.assigner.won(claim, NOW)
    staged.assigner.declined(claim, NOW)
    staged.route(staged.feeder.returned("j", NOW, lost=False, why="declined"))
    staged.score(session, "j")
    assert staged.code("j") == "declined"
    assert staged.code("j", NOW + 2) == "next"


def test_inputs_and_retries(staged: Staged) -> None:
    staged.submit("j1")
    staged.submit("j2", inputs=["j1", "later"])
    told = staged.explain("j2")
    assert told["status"] == "Created"
    assert told["reason"]["code"] == "inputs"
    assert [(i["drv_path"], i["status"]) for i in told["reason"]["inputs"]] == [
        ("/j1.drv", "Queued"), ("/later.drv", None),
    ]  # fmt: skip
    session = staged.connect("w1")
    staged.score(session, "j1")
    staged.run(session)
    staged.assigner.release(staged.assigner.claims["j1"])
    staged.route(staged.feeder.failed("j1", "Transient", "no network", NOW))
    row = ClaimRecord("a0", "j1", "w1", "c", "s", 1_700_000_000.0)
    staged.past = [PastClaim(row, 1_700_000_009.0, "Transient", "no network", None)]
    told = staged.explain("j1")
    assert [(d["outcome"], d["worker"]) for d in told["decisions"]] == [("Transient", "w1")]
    assert told["reason"]["code"] == "retry_at"
    assert told["reason"]["retry_in_secs"] == 30.0
    assert "no network" in told["reason"]["text"]


def test_a_job_that_runs_is_explained_by_its_claim(staged: Staged) -> None:
    for job_id in ("j1", "j2", "j3", "j4", "j5"):
        staged.submit(job_id)
    session = staged.connect("w1")
    staged.score(session, "j1", "j2", "j3", "j4", "j5", size=10)
    assert staged.run(session) == "j1"
    assert staged.explainer.waiting("j1", [], NOW) is None
    claim = staged.assigner.claims["j1"]
    row = ClaimRecord(claim.assignment_id, "j1", "w1", "c", "s", 1_700_000_000.0)
    past = PastClaim(row, None, None, None, encode_value(breakdown(claim)))
    info = JobInfo("j1", "build", "Building", "j1", "w1", "a0", 0, None, "/j1.drv")
    told = staged.explainer.decided(info, [past], NOW)
    assert told["reason"] == {"code": "running", "text": "on worker w1"}
    (decision,) = told["decisions"]
    assert decision["claimed_at"] == "2023-11-14T22:13:20.000+00:00"
    assert decision["total"] == pytest.approx(sum(decision["rules"].values()), abs=1e-6)
    assert [r["job_id"] for r in decision["rejected"]] == ["j2", "j3", "j4"]
    assert (decision["missing_nar_size"], decision["missing_count"]) == (10, 1)
    ended = JobInfo("j1", "build", "Failed", "j1", "w1", "a0", 1, "exit 1", "/j1.drv")
    closed = PastClaim(row, 1_700_000_009.0, "Failed", "exit 1", None)
    told = staged.explainer.decided(ended, [closed], NOW)
    assert told["reason"] == {"code": "ended", "text": "Failed: exit 1"}
    assert told["decisions"][0]["rules"] == {}


def test_a_long_queue_is_not_counted_for_every_worker(
    staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "MAX_COUNTED_JOBS", 2)
    for job_id in ("j1", "j2"):
        staged.submit(job_id)
    for worker in ("w1", "w2"):
        staged.score(staged.connect(worker), "j1", "j2")
    told = staged.explain("j2")
    assert [w["outranked_by"] for w in told["workers"]] == [1, None]
    assert told["reason"]["text"] == "w1 and 1 more: 1 other jobs come first"


def test_memory_is_kept_free_until_the_held_build_cannot_run_there(staged: Staged) -> None:
    for package, peak in (("small", 2_000), ("big", 7_000)):
        staged.assigner.learn(
            AddMetric(package, package, LINUX, NOW - 50, 1_000, None, peak, None, False, 1.0, None)
        )
    for number, package in enumerate(("small", "small", "small", "big")):
        staged.submit(f"j{number}", pname=package)
    session = staged.connect("w1", slots=4)
    session.announced = m.WorkerCapabilities([LINUX], [], 4, ram_total_mb=8_000)
    session.metrics = m.WorkerMetrics(ram_free_mb=8_000)
    staged.assigner.changed(session)
    staged.score(session, "j0", "j1", "j2", "j3")
    assert staged.run(session) == "j0"
    staged.feeder.prioritize("j3", prioritized=True)
    staged.assigner.pool.set_prioritized("j3", True)
    load = staged.assigner.load_on("w1", NOW)
    assert load.reserved is not None
    assert load.reserved.job_id == "j3"
    staged.submit("later", pname="small")
    staged.score(session, "later")
    assert staged.code("later") == "held_memory"
    # It turns out to be larger than the machine: nothing is kept free for that.
    staged.assigner.learn(
        AddMetric("b2", "big", LINUX, NOW, 1_000, None, 70_000, None, False, 1.0, None)
    )
    assert staged.assigner.load_on("w1", NOW).reserved is None
    assert staged.code("later") in ("next", "outranked")
