"""The session table: who is connected, on which connection, with what rights.

The supervisor owns it, so it outlives every actor. The registry core alone writes it (and the
gateway marks `last_seen`); the reaper and the pager's shell read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from actors.server.model import WorkerView
from transport import messages as m


@dataclass(slots=True, eq=False)
class Session:
    """One worker's connection from `InitAck` to its end."""

    id: str
    peer: bytes
    worker: str
    name: str
    agent: str
    asked: m.Capabilities
    capabilities: m.Capabilities
    """The ones in force: what the worker has and its registration allows."""
    projects: frozenset[str] | None
    """Authorized projects; none = every project (open mode)."""
    last_seen: float
    verified: dict[str, str] = field(default_factory=dict)
    """By project: the stored token hash that the worker's token matched."""
    announced: m.WorkerCapabilities | None = None
    metrics: m.WorkerMetrics | None = None
    draining: bool = False
    """The worker's own `Draining`; it ends with the session."""
    cordon: str | None = None
    """The operator's reason; it outlives the session."""
    listed: bool = False
    """It asked for the full list at least once, so offers may be sent."""
    full_since: float | None = None
    """Since when its queue on the socket takes nothing more."""
    pinged_at: float = 0.0
    holds_claims: bool = False
    accepted: set[str] = field(default_factory=set)
    """Open assignments that it accepted: what a restarted dispatch cannot know otherwise."""
    user_id: str | None = None
    """The CURVE public key of the connection."""

    @property
    def is_draining(self) -> bool:
        """It gets no new jobs, for its own sake or because it is cordoned."""
        return self.draining or self.cordon is not None

    def view(self) -> WorkerView:
        """The worker as eligibility and scoring see it."""
        told = self.announced
        metrics = self.metrics or m.WorkerMetrics()
        return WorkerView(
            worker=self.worker,
            can_fetch=self.capabilities.fetch,
            can_eval=self.capabilities.eval,
            can_build=self.capabilities.build,
            has_capabilities=told is not None,
            architectures=frozenset(told.architectures) if told else frozenset(),
            features=frozenset(told.system_features) if told else frozenset(),
            projects=self.projects,
            draining=self.is_draining,
            max_builds=told.max_concurrent_builds if told else 0,
            has_metrics=self.metrics is not None,
            cpu_count=told.cpu_count if told else None,
            ram_total_mb=told.ram_total_mb if told else None,
            cpu_core_score=told.cpu_core_score if told else None,
            cpu_usage_pct=metrics.cpu_usage_pct,
            ram_free_mb=metrics.ram_free_mb,
            upload_speed_mbps=metrics.upload_speed_mbps,
            download_speed_mbps=metrics.download_speed_mbps,
        )


@dataclass(slots=True)
class SessionTable:
    by_peer: dict[bytes, Session] = field(default_factory=dict)
    by_id: dict[str, Session] = field(default_factory=dict)
    by_worker: dict[str, Session] = field(default_factory=dict)
    commands: dict[bytes, float] = field(default_factory=dict)
    """Connections of command-line clients (they said `CmdHello`), with when last seen."""

    def __len__(self) -> int:
        return len(self.by_peer)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self.by_peer.values()))

    def add(self, session: Session) -> None:
        assert session.worker not in self.by_worker
        self.by_peer[session.peer] = session
        self.by_id[session.id] = session
        self.by_worker[session.worker] = session

    def remove(self, session: Session) -> None:
        del self.by_peer[session.peer]
        del self.by_id[session.id]
        del self.by_worker[session.worker]

    def check(self) -> None:
        """Asserts that the three indexes say the same."""
        assert len(self.by_peer) == len(self.by_id) == len(self.by_worker)
        for session in self.by_peer.values():
            assert self.by_peer[session.peer] is session
            assert self.by_id[session.id] is session
            assert self.by_worker[session.worker] is session
