"""The coordinator core: clusters that have not ended, and their attempts.

Rules of the file:

- A cluster has at most one open attempt. `_take` alone opens one; `_release` (before the start)
  and `_conclude` (after it) alone close one. The first close decides: what comes later finds no
  open attempt.
- An attempt is `opening` until its rows are committed, `preparing` while seats are held,
  `starting` while its start is on its way to the ledger, then `started`. `AssignJob` comes only
  out of `opened`, `StartCluster` only out of `started`.
- Members wait in the pool, as candidates that no single request gets. `reports` closes their
  claims and tells `ended`; what becomes of their jobs is decided here alone.
- A *survivor* was told to stop when its attempt was closed: its claim stays open until its worker
  reports, and then `_fate` says what becomes of the job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from actors.ledger.records import (
    AttemptOutcome,
    AttemptRecord,
    CloseAttempt,
    CloseClaim,
    ClusterRecord,
    OpenAttempt,
    OpenClaim,
    Outcome,
    SetCluster,
    StartAttempt,
    Status,
)
from actors.server.assigner import Assigner
from actors.server.claims import Claim, breakdown
from actors.server.clusters.book import Book
from actors.server.clusters.model import (
    Attempt,
    Cluster,
    Doom,
    Doomed,
    Opening,
    Result,
    Seat,
    Starting,
    result_of,
)
from actors.server.clusters.planner import Plan, Planner
from actors.server.clusters.signals import relayed
from actors.server.clusters.verdict import OUTCOMES, STATUSES, Verdict, decide
from actors.server.config import ServerConfig
from actors.server.effects import Await, Effect, Enter, Leave, Push, Record, Released, Tell
from actors.server.feeder import Feeder
from actors.server.sessions import Session, SessionTable
from transport import messages as m
from transport.codec import encode_value

HOLD_MARGIN_SECS = 10.0
"""By which a worker holds a seat longer than the server waits for all to accept."""
MAX_LATE = 1_000
"""Assignments of attempts closed before their start that are remembered, for late answers."""


class Coordinator:
    """See the rules above."""

    def __init__(
        self,
        config: ServerConfig,
        server: str,
        new_id: Callable[[], str],
        assigner: Assigner,
        feeder: Feeder,
        sessions: SessionTable,
    ) -> None:
        self.book = Book(config.cluster_retry_delay)
        self.clusters = self.book.clusters
        self.attempts: dict[str, Attempt] = {}
        """The open ones."""
        self.accepting = True
        self.planner = Planner(
            assigner,
            sessions,
            reserve_after=config.cluster_reserve_after,
            reserve_timeout=config.cluster_reserve_timeout,
        )
        self._config = config
        self._server = server
        self._new_id = new_id
        self._assigner = assigner
        self._feeder = feeder
        self._sessions = sessions
        self._preparing: dict[str, Attempt] = {}
        self._late: dict[str, str] = {}
        self._is_wanted = False

    @property
    def deadline(self) -> float:
        """When `expire` has something to do; inf when never."""
        return min((a.prepare_by for a in self._preparing.values()), default=math.inf)

    # -- clusters come and go --------------------------------------------------------------

    def load(
        self, clusters: Sequence[ClusterRecord], attempts: Sequence[AttemptRecord], now: float
    ) -> list[Effect]:
        """Takes over what the ledger holds, after the assigner loaded its claims. Attempts that
        did not start are closed: whoever held their seats has dropped them, or is told to."""
        self.added(clusters)
        effects = self.adopt(attempts, now)
        for claim in self._assigner.claims.values():
            if claim.attempt is not None and claim.attempt not in self.attempts:
                self._assigner.abort(claim, "its attempt was closed", now)
        return effects

    def adopt(self, attempts: Sequence[AttemptRecord], now: float) -> list[Effect]:
        """Takes over open attempts of a server that is gone; their open claims are ours now."""
        effects: list[Effect] = []
        for record in attempts:
            cluster = self.clusters.get(record.cluster_id)
            if cluster is None or cluster.attempt is not None:
                continue
            roles = {member.job_id: member for member in cluster.members}
            seats = {
                job_id: Seat(roles[job_id], claim, has_accepted=True, is_started=True)
                for job_id in roles
                if (claim := self._assigner.claims.get(job_id)) is not None
                and claim.attempt == record.attempt_id
            }
            attempt = Attempt(record.attempt_id, cluster, seats, record.created_at)
            attempt.started_at = record.started_at
            attempt.results = {r.job_id: result_of(r) for r in record.reported}
            cluster.attempt = self.attempts[attempt.attempt_id] = attempt
            if record.started_at is not None:
                attempt.phase, cluster.status = "started", "Running"
                effects += self._judge(attempt, now)
                continue
            attempt.phase = "preparing"
            for seat in seats.values():
                session = self._sessions.by_worker.get(seat.claim.worker)
                seat.claim.session = session.id if session is not None else None
            effects += self._release(attempt, "PrepareFailed", "its server ended", now)
        return effects

    def resume(self, now: float) -> list[Effect]:
        """After the sessions of an earlier dispatch were attached: what it had begun goes on.
        Whether its `StartCluster`s were sent is not known; a second one changes nothing."""
        effects: list[Effect] = []
        for attempt in list(self.attempts.values()):
            effects += self._judge(attempt, now) or self._start_all(attempt)
        return effects

    def added(self, clusters: Iterable[ClusterRecord]) -> None:
        """Clusters were admitted; their members' jobs follow."""
        for record in clusters:
            self.book.add(record)
        self.kick()

    def foreign(self, clusters: Iterable[ClusterRecord], now: float) -> list[Effect]:
        """Follows what another server wrote of clusters; that of their jobs follows."""
        effects: list[Effect] = []
        for record in clusters:
            cluster = self.clusters.get(record.cluster_id)
            if cluster is None:
                if record.ended_at is None:
                    self.added([record])
            elif record.ended_at is not None:
                if cluster.attempt is not None:
                    effects += self.doom(cluster.cluster_id, "Aborted", "cancelled", now)
                else:
                    self._drop(cluster, record.status)
            elif cluster.attempt is None:
                self.book.follow(cluster, record)
        return effects

    def _drop(self, cluster: Cluster, status: str, attempt: str | None = None) -> None:
        self.book.drop(cluster, status, attempt)
        if self.planner.is_reserved_for(cluster):
            self.planner.drop()

    # -- placement -------------------------------------------------------------------------

    def kick(self) -> None:
        """A pass is due: a member arrived, a request stayed unanswered, or a worker changed."""
        self._is_wanted = bool(self.clusters)

    def tick(self, now: float) -> None:
        """The 5 s timer went off: reservations age, and a pass is due."""
        if self.clusters:
            self.planner.age(self.clusters.values(), now)
            self.kick()

    def place(self, now: float) -> list[Effect]:
        """One placement pass, if one is due."""
        if not (self._is_wanted and self.accepting):
            return []
        self._is_wanted = False
        effects = self.expire(now)
        for plan in self.planner.plans(self.clusters.values(), now):
            effects += self.take(plan, now)
        self.planner.review(now, self.clusters.values())
        return effects

    def take(self, plan: Plan, now: float) -> list[Effect]:
        """Takes all seats of a plan in one step, or none if one is not free any more."""
        cluster = plan.cluster
        if not self.planner.is_waiting(cluster, now):
            return []
        kinds = [self._kind_of(job_id) for job_id, _ in plan.seats]
        if not all(
            self._assigner.is_free(session, kind, now)
            for (_, session), kind in zip(plan.seats, kinds, strict=True)
        ):
            return []
        attempt = Attempt(self._new_id(), cluster, {}, now)
        effects: list[Effect] = []
        claims = []
        for member, (job_id, session) in zip(cluster.members, plan.seats, strict=True):
            claim = self._assigner.seat(job_id, session, attempt.attempt_id, now)
            attempt.seats[job_id] = Seat(member, claim)
            self._feeder.claimed(job_id)
            effects.append(Leave(job_id))
            claims.append(OpenClaim(claim.record(self._server), encode_value(breakdown(claim))))
        cluster.attempt = self.attempts[attempt.attempt_id] = attempt
        rows = OpenAttempt(attempt.attempt_id, cluster.cluster_id, self._server, now, tuple(claims))
        return [*effects, Await(rows, Opening(attempt))]

    def _kind_of(self, job_id: str) -> m.Kind:
        entry = self._assigner.pool.get(job_id)
        assert entry is not None
        return entry.cls.kind

    # -- prepare and start -----------------------------------------------------------------

    def opened(self, attempt: Attempt, now: float) -> list[Effect]:
        """The attempt's rows are committed: the seats are told, unless one has gone meanwhile."""
        cluster = attempt.cluster
        cluster.attempts += 1
        for seat in attempt.seats.values():
            self._assigner.won(seat.claim, now)
        gone = [s.claim.worker for s in attempt.seats.values() if not self._may_sit(s.claim)]
        if cluster.doom is not None or gone or not self.accepting:
            why = f"worker {gone[0]} went before it was told" if gone else "the server is stopping"
            return self._release(attempt, "PrepareFailed", why, now)
        attempt.phase = "preparing"
        attempt.prepare_by = now + self._config.cluster_prepare_timeout
        self._preparing[attempt.attempt_id] = attempt
        hold_secs = self._config.cluster_prepare_timeout + HOLD_MARGIN_SECS
        return [
            Push(
                seat.claim,
                m.ClusterSeat(attempt.attempt_id, seat.member.role, seat.member.index, hold_secs),
            )
            for seat in attempt.seats.values()
        ]

    def not_opened(self, attempt: Attempt, now: float) -> list[Effect]:
        """The rows did not go in, all or none: the members are candidates as before."""
        cluster = self._forget(attempt)
        effects: list[Effect] = []
        for job_id, seat in attempt.seats.items():
            self._assigner.release(seat.claim)
            self._feeder.unclaimed(job_id)
            assert seat.claim.entry is not None
            effects.append(Enter(seat.claim.entry))
        # Another server may have it; what that wrote is read at the next tick.
        cluster.not_before = max(cluster.not_before, now + self._config.tick)
        return [*effects, *self._end_if_doomed(cluster, now)]

    def accepted(self, claim: Claim, now: float) -> list[Effect]:
        """A member's worker holds its seat; with the last of them the attempt starts."""
        attempt = self._preparing.get(claim.attempt or "")
        if attempt is None:
            return []
        attempt.seats[claim.job_id].has_accepted = True
        if not all(seat.has_accepted for seat in attempt.seats.values()):
            return []
        del self._preparing[attempt.attempt_id]
        attempt.phase = "starting"
        start = StartAttempt(attempt.attempt_id, attempt.cluster.cluster_id, now)
        return [Await(start, Starting(attempt))]

    def started(self, attempt: Attempt, now: float, *, won: bool) -> list[Effect]:
        """The start is committed. What was reported meanwhile is decided first; a member that
        cannot be told counts as lost."""
        if not won:
            return self._release(attempt, "PrepareFailed", "another server closed it", now)
        attempt.phase, attempt.started_at = "started", now
        attempt.cluster.status = "Running"
        effects: list[Effect] = []
        early, attempt.results = attempt.results, {}
        for job_id, seat in attempt.seats.items():
            claim = seat.claim
            if job_id not in early and claim.session not in self._sessions.by_id:
                why = f"worker {claim.worker} went before the start"
                effects += self._close(claim, "Abandoned", why, now)
                early[job_id] = Result("Failed", why)
        for job_id, result in early.items():
            attempt.results[job_id] = result
            if concluded := self._judge(attempt, now):
                return [*effects, *concluded]
        return [*effects, *(self._judge(attempt, now) or self._start_all(attempt))]

    def _start_all(self, attempt: Attempt) -> list[Effect]:
        """`StartCluster` to every member that has not ended."""
        roster = [
            m.RosterEntry(
                role=seat.member.role,
                index=seat.member.index,
                worker_id=seat.claim.worker,
                primary=seat.member.primary,
                endpoint=self._endpoint(seat.claim.worker),
            )
            for seat in attempt.seats.values()
        ]
        effects: list[Effect] = []
        for job_id, seat in attempt.seats.items():
            if job_id not in attempt.results:
                seat.is_started = True
                effects += self._tell(seat.claim, m.StartCluster(attempt.attempt_id, roster))
        return effects

    def _endpoint(self, worker: str) -> str | None:
        session = self._sessions.by_worker.get(worker)
        return session.announced.endpoint if session and session.announced else None

    def expire(self, now: float) -> list[Effect]:
        """Closes the attempts that not all accepted in time."""
        effects: list[Effect] = []
        for attempt in [a for a in self._preparing.values() if a.prepare_by <= now]:
            silent = [s.claim.worker for s in attempt.seats.values() if not s.has_accepted]
            why = f"no answer in time from {', '.join(silent)}"
            effects += self._release(attempt, "PrepareFailed", why, now)
        return effects

    def left(self, session: Session, why: str, now: float) -> list[Effect]:
        """A worker drains or its session ends: what it holds is not started any more. Members
        that run go on until their claims end."""
        self.planner.lose(session.worker)
        effects: list[Effect] = []
        for attempt in list(self._preparing.values()):
            if any(seat.claim.session == session.id for seat in attempt.seats.values()):
                why_not = f"worker {session.worker} {why}"
                effects += self._release(attempt, "PrepareFailed", why_not, now)
        return effects

    def stop(self, now: float) -> list[Effect]:
        """The server is stopping: nothing is placed, and what is held is given back."""
        self.accepting = False
        effects: list[Effect] = []
        for attempt in list(self._preparing.values()):
            effects += self._release(attempt, "PrepareFailed", "the server is stopping", now)
        return effects

    def late(self, session: Session, assignment_id: str) -> list[Effect]:
        """A worker accepted a seat of an attempt that was closed: it drops the seat."""
        attempt_id = self._late.get(assignment_id)
        if attempt_id is None:
            return []
        return [Tell(session.peer, m.AbortCluster(attempt_id, "the attempt is closed"))]

    def _release(
        self, attempt: Attempt, outcome: AttemptOutcome, why: str, now: float
    ) -> list[Effect]:
        """Closes an attempt that did not start: its members wait again, `retry_delay` at least."""
        cluster = self._forget(attempt)
        if cluster.doom is not None:
            outcome, why = _outcome_of(cluster.doom), cluster.doom.reason
        cluster.last_failure = why
        cluster.not_before = now + self._config.cluster_retry_delay
        effects: list[Effect] = [Record(CloseAttempt(attempt.attempt_id, now, outcome))]
        for seat in attempt.seats.values():
            claim = seat.claim
            if attempt.phase != "opening":
                effects += self._tell(claim, m.AbortCluster(attempt.attempt_id, why))
                self._remember(claim)
            if self._assigner.claims.get(claim.job_id) is claim:
                effects += self._close(claim, "Aborted", why, now)
        return [*effects, *self._back(attempt.seats, why, now), *self._end_if_doomed(cluster, now)]

    def _back(self, jobs: Iterable[str], why: str, now: float) -> list[Effect]:
        """These members wait again."""
        effects: list[Effect] = []
        for job_id in jobs:
            if job_id in self._feeder.nodes:
                effects += self._feeder.returned(job_id, now, lost=False, why=why)
        return effects

    def _remember(self, claim: Claim) -> None:
        assert claim.attempt is not None
        self._late[claim.assignment_id] = claim.attempt
        if len(self._late) > MAX_LATE:
            del self._late[next(iter(self._late))]

    # -- verdict ---------------------------------------------------------------------------

    def ended(self, claim: Claim, result: Result, now: float) -> list[Effect]:
        """A member's claim is closed: it reported, declined, or is lost."""
        attempt = self.attempts.get(claim.attempt or "")
        if attempt is None:
            return self._fate(claim, now)
        if attempt.phase in ("opening", "preparing"):
            why = result.error or f"worker {claim.worker} gave up its seat"
            return self._release(attempt, "PrepareFailed", why, now)
        attempt.results[claim.job_id] = result
        return self._judge(attempt, now) if attempt.phase == "started" else []

    def _judge(self, attempt: Attempt, now: float) -> list[Effect]:
        """Concludes a started attempt if what was reported decides it."""
        can_retry = all(self._feeder.can_start(mb.job_id) for mb in attempt.cluster.members)
        verdict = decide(attempt, can_retry=can_retry)
        return [] if verdict is None else self._conclude(attempt, verdict, now)

    def _conclude(self, attempt: Attempt, verdict: Verdict, now: float) -> list[Effect]:
        """Closes a started attempt: one verdict for all members."""
        cluster = self._forget(attempt)
        effects: list[Effect] = [
            Record(CloseAttempt(attempt.attempt_id, now, OUTCOMES[verdict.kind]))
        ]
        if verdict.kind == "Retry":
            cluster.retry_budget -= 1
            cluster.status, cluster.last_failure = "Queued", verdict.reason
            cluster.not_before = now + self._config.cluster_retry_delay
        else:
            self._drop(cluster, STATUSES[verdict.kind], attempt.attempt_id)
        status = STATUSES[verdict.kind]
        effects.append(Record(SetCluster(cluster.cluster_id, status, now, cluster.retry_budget)))
        why = f"cluster {cluster.cluster_id}: {verdict.reason}"
        for job_id, seat in attempt.seats.items():
            if job_id in attempt.results:
                continue
            effects += self._tell(seat.claim, m.AbortCluster(attempt.attempt_id, why))
            if seat.is_started:
                self._assigner.abort(seat.claim, why, now)
            else:  # held: its worker drops it without a report
                effects += self._close(seat.claim, "Aborted", why, now)
                effects += self._fate(seat.claim, now)
        if verdict.kind == "Retry":
            effects += self._back(attempt.results, why, now)
        else:
            results = [(job_id, r.status, r.error) for job_id, r in attempt.results.items()]
            effects += self._feeder.settled(results, now)
        return effects

    def _fate(self, claim: Claim, now: float) -> list[Effect]:
        """A survivor's claim is over: its job waits again with its cluster, or ends with it."""
        if claim.job_id not in self._feeder.nodes:
            return []
        why = claim.abort_reason or "its cluster's attempt was closed"
        if self.book.of_job(claim.job_id) is not None:
            return self._feeder.returned(claim.job_id, now, lost=False, why=why)
        return self._feeder.settled([(claim.job_id, "Aborted", why)], now)

    def doom(self, cluster_id: str, status: Doomed, reason: str, now: float) -> list[Effect]:
        """The cluster is to end: cancelled (`Aborted`), or a member can never start
        (`Failed`). The members that have not reported end `Aborted`."""
        cluster = self.clusters.get(cluster_id)
        if cluster is None or cluster.doom is not None:
            return []
        cluster.doom = Doom(status, reason)
        attempt = cluster.attempt
        if attempt is None:
            return self._end_if_doomed(cluster, now)
        match attempt.phase:
            case "preparing":
                return self._release(attempt, _outcome_of(cluster.doom), reason, now)
            case "started":
                return self._judge(attempt, now)
            case _:  # as soon as the ledger has what is on its way
                return []

    def member_ended(self, job_id: str, error: str | None, now: float) -> list[Effect]:
        """A job has ended; if a cluster waits for it as a member, that can never start."""
        cluster = self.book.of_job(job_id)
        if cluster is None:
            return []
        member = next(mb for mb in cluster.members if mb.job_id == job_id)
        why = f"member {member.role}[{member.index}] can never start: {error or 'it has ended'}"
        return self.doom(cluster.cluster_id, "Failed", why, now)

    def _end_if_doomed(self, cluster: Cluster, now: float) -> list[Effect]:
        """Ends a cluster without an open attempt; survivors of earlier ones end when they
        report, what another server runs is for that to end."""
        doom = cluster.doom
        if doom is None:
            return []
        self._drop(cluster, doom.status)
        ended = SetCluster(cluster.cluster_id, doom.status, now, cluster.retry_budget)
        nodes = self._feeder.nodes
        waiting: list[tuple[str, Status, str | None]] = [
            (member.job_id, "Aborted", f"cluster {cluster.cluster_id}: {doom.reason}")
            for member in cluster.members
            if member.job_id in nodes and nodes[member.job_id].status in ("Created", "Queued")
        ]
        return [Record(ended), *self._feeder.settled(waiting, now)]

    # -- signals ---------------------------------------------------------------------------

    def signal(self, session: Session, signal: m.ClusterSignal) -> list[Effect]:
        """A member speaks to others of its attempt."""
        attempt = self.attempts.get(signal.attempt)
        effects: list[Effect] = []
        for claim, heard in relayed(attempt, session.id, signal):
            effects += self._tell(claim, heard)
        return effects

    # -- small steps -----------------------------------------------------------------------

    def _forget(self, attempt: Attempt) -> Cluster:
        del self.attempts[attempt.attempt_id]
        self._preparing.pop(attempt.attempt_id, None)
        attempt.cluster.attempt = None
        return attempt.cluster

    def _tell(self, claim: Claim, message: m.Message) -> list[Effect]:
        session = self._sessions.by_id.get(claim.session or "")
        return [] if session is None else [Tell(session.peer, message)]

    def _close(self, claim: Claim, outcome: Outcome, why: str, now: float) -> list[Effect]:
        self._assigner.release(claim)
        closed = CloseClaim(claim.job_id, claim.assignment_id, now, outcome, why)
        return [Record(closed), Released(claim.worker)]

    def _may_sit(self, claim: Claim) -> bool:
        session = self._sessions.by_id.get(claim.session or "")
        if session is None or session.view().draining:
            return False
        return session.projects is None or claim.project in session.projects

    def check(self) -> None:
        """Asserts the invariants of this core."""
        self.book.check()
        for cluster in self.clusters.values():
            if cluster.attempt is not None:
                assert self.attempts[cluster.attempt.attempt_id] is cluster.attempt
        for attempt in self.attempts.values():
            assert attempt.cluster.attempt is attempt
            assert (attempt.attempt_id in self._preparing) == (attempt.phase == "preparing")
            for job_id, seat in attempt.seats.items():
                is_open = self._assigner.claims.get(job_id) is seat.claim
                assert is_open == (job_id not in attempt.results), job_id
            if attempt.phase != "started":
                workers = [seat.claim.worker for seat in attempt.seats.values()]
                assert len(set(workers)) == len(workers) == len(attempt.cluster.members)
        reservation = self.planner.reservation
        assert self._assigner.kept == (set() if reservation is None else reservation.kept)


def _outcome_of(doom: Doom) -> AttemptOutcome:
    """Of an attempt that did not start."""
    return "Aborted" if doom.status == "Aborted" else "PrepareFailed"
