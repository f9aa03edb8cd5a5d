"""The dispatch task's cores, introduced to each other: gateway, registry, feeder, assigner and
coordinator.

A pass takes all frames and events that wait, then settles once: one transaction for all that
was decided, then everything that is to be sent. The path of a `RequestJob` is

    receive -> Assigner.request -> batch -> (commit) -> committed -> AssignJob

so that `AssignJob` can only come out of a commit that won. Pure: no await, clock or socket;
dispatch.py is the shell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from actors.ledger.port import (
    AdmissionRefused,
    AdmissionRequest,
    AdmissionTaken,
    Answer,
    Batch,
    CommitFailed,
    Committed,
    Forgotten,
    LedgerEvent,
    Query,
    Synced,
)
from actors.ledger.records import (
    TERMINAL,
    Adopted,
    ClaimRecord,
    ForeignChanges,
    OpenClaim,
    Rebuild,
    SetJob,
    SetPriority,
    Snapshot,
    Write,
)
from actors.server.admissions import Admissions
from actors.server.assigner import Assigner
from actors.server.authorization import Registration
from actors.server.claims import Claim, breakdown
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.model import Opening, Starting
from actors.server.clusters.shown import ClusterViews
from actors.server.commands import Commands
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
    DropLogs,
    Effect,
    Enter,
    Gone,
    HealthRequest,
    Leave,
    ListRequested,
    Log,
    Neighbours,
    Opened,
    PagerEvent,
    PagerStarted,
    PeerGone,
    PingDue,
    Present,
    Push,
    ReadLog,
    Record,
    RegistryFileChanged,
    Released,
    Reset,
    Revoked,
    Silent,
    StopRequested,
    Tell,
    TellDurable,
)
from actors.server.explain import Explainer
from actors.server.feeder import REBUILD, Feeder
from actors.server.gateway import Gateway, Received
from actors.server.ids import Ids
from actors.server.jobs import job_map
from actors.server.registry import Registry
from actors.server.reports import REPORTS, Reports, abort_message
from actors.server.roster import Roster
from actors.server.scoring import Faults, Policy
from actors.server.sessions import Session, SessionTable
from actors.server.settlement import Settlement
from actors.server.status import status
from transport import messages as m
from transport.codec import assign_job, encode, encode_value
from transport.interface import Incoming

ADOPTED, FOREIGN, COUNTS = "adopted", "foreign", "counts"
"""Tokens of the queries that are not a client's."""
FOREIGN_MARGIN_SECS = 10.0
"""A change shows when it has committed, some time after the time that it bears."""

COMMAND_SILENCE_SECS = 600.0
"""After which a command's connection is forgotten."""

DispatchEvent = (
    LedgerEvent | PingDue | Silent | PeerGone | PagerStarted | RegistryFileChanged | Neighbours
    | StopRequested
)  # fmt: skip


class Farm:
    """The cores of dispatch and the routes between them.

    After `receive`, `take` or `expire` the shell commits `next_batch` until there is none,
    reports each with `committed` or `commit_failed`, and then empties the lists `out`,
    `pager`, `queries`, `admissions_out`, `logs` and the requests for status and health.
    """

    def __init__(
        self,
        config: ServerConfig,
        server: str,
        ids: Ids,
        policy: Policy,
        sessions: SessionTable,
        registrations: dict[str, Registration] | None,
        snapshot: Snapshot,
        now: float,
        first_batch: int = 1,
        others_alive: frozenset[str] = frozenset(),
        *,
        has_forgotten: bool = False,
    ) -> None:
        """`has_forgotten`: an earlier incarnation took reports that never reached the ledger."""
        self.config = config
        self.server = server
        self.sessions = sessions
        self.gateway = Gateway(sessions, chaos=config.chaos)
        self.registry = Registry(
            sessions, registrations, lambda: ids.new("c"), snapshot.cordons, config.max_workers
        )
        self.troubles: list[str] = []
        """What the shell is to log, once each."""
        self.feeder = Feeder(
            max_attempts=config.max_attempts,
            retry_backoff=config.retry_backoff,
            max_losses=config.max_losses,
        )
        self.assigner = Assigner(
            policy,
            lambda: ids.new("a"),
            answer_timeout=config.answer_timeout,
            abort_timeout=config.abort_timeout,
            reconnect_grace=config.reconnect_grace,
            idle_slot_ttl=config.idle_slot_ttl,
            faults=Faults(self.troubles.append),
        )
        self.coordinator = Coordinator(
            config, server, lambda: ids.new("r"), self.assigner, self.feeder, sessions
        )
        self.roster = Roster(sessions, snapshot.workers)
        self.cluster_views = ClusterViews(self.coordinator, self.assigner, self.feeder)
        self.explainer = Explainer(
            self.feeder, self.assigner, sessions, self.roster, self.cluster_views
        )
        self.admissions = Admissions(self.feeder, ids)
        self.reports = Reports(self.assigner, self.feeder, self.admissions, self.coordinator)
        self.commands = Commands(
            ids, self.registry, self.feeder, self.admissions, self.explainer,
            self.coordinator, self.cluster_views,
        )  # fmt: skip
        self.stopping = False
        self.lost_races = 0

        self.out: list[tuple[bytes, bytes, Claim | None]] = []
        """Frames to send, in order; an `AssignJob` with its claim."""
        self.pager: list[PagerEvent] = []
        self.queries: list[Query] = []
        self.admissions_out: list[AdmissionRequest] = []
        self.logs: list[Log | ReadLog | DropLogs] = []
        self.shell_requests: list[tuple[bytes, m.CmdStatus | m.CmdKillActor]] = []
        self.health_requests: list[HealthRequest] = []

        self._settlement = Settlement(first_batch)
        self._ended: list[SetJob] = []
        """Jobs that ended since the coordinator was told last."""
        self._next_tick = now + config.tick
        self._looked_at = 0.0
        self._load(snapshot, others_alive, now)
        if has_forgotten:
            self._ask_again(now)

    def _load(self, snapshot: Snapshot, others_alive: frozenset[str], now: float) -> None:
        self.assigner.pool.history.load(snapshot.metrics, now)
        self.assigner.instance.load(snapshot.waits, snapshot.prefetches)
        effects = self.feeder.load(snapshot, now)
        # What another living server handed out is its own to close.
        claims = [c for c in snapshot.claims if c.server not in others_alive]
        self._adopt(claims, now)
        self._route(effects, now)
        attempts = [a for a in snapshot.attempts if a.server not in others_alive]
        self._route(self.coordinator.load(snapshot.clusters, attempts, now), now)
        for session in self.sessions:
            # The sessions of a dispatch that was restarted hold what they held.
            own = {
                c.assignment_id
                for c in claims
                if c.session == session.id or c.assignment_id in session.accepted
            }
            released = self.assigner.reattach(session, own, now)
            for claim in released:
                effects = self.reports.lost(claim, now, why="dispatch restarted", blame=False)
                self._route(effects, now)
            self._mark_claims(session.worker)
        self._route(self.coordinator.resume(now), now)
        self.pager = [self.reset()]

    def _ask_again(self, now: float) -> None:
        """Ends all sessions: workers come back at once, and send again what was not `Recorded`."""
        for session in list(self.sessions):
            self._tell(session.peer, m.Reject(code=400, reason="no session: the server restarted"))
            self._route(self.registry.close(session, "lost", now), now)
        self.pager = [self.reset()]

    def reset(self) -> Reset:
        """Everything that a pager must know."""
        return Reset(
            entries=tuple(self.assigner.pool),
            sessions=tuple(Present(s.id, s.peer, s.view()) for s in self.sessions),
            listed=frozenset(s.id for s in self.sessions if s.listed),
        )

    # -- in ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When `expire` has something to do."""
        if self.admissions.merging:
            return -math.inf
        return min(
            self._next_tick, self.registry.deadline, self.feeder.deadline,
            self.assigner.deadline, self.coordinator.deadline, self._settlement.deadline,
        )  # fmt: skip

    def receive(self, incoming: Incoming, now: float) -> None:
        """All frames of one ZeroMQ message."""
        for item in self.gateway.take(incoming, now):
            if isinstance(item, Tell):
                self._tell(item.peer, item.message)
                if isinstance(item.message, m.Reject):
                    self.registry.abandon_handshake(item.peer)
            elif item.session is not None:
                self._from_worker(item.session, item.message, now)
            else:
                self._from_stranger(item, now)

    def take(self, event: DispatchEvent, now: float) -> None:
        """An event of another actor."""
        match event:
            case Committed():
                self.committed(event.number, event.results, now)
            case CommitFailed():
                self.commit_failed(event.number, now)
            case Synced():
                for peer, frame in self._settlement.synced(event.number):
                    self.out.append((peer, frame, None))
            case AdmissionTaken():
                self._route(self.admissions.taken(event, now), now)
            case AdmissionRefused():
                self._route(self.admissions.refused(event, now), now)
                self._route(self.reports.admitted(event.requester, now), now)
            case Forgotten() | Answer():
                self._answered(event, now)
            case Neighbours():
                self._look_around(event)
            case PingDue():
                session = self.sessions.by_id.get(event.session)
                if session is not None:
                    session.pinged_at = now
                    self._tell(session.peer, m.Ping(nonce=0))
            case Silent():
                session = self.sessions.by_id.get(event.session)
                if session is not None and session.last_seen <= event.last_seen:
                    self._route(self.registry.close(session, "silent", now), now)
            case PeerGone():
                self.peer_gone(event.peer, now)
            case PagerStarted():
                self.pager = [self.reset()]
            case RegistryFileChanged():
                self._route(self.registry.set_registrations(event.registrations, now), now)
            case StopRequested():
                self._stop(now)

    def _look_around(self, event: Neighbours) -> None:
        """Other servers: reads what they wrote, and takes over the claims of dead ones."""
        since = self._looked_at - FOREIGN_MARGIN_SECS
        self._looked_at = event.wall_time
        offset = event.wall_offset
        # First, so that the jobs of what is taken over are here.
        self.queries.append(Query(FOREIGN, "foreign_changes", (since, offset)))
        if event.dead:
            dead = tuple(sorted(event.dead))
            self.queries.append(Query(ADOPTED, "adopt", (dead, offset), writes=True))
        self.queries.append(Query(COUNTS, "counts"))

    def _answered(self, answer: Answer | Forgotten, now: float) -> None:
        if isinstance(answer, Forgotten):
            self.logs.append(DropLogs(answer.job_ids))
            self.queries.append(Query(COUNTS, "counts"))
        elif answer.token.startswith(REBUILD):
            nothing = Rebuild(answer.token.removeprefix(REBUILD))
            found = answer.result if isinstance(answer.result, Rebuild) else nothing
            self._route(self.feeder.rebuilt(found, now), now)
        elif answer.token not in (ADOPTED, FOREIGN, COUNTS):
            self._route(self.commands.answered(answer, now), now)
        elif isinstance(answer.result, ForeignChanges):
            self._route(self.coordinator.foreign(answer.result.clusters, now), now)
            self._route(self.feeder.foreign(answer.result, self.assigner.claims, now), now)
        elif isinstance(answer.result, dict):
            self.feeder.recount(answer.result)
        elif isinstance(answer.result, Adopted):
            known = [c for c in answer.result.claims if c.job_id in self.feeder.nodes]
            fresh = [c for c in known if c.job_id not in self.assigner.claims]
            self._adopt(fresh, now)
            self._route(self.coordinator.adopt(answer.result.attempts, now), now)

    def _adopt(self, claims: Sequence[ClaimRecord], now: float) -> None:
        nodes = {c.job_id: self.feeder.nodes[c.job_id] for c in claims}
        self.assigner.load(
            claims,
            {j: "eval" if n.kind == "eval" else "build" for j, n in nodes.items()},
            now + self.config.orphan_grace,
            {j: (n.cls.project, (n.package, n.cls.system)) for j, n in nodes.items()},
        )

    def expire(self, now: float) -> None:
        """Whatever is due by now, and the next chunk of an admission."""
        if self.admissions.merging:
            effects, finished = self.admissions.merge(now)
            self._route(effects, now)
            if finished is not None:
                self._route(self.reports.admitted(finished, now), now)
        self._route(self.registry.expire(now), now)
        self._route(self.feeder.due(now), now)
        self._route(self.coordinator.expire(now), now)
        unanswered, unconfirmed, orphaned = self.assigner.overdue(now)
        for claim in unanswered:
            self._abort_on_worker(claim, "not answered in time")
            self._route(self.reports.unanswered(claim, now), now)
        for claim in unconfirmed:
            self._route(self.reports.unconfirmed(claim, now), now)
        for claim in orphaned:
            self.assigner.release(claim)
            why = f"worker {claim.worker} did not come back"
            self._route(self.reports.lost(claim, now, why=why, blame=True), now)
        if now >= self._next_tick:
            # A late tick is one tick: missed ones merge.
            self._next_tick = now + self.config.tick
            self.assigner.tick(now)
            self.coordinator.tick(now)
            self._route(self.roster.refresh(now), now)
            self._forget_commands(now)

    def _forget_commands(self, now: float) -> None:
        """Clients that said nothing for long are gone or say `CmdHello` again."""
        commands = self.sessions.commands
        for peer in [p for p, seen in commands.items() if seen < now - COMMAND_SILENCE_SECS]:
            del commands[peer]
            self.admissions.abandoned(peer)

    def peer_gone(self, peer: bytes, now: float) -> None:
        """A connection turned out to be lost."""
        self.registry.abandon_handshake(peer)
        self.sessions.commands.pop(peer, None)
        self.admissions.abandoned(peer)
        session = self.sessions.by_peer.get(peer)
        if session is not None:
            self._route(self.registry.close(session, "lost", now), now)

    # -- messages ---------------------------------------------------------------------------

    def _from_stranger(self, received: Received, now: float) -> None:
        peer, message = received.peer, received.message
        match message:
            case m.InitConnection():
                effects = self.registry.init(peer, message, received.user_id, now)
            case m.AuthResponse():
                effects = self.registry.auth_response(peer, message, now)
            case _ if isinstance(message, self.gateway.commands) and peer in self.sessions.commands:
                self.sessions.commands[peer] = now
                if isinstance(message, m.CmdStatus | m.CmdKillActor):
                    self.shell_requests.append((peer, message))
                    return
                effects = self.commands.take(peer, message, now)
            case m.Ping() if self.registry.in_handshake(peer):
                effects = [Tell(peer, m.Pong(nonce=message.nonce))]
            case _:
                self.registry.abandon_handshake(peer)
                effects = [Tell(peer, m.Reject(code=400, reason="no session"))]
        self._route(effects, now)

    def _from_worker(self, session: Session, message: m.Message, now: float) -> None:
        match message:
            case m.RequestJob():
                claim = self.assigner.request(session, message.kind, now)
                if claim is not None:
                    self._claim(claim)
                else:
                    self.coordinator.kick()
            case _ if isinstance(message, REPORTS):
                self._route(self.reports.take(session, message, now), now)
            case m.RequestJobChunk():
                self.assigner.score(session, message.scores)
            case m.WorkerMetrics():
                session.metrics = message
                self.assigner.changed(session)
            case m.RequestJobList():
                session.listed = True
                self.pager.append(ListRequested(session.id))
            case m.WorkerCapabilities():
                self._route(self.registry.announced(session, message), now)
                self._route(self.roster.announced(session, now), now)
            case m.Ping():
                self._tell(session.peer, m.Pong(nonce=message.nonce))
            case m.Pong():
                self._route(self.registry.pong(session, message), now)
            case m.Draining():
                self._route(self.registry.draining(session), now)
            case m.Goodbye():
                self._route(self.registry.close(session, "goodbye", now), now)
            case m.ReauthRequest():
                self._route(self.registry.reauth(session), now)
            case m.AuthResponse():
                self._route(self.registry.auth_response(session.peer, message, now), now)
            case m.InitConnection():
                text = "InitConnection: unexpected within a session"
                self._tell(session.peer, m.Error(code=400, message=text))
            case m.ClusterSignal():
                self._route(self.coordinator.signal(session, message), now)
            case _:
                text = f"{type(message).__name__}: not a worker's message"
                self._tell(session.peer, m.Error(code=400, message=text))

    # -- effects ----------------------------------------------------------------------------

    def _route(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Record():
                    self._record(effect.write)
                case Tell():
                    self._tell(effect.peer, effect.message)
                case TellDurable():
                    self._settlement.promise(effect.peer, encode(effect.message))
                case Enter():
                    self._enter(effect)
                case Leave():
                    self.assigner.pool.leave(effect.job_id)
                    self.pager.append(effect)
                case Released():
                    self._mark_claims(effect.worker)
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
                self.queries.append(effect.query)
            case Admit():
                self.admissions_out.append(effect.request)
            case HealthRequest():
                self.health_requests.append(effect)
            case Log() | ReadLog():
                self.logs.append(effect)

    def _route_cluster(
        self, effect: Await | Push | ClustersAdded | ClusterUnwanted, now: float
    ) -> None:
        match effect:
            case Await():
                self._settlement.expect(effect.awaited, effect.write)
            case Push():
                self._push(effect)
            case ClustersAdded():
                self.coordinator.added(effect.clusters)
            case ClusterUnwanted():
                doom = self.coordinator.doom(effect.cluster_id, "Aborted", effect.reason, now)
                self._route(doom, now)

    def _enter(self, effect: Enter) -> None:
        self.assigner.enter(effect.entry)
        self.pager.append(effect)
        if effect.entry.is_cluster_member:
            self.coordinator.kick()

    def _record(self, write: Write) -> None:
        self._settlement.record(write)
        if isinstance(write, SetPriority):
            self.assigner.pool.set_prioritized(write.job_id, write.prioritized)
        elif isinstance(write, SetJob) and write.status in TERMINAL:
            self.assigner.forget(write.job_id)
            self._ended.append(write)

    def _tell(self, peer: bytes, message: m.Message) -> None:
        self.out.append((peer, encode(message), None))

    def _present(self, session: Session) -> None:
        self.pager.append(Present(session.id, session.peer, session.view()))

    def _changed(self, session: Session, now: float) -> None:
        self.assigner.changed(session)
        self._present(session)
        if session.is_draining:
            self._route(self.coordinator.left(session, "drains", now), now)
        self.coordinator.kick()

    def _mark_claims(self, worker: str) -> None:
        session = self.sessions.by_worker.get(worker)
        if session is not None:
            held = self.assigner.held_by(worker)
            session.holds_claims = bool(held)
            session.accepted &= {claim.assignment_id for claim in held}

    def _opened(self, opened: Opened, now: float) -> None:
        session = opened.session
        resumed, released = self.assigner.attach(session, opened.running)
        for claim in released:
            why = f"worker {claim.worker} came back without it"
            self._route(self.reports.lost(claim, now, why=why, blame=True), now)
        projects = ["*"] if session.projects is None else sorted(session.projects)
        self._tell(
            session.peer,
            m.InitAck(
                version=opened.version,
                session=session.id,
                capabilities=session.capabilities,
                authorized_peers=projects,
                failed_peers=list(opened.failed),
                resumed=[claim.assignment_id for claim in resumed],
                heartbeat_timeout=self.config.heartbeat_timeout,
            ),
        )
        for claim in resumed:
            if claim.abort_reason is not None:
                self._tell(session.peer, abort_message(claim))
        self._mark_claims(session.worker)
        self._present(session)
        if self.stopping:
            self._tell(session.peer, m.Draining())

    def _closed(self, closed: Closed, now: float) -> None:
        session = closed.session
        self.pager.append(Gone(session.id))
        self._route(self.roster.left(session), now)
        self._route(self.coordinator.left(session, f"is gone ({closed.cause})", now), now)
        if closed.cause == "silent":
            self._tell(session.peer, m.Reject(code=400, reason="no session: silent for too long"))
        released = self.assigner.detach(session, now, wait=closed.cause == "lost")
        why = f"worker {session.worker}: {closed.cause}"
        for claim in released:
            if closed.cause == "revoked":
                self._tell(session.peer, abort_message(claim, "the project was revoked"))
            blame = closed.cause == "silent"
            self._route(self.reports.lost(claim, now, why=why, blame=blame), now)

    def _revoked(self, session: Session, now: float) -> None:
        for claim in self.assigner.held_by(session.worker):
            project = self.feeder.nodes[claim.job_id].cls.project
            if session.projects is None or project in session.projects:
                continue
            if claim.state == "claiming":
                continue  # `_won` looks at the rights again
            self._abort_on_worker(claim, "the project was revoked")
            self.assigner.release(claim)
            effects = self.reports.lost(claim, now, why="the project was revoked", blame=False)
            self._route(effects, now)

    def _abort(self, abort: Abort, now: float) -> None:
        claim = self.assigner.claims.get(abort.job_id)
        if claim is not None and self.assigner.abort(claim, abort.reason, now):
            self._abort_on_worker(claim, abort.reason)

    def _abort_on_worker(self, claim: Claim, reason: str) -> None:
        session = self.sessions.by_id.get(claim.session or "")
        if session is not None and claim.state != "claiming":
            self._tell(session.peer, abort_message(claim, reason))

    def _stop(self, now: float) -> None:
        self.stopping = True
        self.registry.accepting = self.assigner.accepting = self.commands.accepting = False
        self._route(self.coordinator.stop(now), now)
        for session in self.sessions:
            self._tell(session.peer, m.Draining())

    # -- claims and commits ------------------------------------------------------------------

    def _claim(self, claim: Claim) -> None:
        self.feeder.claimed(claim.job_id)
        self.pager.append(Leave(claim.job_id))
        score = encode_value(breakdown(claim))
        self._settlement.claim(claim, OpenClaim(claim.record(self.server), score))

    def next_batch(self, now: float) -> Batch | None:
        """What is to be committed now, if anything; clusters are placed first."""
        while self._ended:
            write = self._ended.pop()
            self._route(self.coordinator.member_ended(write.job_id, write.error, now), now)
        self._route(self.coordinator.place(now), now)
        return self._settlement.next_batch(now)

    @property
    def wants_sync(self) -> bool:
        """Whether somebody waits for what was committed to become durable."""
        return self._settlement.wants_sync

    @property
    def has_unwritten(self) -> bool:
        """Whether what workers reported would be lost with these cores."""
        return self._settlement.has_unwritten or self.reports.holds_any

    @property
    def is_settled(self) -> bool:
        """Whether everything that was told is durable and no claim is unanswered."""
        return (
            self._settlement.is_settled
            and not self.admissions.merging
            and all(c.state == "accepted" for c in self.assigner.claims.values())
        )

    def committed(self, number: int, results: list[bool], now: float) -> None:
        """A batch is in: winners are told, losers move on to their next best."""
        for awaited, has_won in self._settlement.committed(number, results):
            match awaited:
                case Opening(attempt=attempt) if has_won:
                    self._route(self.coordinator.opened(attempt, now), now)
                case Opening(attempt=attempt):
                    self.lost_races += 1
                    self._route(self.coordinator.not_opened(attempt, now), now)
                case Starting(attempt=attempt):
                    self._route(self.coordinator.started(attempt, now, won=has_won), now)
                case Claim() if has_won:
                    self._won(awaited, now)
                case Claim():
                    self.lost_races += 1
                    following = self.assigner.lost_race(awaited, now)
                    if following is not None:
                        self._claim(following)

    def commit_failed(self, number: int, now: float) -> None:
        """A batch was rolled back. Its claims are off; everything else is written again."""
        for awaited in self._settlement.failed(number, now):
            if isinstance(awaited, Claim):
                self._give_back(awaited, now)
            else:
                self._route(self.coordinator.not_opened(awaited.attempt, now), now)

    def _won(self, claim: Claim, now: float) -> None:
        node = self.feeder.nodes[claim.job_id]
        self.assigner.won(claim, now)
        session = self.sessions.by_id.get(claim.session or "")
        if claim.abort_reason is not None:
            self._route(self.reports.unconfirmed(claim, now), now)
        elif session is None or session.is_draining or not self._may_run(session, claim):
            self._route(self.reports.undeliverable(claim, now), now)
        else:
            assert claim.entry is not None
            frame = assign_job(claim.job_id, claim.assignment_id, job_map(node, claim.entry))
            self.out.append((session.peer, frame, claim))
            session.holds_claims = True

    def _push(self, push: Push) -> None:
        claim = push.claim
        session = self.sessions.by_id[claim.session or ""]
        assert claim.entry is not None
        job = job_map(self.feeder.nodes[claim.job_id], claim.entry)
        seat = encode_value(msgspec.to_builtins(push.seat))
        frame = assign_job(claim.job_id, claim.assignment_id, job, seat)
        self.out.append((session.peer, frame, claim))
        session.holds_claims = True

    def _may_run(self, session: Session, claim: Claim) -> bool:
        project = self.feeder.nodes[claim.job_id].cls.project
        return session.projects is None or project in session.projects

    def _give_back(self, claim: Claim, now: float) -> None:
        """The claim was never written: its job is a candidate as before."""
        self.assigner.release(claim)
        assert claim.entry is not None
        if claim.abort_reason is not None:
            self._route(self.feeder.aborted(claim.job_id, now), now)
        else:
            self.feeder.unclaimed(claim.job_id)
            self._route([Enter(claim.entry)], now)

    def undeliverable(self, claim: Claim, now: float) -> None:
        """The `AssignJob` found its peer gone."""
        if self.assigner.claims.get(claim.job_id) is claim:
            self._route(self.reports.undeliverable(claim, now), now)

    def refuse_admission(self, request: AdmissionRequest, now: float) -> None:
        """The ledger's queue is full."""
        text = "the server is taking too many submissions at once: try again"
        refused = AdmissionRefused(request.token, request.requester, request.sender, text, False)
        self.take(refused, now)

    def refuse_query(self, query: Query, now: float) -> None:
        """The ledger's queue is full; the look at other servers is due again anyway."""
        if query.token.startswith(REBUILD):
            self._answered(Answer(query.token, None), now)
        elif query.token not in (ADOPTED, FOREIGN, COUNTS):
            self._route(self.commands.refused(query), now)

    # -- looking in -------------------------------------------------------------------------

    def status(self, now: float) -> dict[str, Any]:
        """The status object without its `server` part."""
        return status(self.sessions, self.feeder, self.assigner, self.cluster_views, now)

    def check(self) -> None:
        """Asserts the invariants of every core and between them."""
        self.sessions.check()
        self.feeder.check()
        self.assigner.check()
        self.coordinator.check()
        for job_id in self.assigner.claims:
            assert job_id in self.feeder.nodes
