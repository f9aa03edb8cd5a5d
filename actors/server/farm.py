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
from collections.abc import Sequence
from typing import Any

from actors.ledger.port import (
    AdmissionRefused,
    AdmissionRequest,
    AdmissionTaken,
    Answer,
    CommitFailed,
    Committed,
    Forgotten,
    LedgerEvent,
    Query,
    Synced,
)
from actors.ledger.records import (
    Adopted,
    ClaimRecord,
    ForeignChanges,
    Rebuild,
    Snapshot,
)
from actors.server.admissions import Admissions
from actors.server.assigner import Assigner
from actors.server.authorization import Registration
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.shown import ClusterViews
from actors.server.commands import Commands
from actors.server.config import ServerConfig
from actors.server.effects import (
    DropLogs,
    ListRequested,
    Neighbours,
    PagerStarted,
    PeerGone,
    PingDue,
    Present,
    RegistryFileChanged,
    Reset,
    Silent,
    StopRequested,
    Tell,
)
from actors.server.explain import Explainer
from actors.server.feeder import REBUILD, Feeder
from actors.server.gateway import Gateway, Received
from actors.server.handout import Handout
from actors.server.ids import Ids
from actors.server.outgoing import Outgoing
from actors.server.registry import Registry
from actors.server.reports import REPORTS, Reports
from actors.server.roster import Roster
from actors.server.routes import Routes
from actors.server.scoring import Faults, Policy
from actors.server.sessions import Session, SessionTable
from actors.server.settlement import Settlement
from actors.server.status import status
from transport import messages as m
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
    """The cores of dispatch, and what comes in for them.

    After `receive`, `take` or `expire` the shell commits what `handout` has, tells it what became
    of that, and then empties the lists of `out`.
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
        self.out = Outgoing()
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
            faults=Faults(self.out.troubles.append),
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
        self._settlement = Settlement(first_batch)
        self.routes = Routes(
            config, sessions, self._settlement, self.out, assigner=self.assigner,
            feeder=self.feeder, coordinator=self.coordinator, roster=self.roster,
            reports=self.reports,
        )  # fmt: skip
        self.handout = Handout(
            server, sessions, self._settlement, self.out, self.routes, assigner=self.assigner,
            feeder=self.feeder, coordinator=self.coordinator, reports=self.reports,
            admissions=self.admissions,
        )  # fmt: skip
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
        self.routes.route(effects, now)
        attempts = [a for a in snapshot.attempts if a.server not in others_alive]
        self.routes.route(self.coordinator.load(snapshot.clusters, attempts, now), now)
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
                self.routes.route(effects, now)
            self.routes.mark_claims(session.worker)
        self.routes.route(self.coordinator.resume(now), now)
        self.out.pager = [self.reset()]

    def _ask_again(self, now: float) -> None:
        """Ends all sessions: workers come back at once, and send again what was not `Recorded`."""
        for session in list(self.sessions):
            self.out.tell(
                session.peer, m.Reject(code=400, reason="no session: the server restarted")
            )
            self.routes.route(self.registry.close(session, "lost", now), now)
        self.out.pager = [self.reset()]

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
                self.out.tell(item.peer, item.message)
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
                self.handout.committed(event.number, event.results, now)
            case CommitFailed():
                self.handout.commit_failed(event.number, now)
            case Synced():
                for peer, frame in self._settlement.synced(event.number):
                    self.out.frames.append((peer, frame, None))
            case AdmissionTaken():
                self.routes.route(self.admissions.taken(event, now), now)
            case AdmissionRefused():
                self.routes.route(self.admissions.refused(event, now), now)
                self.routes.route(self.reports.admitted(event.requester, now), now)
            case Forgotten() | Answer():
                self._answered(event, now)
            case Neighbours():
                self._look_around(event)
            case PingDue():
                session = self.sessions.by_id.get(event.session)
                if session is not None:
                    session.pinged_at = now
                    self.out.tell(session.peer, m.Ping(nonce=0))
            case Silent():
                session = self.sessions.by_id.get(event.session)
                if session is not None and session.last_seen <= event.last_seen:
                    self.routes.route(self.registry.close(session, "silent", now), now)
            case PeerGone():
                self.peer_gone(event.peer, now)
            case PagerStarted():
                self.out.pager = [self.reset()]
            case RegistryFileChanged():
                self.routes.route(self.registry.set_registrations(event.registrations, now), now)
            case StopRequested():
                self._stop(now)

    def _look_around(self, event: Neighbours) -> None:
        """Other servers: reads what they wrote, and takes over the claims of dead ones."""
        since = self._looked_at - FOREIGN_MARGIN_SECS
        self._looked_at = event.wall_time
        offset = event.wall_offset
        # First, so that the jobs of what is taken over are here.
        self.out.queries.append(Query(FOREIGN, "foreign_changes", (since, offset)))
        if event.dead:
            dead = tuple(sorted(event.dead))
            self.out.queries.append(Query(ADOPTED, "adopt", (dead, offset), writes=True))
        self.out.queries.append(Query(COUNTS, "counts"))

    def _answered(self, answer: Answer | Forgotten, now: float) -> None:
        if isinstance(answer, Forgotten):
            self.out.logs.append(DropLogs(answer.job_ids))
            self.out.queries.append(Query(COUNTS, "counts"))
        elif answer.token.startswith(REBUILD):
            nothing = Rebuild(answer.token.removeprefix(REBUILD))
            found = answer.result if isinstance(answer.result, Rebuild) else nothing
            self.routes.route(self.feeder.rebuilt(found, now), now)
        elif answer.token not in (ADOPTED, FOREIGN, COUNTS):
            self.routes.route(self.commands.answered(answer, now), now)
        elif isinstance(answer.result, ForeignChanges):
            self.routes.route(self.coordinator.foreign(answer.result.clusters, now), now)
            self.routes.route(self.feeder.foreign(answer.result, self.assigner.claims, now), now)
        elif isinstance(answer.result, dict):
            self.feeder.recount(answer.result)
        elif isinstance(answer.result, Adopted):
            known = [c for c in answer.result.claims if c.job_id in self.feeder.nodes]
            fresh = [c for c in known if c.job_id not in self.assigner.claims]
            self._adopt(fresh, now)
            self.routes.route(self.coordinator.adopt(answer.result.attempts, now), now)

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
            self.routes.route(effects, now)
            if finished is not None:
                self.routes.route(self.reports.admitted(finished, now), now)
        self.routes.route(self.registry.expire(now), now)
        self.routes.route(self.feeder.due(now), now)
        self.routes.route(self.coordinator.expire(now), now)
        unanswered, unconfirmed, orphaned = self.assigner.overdue(now)
        for claim in unanswered:
            self.routes.abort_on_worker(claim, "not answered in time")
            self.routes.route(self.reports.unanswered(claim, now), now)
        for claim in unconfirmed:
            self.routes.route(self.reports.unconfirmed(claim, now), now)
        for claim in orphaned:
            self.assigner.release(claim)
            why = f"worker {claim.worker} did not come back"
            self.routes.route(self.reports.lost(claim, now, why=why, blame=True), now)
        if now >= self._next_tick:
            # A late tick is one tick: missed ones merge.
            self._next_tick = now + self.config.tick
            self.assigner.tick(now)
            self.coordinator.tick(now)
            self.routes.route(self.roster.refresh(now), now)
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
            self.routes.route(self.registry.close(session, "lost", now), now)

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
                    self.out.shell_requests.append((peer, message))
                    return
                effects = self.commands.take(peer, message, now)
            case m.Ping() if self.registry.in_handshake(peer):
                effects = [Tell(peer, m.Pong(nonce=message.nonce))]
            case _:
                self.registry.abandon_handshake(peer)
                effects = [Tell(peer, m.Reject(code=400, reason="no session"))]
        self.routes.route(effects, now)

    def _from_worker(self, session: Session, message: m.Message, now: float) -> None:
        match message:
            case m.RequestJob():
                claim = self.assigner.request(session, message.kind, now)
                if claim is not None:
                    self.handout.claim(claim)
                else:
                    self.coordinator.kick()
            case _ if isinstance(message, REPORTS):
                self.routes.route(self.reports.take(session, message, now), now)
            case m.RequestJobChunk():
                self.assigner.score(session, message.scores)
            case m.WorkerMetrics():
                session.metrics = message
                self.assigner.changed(session)
            case m.RequestJobList():
                session.listed = True
                self.out.pager.append(ListRequested(session.id))
            case m.WorkerCapabilities():
                self.routes.route(self.registry.announced(session, message), now)
                self.routes.route(self.roster.announced(session, now), now)
            case m.Ping():
                self.out.tell(session.peer, m.Pong(nonce=message.nonce))
            case m.Pong():
                self.routes.route(self.registry.pong(session, message), now)
            case m.Draining():
                self.routes.route(self.registry.draining(session), now)
            case m.Goodbye():
                self.routes.route(self.registry.close(session, "goodbye", now), now)
            case m.ReauthRequest():
                self.routes.route(self.registry.reauth(session), now)
            case m.AuthResponse():
                self.routes.route(self.registry.auth_response(session.peer, message, now), now)
            case m.InitConnection():
                text = "InitConnection: unexpected within a session"
                self.out.tell(session.peer, m.Error(code=400, message=text))
            case m.ClusterSignal():
                self.routes.route(self.coordinator.signal(session, message), now)
            case _:
                text = f"{type(message).__name__}: not a worker's message"
                self.out.tell(session.peer, m.Error(code=400, message=text))

    def _stop(self, now: float) -> None:
        self.routes.stopping = True
        self.registry.accepting = self.assigner.accepting = self.commands.accepting = False
        self.routes.route(self.coordinator.stop(now), now)
        for session in self.sessions:
            self.out.tell(session.peer, m.Draining())

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
            self.routes.route(self.commands.refused(query), now)

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
