"""From what a core decided to the cores, the ledger and the peers that it concerns."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from actors.ledger.records import TERMINAL, SetJob, SetPriority, Write
from actors.server.assigner import Assigner
from actors.server.claims import Claim
from actors.server.clusters.coordinator import Coordinator
from actors.server.config import ServerConfig
from actors.server.effects import (
    Abort,
    Admit,
    Ask,
    Await,
    Changed,
    Closed,
    ClustersAdded,
    ClusterUnwanted,
    Effect,
    Enter,
    Gone,
    HealthRequest,
    Leave,
    Log,
    Opened,
    Present,
    Push,
    ReadLog,
    Record,
    Released,
    Revoked,
    Tell,
    TellDurable,
)
from actors.server.feeder import Feeder
from actors.server.jobs import job_map
from actors.server.outgoing import Outgoing
from actors.server.reports import Reports, abort_message
from actors.server.roster import Roster
from actors.server.sessions import Session, SessionTable
from actors.server.settlement import Settlement
from transport import messages as m
from transport.codec import assign_job, encode, encode_value


class Routes:
    """Does the effects of dispatch's cores."""

    def __init__(
        self,
        config: ServerConfig,
        sessions: SessionTable,
        settlement: Settlement,
        out: Outgoing,
        *,
        assigner: Assigner,
        feeder: Feeder,
        coordinator: Coordinator,
        roster: Roster,
        reports: Reports,
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._settlement = settlement
        self._out = out
        self._assigner = assigner
        self._feeder = feeder
        self._coordinator = coordinator
        self._roster = roster
        self._reports = reports
        self.stopping = False
        """The server takes nobody any more."""
        self.ended: list[SetJob] = []
        """Jobs that ended since the coordinator was told last."""

    def route(self, effects: Iterable[Effect], now: float) -> None:
        """Does what a core has decided, in order."""
        for effect in effects:
            match effect:
                case Record():
                    self._record(effect.write)
                case Tell():
                    self._out.tell(effect.peer, effect.message)
                case TellDurable():
                    self._settlement.promise(effect.peer, encode(effect.message))
                case Enter():
                    self._enter(effect)
                case Leave():
                    self._assigner.pool.leave(effect.job_id)
                    self._out.pager.append(effect)
                case Released():
                    self.mark_claims(effect.worker)
                case Abort():
                    self._abort(effect, now)
                case Opened():
                    self._opened(effect, now)
                case Changed():
                    self._changed(effect.session, now)
                case Revoked():
                    self._revoked(effect.session, now)
                case Closed():
                    self._closed(effect, now)
                case Await() | Push() | ClustersAdded() | ClusterUnwanted():
                    self._route_cluster(effect, now)
                case Ask() | Admit() | Log() | ReadLog() | HealthRequest():
                    self._hand_on(effect)

    def _hand_on(self, effect: Ask | Admit | Log | ReadLog | HealthRequest) -> None:
        """What other actors do."""
        match effect:
            case Ask():
                self._out.queries.append(effect.query)
            case Admit():
                self._out.admissions.append(effect.request)
            case HealthRequest():
                self._out.health_requests.append(effect)
            case Log() | ReadLog():
                self._out.logs.append(effect)

    def _route_cluster(
        self, effect: Await | Push | ClustersAdded | ClusterUnwanted, now: float
    ) -> None:
        match effect:
            case Await():
                self._settlement.expect(effect.awaited, effect.write)
            case Push():
                self._push(effect)
            case ClustersAdded():
                self._coordinator.added(effect.clusters)
            case ClusterUnwanted():
                doom = self._coordinator.doom(effect.cluster_id, "Aborted", effect.reason, now)
                self.route(doom, now)

    def _enter(self, effect: Enter) -> None:
        self._assigner.enter(effect.entry)
        self._out.pager.append(effect)
        if effect.entry.is_cluster_member:
            self._coordinator.kick()

    def _record(self, write: Write) -> None:
        self._settlement.record(write)
        if isinstance(write, SetPriority):
            self._assigner.pool.set_prioritized(write.job_id, write.prioritized)
        elif isinstance(write, SetJob) and write.status in TERMINAL:
            self._assigner.forget(write.job_id)
            self.ended.append(write)

    def _present(self, session: Session) -> None:
        self._out.pager.append(Present(session.id, session.peer, session.view()))

    def _changed(self, session: Session, now: float) -> None:
        self._assigner.changed(session)
        self._present(session)
        if session.is_draining:
            self.route(self._coordinator.left(session, "drains", now), now)
        self._coordinator.kick()

    def mark_claims(self, worker: str) -> None:
        """Tells the worker's session what it holds."""
        session = self._sessions.by_worker.get(worker)
        if session is not None:
            held = self._assigner.held_by(worker)
            session.holds_claims = bool(held)
            session.accepted &= {claim.assignment_id for claim in held}

    def _opened(self, opened: Opened, now: float) -> None:
        session = opened.session
        resumed, released = self._assigner.attach(session, opened.running)
        for claim in released:
            why = f"worker {claim.worker} came back without it"
            self.route(self._reports.lost(claim, now, why=why, blame=True), now)
        projects = ["*"] if session.projects is None else sorted(session.projects)
        self._out.tell(
            session.peer,
            m.InitAck(
                version=opened.version,
                session=session.id,
                capabilities=session.capabilities,
                authorized_peers=projects,
                failed_peers=list(opened.failed),
                resumed=[claim.assignment_id for claim in resumed],
                heartbeat_timeout=self._config.heartbeat_timeout,
            ),
        )
        for claim in resumed:
            if claim.abort_reason is not None:
                self._out.tell(session.peer, abort_message(claim))
        self.mark_claims(session.worker)
        self._present(session)
        if self.stopping:
            self._out.tell(session.peer, m.Draining())

    def _closed(self, closed: Closed, now: float) -> None:
        session = closed.session
        self._out.pager.append(Gone(session.id))
        self.route(self._roster.left(session), now)
        self.route(self._coordinator.left(session, f"is gone ({closed.cause})", now), now)
        if closed.cause == "silent":
            self._out.tell(
                session.peer, m.Reject(code=400, reason="no session: silent for too long")
            )
        released = self._assigner.detach(session, now, wait=closed.cause == "lost")
        why = f"worker {session.worker}: {closed.cause}"
        for claim in released:
            if closed.cause == "revoked":
                self._out.tell(session.peer, abort_message(claim, "the project was revoked"))
            blame = closed.cause == "silent"
            self.route(self._reports.lost(claim, now, why=why, blame=blame), now)

    def _revoked(self, session: Session, now: float) -> None:
        for claim in self._assigner.held_by(session.worker):
            project = self._feeder.nodes[claim.job_id].cls.project
            if session.projects is None or project in session.projects:
                continue
            if claim.state == "claiming":
                continue  # `_won` looks at the rights again
            self.abort_on_worker(claim, "the project was revoked")
            self._assigner.release(claim)
            effects = self._reports.lost(claim, now, why="the project was revoked", blame=False)
            self.route(effects, now)

    def _abort(self, abort: Abort, now: float) -> None:
        claim = self._assigner.claims.get(abort.job_id)
        if claim is not None and self._assigner.abort(claim, abort.reason, now):
            self.abort_on_worker(claim, abort.reason)

    def abort_on_worker(self, claim: Claim, reason: str) -> None:
        """Tells the worker to stop, if it is here and was told to start."""
        session = self._sessions.by_id.get(claim.session or "")
        if session is not None and claim.state != "claiming":
            self._out.tell(session.peer, abort_message(claim, reason))

    def _push(self, push: Push) -> None:
        claim = push.claim
        session = self._sessions.by_id[claim.session or ""]
        assert claim.entry is not None
        job = job_map(self._feeder.nodes[claim.job_id], claim.entry)
        seat = encode_value(msgspec.to_builtins(push.seat))
        frame = assign_job(claim.job_id, claim.assignment_id, job, seat)
        self._out.frames.append((session.peer, frame, claim))
        session.holds_claims = True
