"""A worker: the production core, with a store and builders that are dice."""

from __future__ import annotations

from random import Random
from typing import Any

from actors.worker import events as e
from actors.worker.core import CoreSettings, WorkerCore
from actors.worker.executors.base import Built, Evaluated, Failed
from tests.sim.network import Connection, Network
from transport import messages as m
from transport.codec import Decoder, encode

FAILURES: tuple[m.FailureKind, ...] = (
    "Transient", "Transient", "InputsUnavailable", "Permanent", "Timeout",
)  # fmt: skip
METRICS_SECS = 10.0


class SimWorker:
    """One worker id, through as many lives as it takes."""

    def __init__(self, name: str, network: Network, random: Random, *, slots: int,
                 systems: list[str], features: list[str], graphs: dict[str, Any],
                 may_die: bool, zone: str | None = None) -> None:  # fmt: skip
        self.name, self.network, self.random, self.clock = name, network, random, network.clock
        self.slots, self.systems, self.features = slots, systems, features
        self.graphs = graphs
        self.may_die = may_die
        self.zone = zone
        self.finished: set[str] = set()
        """Assignments that really came to a good end here."""
        self.assigned: list[m.ClaimRef] = []
        self.life = 0
        self.is_up = False
        self._decoder = Decoder(m.SERVER_MESSAGES)
        self.start()

    def start(self) -> None:
        self.life += 1
        self.is_up = True
        announced = m.WorkerCapabilities(
            architectures=self.systems, system_features=self.features,
            max_concurrent_builds=self.slots, zone=self.zone,
        )  # fmt: skip
        settings = CoreSettings(
            worker_id=self.name,
            capabilities=m.Capabilities(fetch=True, eval=True, build=True),
            announced=announced, max_builds=self.slots, max_evals=1,
        )  # fmt: skip
        self.core = WorkerCore(settings, self.random.random, self.clock.now)
        self.running: dict[str, e.Assignment] = {}
        self.connection: Connection | None = None
        self._beat(self.life)
        self.step(e.Tick())

    def crash(self) -> None:
        """Everything is forgotten; a new life comes later."""
        if not self.is_up:
            return
        self.is_up = False
        if self.connection is not None:
            self.connection.cut("worker crashed")
        if self.may_die and self.random.random() < self.network.faults.deaths:
            return
        self.clock.after(self.random.uniform(0.1, 40.0), self.start)

    def drain(self) -> None:
        if self.is_up:
            self.step(e.DrainRequested(0))

    def step(self, event: e.Event) -> None:
        if not self.is_up:
            return
        out: list[bytes] = []
        for effect in self.core.step(event, self.clock.now):
            self._perform(effect, out)
        self._flush(out)
        self.core.check()
        if self.is_up:
            life = self.life
            self.clock.at(max(self.core.deadline, self.clock.now + 0.001),
                          lambda: self._due(life))  # fmt: skip

    def _due(self, life: int) -> None:
        if self.is_up and self.life == life and self.core.deadline <= self.clock.now:
            self.step(e.Tick())

    def _beat(self, life: int) -> None:
        if self.is_up and self.life == life:
            self.step(e.MetricsReady(m.WorkerMetrics(cpu_usage_pct=10.0, ram_free_mb=1000)))
            self.clock.after(METRICS_SECS, lambda: self._beat(life))

    def _report_stale(self) -> None:
        """Tells, some time after it came back, that it completed what it had lost."""
        for ref in self.assigned[-10:]:
            if ref.assignment_id in self.running or ref.assignment_id in self.finished:
                continue
            if self.random.random() < self.network.faults.stale_reports:
                message = m.JobCompleted(job_id=ref.job_id, assignment_id=ref.assignment_id)
                late = self.random.uniform(0.1, 5.0)
                self.clock.after(late, lambda message=message: self._send_stale(message))

    def _send_stale(self, message: m.JobCompleted) -> None:
        if self.is_up and self.connection and message.assignment_id not in self.running:
            self.connection.to_server([encode(message)])

    def _flush(self, out: list[bytes]) -> None:
        if out and self.connection is not None:
            self.connection.to_server(out)
            if self.random.random() < self.network.faults.duplicate_reports:
                reports = [f for f in out if self._is_report(f)]
                if reports:
                    self.connection.to_server(reports)

    @staticmethod
    def _is_report(frame: bytes) -> bool:
        return b"JobCompleted" in frame or b"JobFailed" in frame

    def _perform(self, effect: e.Effect, out: list[bytes]) -> None:
        random, life = self.random, self.life
        match effect:
            case e.Send(message):
                out.append(encode(message))
            case e.Connect(number):
                self.connection = self.network.connect(
                    lambda frames: self._received(life, number, frames),
                    lambda reason: self._later(life, e.Lost(number, reason)),
                )
            case e.Disconnect():
                self._flush(out)
                out.clear()
                if self.connection is not None:
                    connection, self.connection = self.connection, None
                    # What was sent before goes out first.
                    self.clock.after(5.0, lambda: connection.cut("closed"))
            case e.ScorePage():
                scores = [
                    m.Score(job_id=c.job_id, missing_count=random.randrange(5),
                            missing_nar_size=random.randrange(10**9), outputs_present=False)
                    for c in effect.candidates
                ]  # fmt: skip
                event = e.Scored(effect.connection, effect.page, scores)
                self.clock.after(random.uniform(0, 0.02), lambda: self._later(life, event))
            case e.StartJob(assignment):
                self.running[assignment.assignment_id] = assignment
                self._run(assignment)
            case e.StopJob(assignment_id):
                self.running.pop(assignment_id, None)
                event = e.JobFinished(assignment_id, None)
                self.clock.after(random.uniform(0, 0.5), lambda: self._later(life, event))
            case e.Exit():
                self.is_up = False
                if self.connection is not None:
                    connection = self.connection
                    self.clock.after(5.0, lambda: connection.cut("exit"))
                self.clock.after(random.uniform(0.5, 20.0), self.start)
            case e.Note():
                pass

    def _received(self, life: int, number: int, frames: list[bytes]) -> None:
        for frame in frames:
            message = self._decoder.decode(frame)
            if isinstance(message, m.AssignJob):
                self.assigned.append(
                    m.ClaimRef(job_id=message.job_id, assignment_id=message.assignment_id)
                )
                if self.connection and self.random.random() < self.network.faults.declines:
                    answer = m.AssignJobResponse(
                        job_id=message.job_id, assignment_id=message.assignment_id, accepted=False
                    )
                    self.connection.to_server([encode(answer)])
                    continue
                is_seat = message.cluster is not None
                if is_seat and self.random.random() < self.network.faults.deaf_seats:
                    continue
            elif isinstance(message, m.InitAck):
                self._report_stale()
            self._later(life, e.Received(number, message))

    def _later(self, life: int, event: e.Event) -> None:
        if self.is_up and self.life == life:
            self.step(event)

    # -- jobs --------------------------------------------------------------------------------------

    def _run(self, assignment: e.Assignment) -> None:
        life, key = self.life, assignment.assignment_id
        if isinstance(assignment.job, m.EvalJob):
            graph = self.graphs[assignment.job.source.ref]
            at = 0.0
            for first in range(0, len(graph), 50):
                at += self.random.uniform(0.01, 1.0)
                batch = m.EvalResult(derivations=graph[first : first + 50], warnings=[], errors=[])
                event = e.JobUpdated(key, batch)
                self.clock.after(at, lambda event=event: self._while_running(life, key, event))
            self.clock.after(at, lambda: self._finish(life, key, Evaluated()))
            return
        outcome: Any = Built(
            outputs={n: m.Output(path=p, nar_size=100) for n, p in assignment.job.outputs.items()},
            metrics=m.BuildMetrics(wall_time_ms=5, peak_ram_mb=3),
        )
        if self.random.random() < self.network.faults.failures:
            kind = self.random.choice(FAILURES)
            needed = [required.path for required in assignment.job.required_paths]
            lost = self.random.sample(needed, 1) if needed and kind == "InputsUnavailable" else []
            outcome = Failed(kind, "simulated", missing_paths=lost)
        self.clock.after(self.random.expovariate(0.5), lambda: self._finish(life, key, outcome))

    def _while_running(self, life: int, key: str, event: e.Event) -> None:
        if self.life == life and key in self.running:
            self._later(life, event)

    def _finish(self, life: int, key: str, outcome: Any) -> None:
        if self.life == life and self.running.pop(key, None) is not None:
            if not isinstance(outcome, Failed):
                self.finished.add(key)
            self._later(life, e.JobFinished(key, outcome))
