"""A core on a clock of its own, with a server's messages put in by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

import pytest

from actors.worker import events as e
from actors.worker.core import CoreSettings, Link, WorkerCore
from transport import messages as m

T = TypeVar("T")

ALL = m.Capabilities(fetch=False, eval=True, build=True)


def build_job(name: str = "hello", **fields) -> m.BuildJob:
    given = {
        "project": "default",
        "drv_path": f"/nix/store/{name}.drv",
        "name": name,
        "outputs": {"out": f"/nix/store/{name}"},
        "requirement": m.Requirement(system="x86_64-linux", required_features=[]),
        "required_paths": [],
        "timeout_secs": 0,
        "max_silent_secs": 0,
    }
    return m.BuildJob(**(given | fields))


def eval_job(ref: str = "graph.json", **fields) -> m.EvalJob:
    source = m.EvalSource(kind="graph-file", ref=ref)
    given = {"project": "default", "source": source, "attributes": [], "timeout_secs": 0}
    return m.EvalJob(**(given | fields))


def candidate(job_id: str, paths=(), outputs=(), kind="build") -> m.JobCandidate:
    return m.JobCandidate(
        job_id=job_id,
        kind=kind,
        project="default",
        required_paths=[m.RequiredPath(path=p, nar_size=s) for p, s in paths],
        drv_paths=[],
        output_paths=list(outputs),
    )


def ack(resumed=(), heartbeat_timeout: float = 120.0, capabilities=ALL) -> m.InitAck:
    return m.InitAck(
        version=1,
        session="s",
        capabilities=capabilities,
        authorized_peers=["*"],
        failed_peers=[],
        resumed=list(resumed),
        heartbeat_timeout=heartbeat_timeout,
    )


@dataclass
class Driver:
    """Steps a core, checks it after each step, and keeps what it did last."""

    builds: int = 1
    evals: int = 1
    tokens: dict[str, str] = field(default_factory=dict)
    jitter: float = 0.5
    now: float = 100.0

    def __post_init__(self) -> None:
        settings = CoreSettings(
            worker_id="w1",
            capabilities=ALL,
            announced=m.WorkerCapabilities(
                architectures=["x86_64-linux"],
                system_features=[],
                max_concurrent_builds=self.builds,
            ),
            max_builds=self.builds,
            max_evals=self.evals,
            tokens=self.tokens,
        )
        self.core = WorkerCore(settings, lambda: self.jitter, self.now)
        self.connection = 0
        self.effects: list[e.Effect] = []

    def step(self, event: e.Event) -> list[m.Message]:
        """Returns what was sent."""
        self.effects = self.core.step(event, self.now)
        self.core.check()
        for effect in self.effects:
            if isinstance(effect, e.Connect):
                self.connection = effect.connection
            if isinstance(effect, e.Send) and isinstance(effect.message, m.InitConnection):
                self.hello = effect.message
        return self.sent()

    def sent(self) -> list[m.Message]:
        return [effect.message for effect in self.effects if isinstance(effect, e.Send)]

    def did(self, kind: type[T]) -> list[T]:
        return [effect for effect in self.effects if isinstance(effect, kind)]

    def receive(self, message: m.Message) -> list[m.Message]:
        return self.step(e.Received(self.connection, message))

    def wait(self, seconds: float) -> list[m.Message]:
        """Lets time pass, one deadline after the other; returns all that was sent."""
        end = self.now + seconds
        sent: list[m.Message] = []
        effects: list[e.Effect] = []
        while self.core.deadline <= end:
            self.now = max(self.now, self.core.deadline)
            sent += self.step(e.Tick())
            effects += self.effects
        self.now = end
        self.effects = effects
        return sent

    def wait_alive(self, seconds: float) -> list[m.Message]:
        """Lets time pass with a server that says something every second."""
        sent: list[m.Message] = []
        effects: list[e.Effect] = []
        for _ in range(round(seconds)):
            sent += self.wait(1)
            effects += self.effects
            self.receive(m.Pong(nonce=0))
        self.effects = effects
        return sent

    # -- longer ways -------------------------------------------------------------------

    def connect(self, resumed=(), **fields) -> list[m.Message]:
        """Through the handshake; returns what was sent on `InitAck`."""
        if self.core.link is Link.IDLE:
            self.now = max(self.now, self.core.deadline)
            self.step(e.Tick())
        return self.receive(ack(resumed, **fields))

    def serve(self, resumed=(), **fields) -> list[m.Message]:
        """Through the handshake and an empty first list; returns all that was sent."""
        sent = self.connect(resumed, **fields)
        return sent + self.receive(m.JobListChunk(candidates=[], is_final=True))

    def assign(self, number: int = 1, job: m.Job | None = None, seat=None) -> list[m.Message]:
        return self.receive(
            m.AssignJob(
                job_id=f"j{number}",
                assignment_id=f"a{number}",
                job=job or build_job(f"p{number}"),
                cluster=seat,
            )
        )

    def lose(self, reason: str = "cut") -> list[m.Message]:
        return self.step(e.Lost(self.connection, reason))

    def finish(self, number: int, outcome=None) -> list[m.Message]:
        return self.step(e.JobFinished(f"a{number}", outcome))

    def never(self) -> bool:
        return self.core.deadline == inf


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
