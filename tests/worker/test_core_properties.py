"""Any server, any order of events: what the core never does."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.worker import events as e
from actors.worker.core import CoreSettings, Link, WorkerCore
from actors.worker.executors.base import Built, Failed
from transport import messages as m

CAPABILITIES = m.Capabilities(fetch=False, eval=True, build=True)
NUMBERS = st.integers(0, 5)
ATTEMPTS = st.sampled_from(["t0", "t1"])
BUILD = m.BuildJob(
    project="default", drv_path="/nix/store/p.drv", name="p", outputs={"out": "/nix/store/p"},
    requirement=m.Requirement("x86_64-linux", []), required_paths=[], timeout_secs=0,
    max_silent_secs=0,
)  # fmt: skip
EVAL = m.EvalJob("default", m.EvalSource("graph-file", "g.json"), [], 0)
OUTCOMES = st.sampled_from(
    [Built({"out": m.Output("/nix/store/p")}), Failed("Permanent", "exit 1"), None]
)


class AnyServer(RuleBasedStateMachine):
    """Sends what it likes; the model beside it is the set of processes that run."""

    def __init__(self):
        super().__init__()
        announced = m.WorkerCapabilities(
            architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=2
        )
        self.now = 0.0
        self.core = WorkerCore(
            CoreSettings("w", CAPABILITIES, announced, max_builds=2, max_evals=1),
            lambda: 0.5,
            self.now,
        )
        self.connection = 0
        self.running: dict[str, e.Assignment] = {}
        self.stopped: set[str] = set()
        self.finals: list[str] = []
        self.pages: list[e.ScorePage] = []
        self.exited = False
        self.drained_at = None
        self.fresh = 0

    def step(self, event):
        effects = self.core.step(event, self.now)
        self.core.check()
        assert not (self.exited and effects)
        sent = []
        for effect in effects:
            match effect:
                case e.Connect(number):
                    assert number == self.connection + 1
                    self.connection = number
                case e.StartJob(assignment):
                    assert assignment.assignment_id not in self.running
                    self.running[assignment.assignment_id] = assignment
                    assert sum(a.kind == "build" for a in self.running.values()) <= 2
                    assert sum(a.kind == "eval" for a in self.running.values()) <= 1
                case e.StopJob(assignment_id):
                    assert assignment_id in self.running
                    assert assignment_id not in self.stopped
                    self.stopped.add(assignment_id)
                case e.DeliverSignal(assignment_id, _, _):
                    assert self.running[assignment_id].seat is not None
                    assert assignment_id not in self.stopped
                case e.ScorePage():
                    self.pages.append(effect)
                case e.Send(message):
                    sent.append(message)
                case e.Exit():
                    self.exited = True
        for message in sent:
            if isinstance(message, m.JobFailed | m.JobCompleted):
                self.finals.append(message.assignment_id)
        if self.core.link is not Link.SERVING and not self.exited:
            hello = [x for x in sent if isinstance(x, m.InitConnection)]
            rest = [
                x for x in sent if not isinstance(x, m.InitConnection | m.AuthResponse | m.Pong)
            ]
            assert len(hello) <= 1
            if hello:
                assert rest == []
        return sent

    def receive(self, message):
        return self.step(e.Received(self.connection, message))

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0, 11.0, 200.0]))
    def passes(self, seconds):
        self.now += seconds
        self.step(e.Tick())

    @precondition(lambda self: self.core.deadline < 1e9)
    @rule()
    def deadline_comes(self):
        self.now = max(self.now, self.core.deadline)
        self.step(e.Tick())

    @rule(resumed=st.lists(NUMBERS.map("a{}".format), max_size=4))
    def acknowledges(self, resumed):
        self.receive(m.InitAck(1, "s", CAPABILITIES, ["*"], [], resumed, 120.0))

    @rule(is_final=st.booleans(), count=st.integers(0, 2))
    def lists(self, is_final, count):
        candidates = [m.JobCandidate(f"j{i}", "build", "default", [], [], []) for i in range(count)]
        self.receive(m.JobListChunk(candidates, is_final))

    @rule()
    def offers(self):
        self.receive(m.JobOffer([m.JobCandidate("j0", "build", "default", [], [], [])]))

    @precondition(lambda self: self.pages)
    @rule()
    def page_is_scored(self):
        page = self.pages.pop(0)
        self.step(e.Scored(page.connection, page.page, [m.Score("j0", 0, 0, False)]))

    @rule(number=NUMBERS, job=st.sampled_from([BUILD, EVAL]), attempt=st.none() | ATTEMPTS)
    def assigns(self, number, job, attempt):
        seat = None if attempt is None else m.ClusterSeat(attempt, "r", 0, 4.0)
        self.fresh += 1
        assignment_id = f"a{self.fresh}"
        sent = self.receive(m.AssignJob(f"j{number}", assignment_id, job, seat))
        if self.core.link is Link.SERVING:
            answers = [x for x in sent if isinstance(x, m.AssignJobResponse)]
            assert [x.assignment_id for x in answers] == [assignment_id]
            assert answers[0].accepted == (assignment_id in self.core.jobs.tasks)

    @rule(attempt=ATTEMPTS)
    def starts_cluster(self, attempt):
        self.receive(m.StartCluster(attempt, []))

    @rule(attempt=ATTEMPTS)
    def aborts_cluster(self, attempt):
        self.receive(m.AbortCluster(attempt, "x"))

    @rule(attempt=ATTEMPTS, sender=st.none() | st.just(m.MemberRef("r", 1)))
    def signals(self, attempt, sender):
        self.receive(m.ClusterSignal(attempt, b"x", None, sender))

    @rule(number=NUMBERS, fresh=st.integers(0, 20))
    def aborts(self, number, fresh):
        self.receive(m.AbortJob(f"j{number}", f"a{fresh}", "x"))

    @rule(fresh=st.integers(0, 20))
    def records(self, fresh):
        self.receive(m.Recorded("j0", f"a{fresh}"))

    @rule(
        message=st.sampled_from(
            [m.Ping(1), m.Pong(1), m.Draining(), m.Error(400, "x"), m.AuthChallenge(["p"]),
             m.AuthUpdate([], []), m.KnownDerivations(1, []), m.Reject(403, "x"),
             m.CmdDone(1)]
        )
    )  # fmt: skip
    def says(self, message):
        self.receive(message)

    @rule()
    def connection_breaks(self):
        self.step(e.Lost(self.connection, "cut"))

    @rule()
    def old_connection_speaks(self):
        self.step(e.Received(self.connection - 1, m.Reject(400, "no session")))

    @precondition(lambda self: self.running)
    @rule(outcome=OUTCOMES)
    def job_ends(self, outcome):
        assignment_id = next(iter(self.running))
        if assignment_id in self.stopped and not isinstance(outcome, Built):
            outcome = None
        del self.running[assignment_id]
        self.step(e.JobFinished(assignment_id, outcome))

    @precondition(lambda self: self.running)
    @rule()
    def job_reports(self):
        assignment_id = next(iter(self.running))
        self.step(e.JobLogged(assignment_id, b"line\n"))
        self.step(e.EvalAdvanced(assignment_id, 3))
        self.step(e.SignalSent(assignment_id, None, b"x"))

    @precondition(lambda self: self.drained_at is None)
    @rule()
    def drains(self):
        self.drained_at = self.now
        self.step(e.DrainRequested())

    @invariant()
    def leaves_in_time(self):
        if self.drained_at is not None and not self.exited:
            assert self.core.deadline <= self.drained_at + 4

    @invariant()
    def has_a_deadline(self):
        assert self.exited or self.core.deadline < 1e9 or self.drained_at is not None

    @invariant()
    def jobs_match(self):
        if not self.exited:
            running = {t.assignment.assignment_id for t in self.core.jobs.running()}
            assert running == set(self.running)


TestAnyServer = AnyServer.TestCase
TestAnyServer.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
