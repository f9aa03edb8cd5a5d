"""The assigner core: who gets which job, and who holds what.

Rules of the file:

- A job is in the pool, or in one claim, or in neither (it waits or has ended); never in two.
- A claim is `claiming` while its row is on its way to the ledger, `unanswered` from the commit
  (only then is `AssignJob` sent), `accepted` from the worker's answer. `_add` and `release`
  alone begin and end one.
- A claim whose session is gone is an orphan: it waits for its worker until `_orphans` says.
- Only a `RequestJob` makes a claim. An unanswered request leaves an idle slot, nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from actors.ledger.records import ClaimRecord
from actors.server.averages import Instance
from actors.server.claims import Claim
from actors.server.model import PoolEntry, WorkerView
from actors.server.pool import Pool
from actors.server.scoring import Policy, decide
from actors.server.sessions import Session
from transport import messages as m

MAX_TRIES = 4
"""A lost race moves on to the next best three times, then the request stays unanswered."""
DECLINE_SECS, MAX_DECLINE_SECS = 1.0, 60.0
MAX_DECLINED_JOBS = 10_000
"""Jobs whose decliners are remembered; beyond it the oldest are forgotten."""


class Assigner:
    """See the rules above."""

    def __init__(
        self,
        policy: Policy,
        new_assignment_id: Callable[[], str],
        *,
        answer_timeout: float = 10.0,
        abort_timeout: float = 300.0,
        reconnect_grace: float = 30.0,
        idle_slot_ttl: float = 25.0,
    ) -> None:
        self.pool = Pool()
        self.policy = policy
        self.claims: dict[str, Claim] = {}
        self.instance = Instance()
        self.accepting = True
        self._new_assignment_id = new_assignment_id
        self._answer_timeout = answer_timeout
        self._abort_timeout = abort_timeout
        self._reconnect_grace = reconnect_grace
        self._idle_slot_ttl = idle_slot_ttl
        self._slots: dict[str, int] = {}
        self._views: dict[str, WorkerView] = {}
        self._held: dict[str, dict[str, Claim]] = {}
        self._open_builds: dict[str, int] = {}
        self._orphans: dict[str, float] = {}
        self._idle: dict[tuple[str, m.Kind], float] = {}
        self._declines: dict[str, dict[str, tuple[float, float]]] = {}
        self._deadlines: list[tuple[float, str, str]] = []

    @property
    def deadline(self) -> float:
        """When `overdue` has something to say; inf when never."""
        first = self._deadlines[0][0] if self._deadlines else math.inf
        return min(first, min(self._orphans.values(), default=math.inf))

    # -- workers ---------------------------------------------------------------------------

    def load(
        self, claims: Iterable[ClaimRecord], kinds: Mapping[str, m.Kind], orphans_until: float
    ) -> None:
        """Takes over the open claims of the ledger. Each waits for its worker's return, and
        its job is not blamed if the worker stays away: the server was."""
        for row in claims:
            claim = Claim(
                row.assignment_id, row.job_id, kinds[row.job_id], row.worker, None,
                row.claimed_at, None, state="accepted", blames_job=False,
            )  # fmt: skip
            self._add(claim)
            self._orphans[row.worker] = orphans_until

    def reattach(self, session: Session, assignments: Collection[str], now: float) -> list[Claim]:
        """A session goes on under a restarted dispatch and holds what it held. Whether an
        `AssignJob` that it did not accept yet was ever sent is not known: it has the usual
        time to be answered. Returns what of the worker's claims is not among them, released."""
        accepted = [
            m.ClaimRef(job_id=c.job_id, assignment_id=c.assignment_id)
            for c in self.held_by(session.worker)
            if c.assignment_id in assignments and c.assignment_id in session.accepted
        ]
        unsure = [
            c
            for c in self.held_by(session.worker)
            if c.assignment_id in assignments and c.assignment_id not in session.accepted
        ]
        for claim in unsure:
            claim.session, claim.state = session.id, "unanswered"
            claim.answer_by = self._remind(claim, now + self._answer_timeout)
        _, released = self.attach(session, accepted, spare=unsure)
        return released

    def attach(
        self, session: Session, running: Sequence[m.ClaimRef], spare: Sequence[Claim] = ()
    ) -> tuple[list[Claim], list[Claim]]:
        """A session begins. Of the worker's claims those that it names as running are resumed,
        the others, less those in `spare`, are released; returns (resumed, released)."""
        view = session.view()
        self._views[session.id] = view
        self._slots[session.id] = self.pool.add_worker(view)
        self._orphans.pop(session.worker, None)
        named = {(ref.job_id, ref.assignment_id) for ref in running}
        resumed, released = [], []
        for claim in list(self._held.get(session.worker, {}).values()):
            if claim.state == "claiming" or claim in spare:
                continue  # it was picked for an earlier session; its commit finds that out
            if (claim.job_id, claim.assignment_id) in named:
                claim.session, claim.state, claim.answer_by = session.id, "accepted", math.inf
                claim.blames_job = True
                session.accepted.add(claim.assignment_id)
                resumed.append(claim)
            else:
                self.release(claim)
                released.append(claim)
        return resumed, released

    def changed(self, session: Session) -> None:
        """Its capabilities, rights, metrics or draining are other than before."""
        view = session.view()
        self._views[session.id] = view
        self.pool.update_worker(self._slots[session.id], view)
        if view.draining:
            self._clear_idle(session.worker)

    def detach(self, session: Session, now: float, *, wait: bool) -> list[Claim]:
        """A session ends. With `wait` its claims wait for the worker for `reconnect_grace`,
        else they are released and returned."""
        self.pool.remove_worker(self._slots.pop(session.id))
        del self._views[session.id]
        self._clear_idle(session.worker)
        claims = [c for c in self._held.get(session.worker, {}).values() if c.state != "claiming"]
        for claim in claims:
            claim.session = None
            if not wait:
                self.release(claim)
        if not wait:
            return claims
        if claims:
            self._orphans[session.worker] = now + self._reconnect_grace
        return []

    def held_by(self, worker: str) -> list[Claim]:
        """The worker's open claims."""
        return list(self._held.get(worker, {}).values())

    def open_builds(self, worker: str) -> int:
        return self._open_builds.get(worker, 0)

    def idle_kinds(self, worker: str, now: float) -> list[m.Kind]:
        """The kinds that an unanswered request of this worker left a fresh idle slot of."""
        kinds: tuple[m.Kind, m.Kind] = ("build", "eval")
        oldest = now - self._idle_slot_ttl
        return [k for k in kinds if self._idle.get((worker, k), -math.inf) >= oldest]

    def score(self, session: Session, scores: Sequence[m.Score]) -> None:
        """What the worker's store lacks of candidates; unknown jobs are ignored."""
        self.pool.score(self._slots[session.id], scores)

    # -- requests --------------------------------------------------------------------------

    def request(self, session: Session, kind: m.Kind, now: float) -> Claim | None:
        """The best job for this worker, out of the pool, to be claimed in the ledger.

        None leaves the request unanswered; if the worker has room for more, the idle slot is
        remembered."""
        view = self._views[session.id]
        can_run = view.can_eval if kind == "eval" else view.can_build
        if not (self.accepting and can_run) or view.draining or self._is_full(session, kind):
            return None
        claim = self._pick(session.worker, session.id, kind, now)
        if claim is None:
            self._idle[session.worker, kind] = now
        return claim

    def won(self, claim: Claim, now: float) -> None:
        """The claim's row is committed; `AssignJob` may go out."""
        assert claim.state == "claiming"
        assert claim.entry is not None
        claim.state = "unanswered"
        claim.answer_by = self._remind(claim, now + self._answer_timeout)
        self._idle.pop((claim.worker, claim.kind), None)
        if claim.kind == "build":
            self.instance.assigned(now - claim.entry.ready_at, claim.reported, now)

    def lost_race(self, claim: Claim, now: float) -> Claim | None:
        """Somebody else holds the job, so it is gone from here; the next best, if any."""
        self.release(claim)
        if claim.tries >= MAX_TRIES or claim.session is None:
            return None
        if claim.session not in self._views or not self.accepting:
            return None
        following = self._pick(claim.worker, claim.session, claim.kind, now)
        if following is not None:
            following.tries = claim.tries + 1
        return following

    def _is_full(self, session: Session, kind: m.Kind) -> bool:
        if kind == "eval":
            return False
        return self.open_builds(session.worker) >= self._views[session.id].max_builds

    def _pick(self, worker: str, session: str, kind: m.Kind, now: float) -> Claim | None:
        exclude = self._declined_by(worker, now) if self._declines else ()
        slot, averages = self._slots[session], self.instance.averages(self.pool, now)
        decision = decide(self.policy, self.pool, slot, kind, now, averages, exclude=exclude)
        if decision is None:
            return None
        reported = self.pool.reported(slot, decision.job_id)
        entry = self.pool.leave(decision.job_id)
        claim = Claim(
            self._new_assignment_id(), decision.job_id, kind, worker, session, now, entry,
            total=decision.total, scores=decision.scores, reported=reported,
        )  # fmt: skip
        self._add(claim)
        return claim

    # -- claims ----------------------------------------------------------------------------

    def find(self, session: Session, job_id: str, assignment_id: str) -> Claim | None:
        """The open claim that this session holds under exactly these ids."""
        claim = self.claims.get(job_id)
        if claim is None or claim.assignment_id != assignment_id:
            return None
        return claim if claim.session == session.id and claim.state != "claiming" else None

    def accepted(self, session: Session, claim: Claim) -> None:
        """The worker took the job; its earlier decliners are forgotten."""
        session.accepted.add(claim.assignment_id)
        claim.state, claim.answer_by = "accepted", math.inf
        self._declines.pop(claim.job_id, None)

    def declined(self, claim: Claim, now: float) -> None:
        """The worker does not take it, or did not answer: the claim is released, and this
        worker is not assigned the job for 1 s, doubling per decline to 60 s."""
        self.release(claim)
        decliners = self._declines.setdefault(claim.job_id, {})
        _, last = decliners.get(claim.worker, (0.0, DECLINE_SECS / 2))
        delay = min(last * 2, MAX_DECLINE_SECS)
        decliners[claim.worker] = (now + delay, delay)
        if len(self._declines) > MAX_DECLINED_JOBS:
            del self._declines[next(iter(self._declines))]

    def abort(self, claim: Claim, reason: str, now: float) -> bool:
        """The job is not wanted any more; False when its worker was told before."""
        if claim.abort_reason is not None:
            return False
        claim.abort_reason = reason
        claim.answer_by = math.inf
        claim.abort_by = self._remind(claim, now + self._abort_timeout)
        return True

    def release(self, claim: Claim) -> None:
        """The claim is over; its slot is free."""
        assert self.claims.pop(claim.job_id) is claim
        held = self._held[claim.worker]
        del held[claim.job_id]
        if not held:
            del self._held[claim.worker]
            self._orphans.pop(claim.worker, None)
        if claim.kind == "build":
            self._open_builds[claim.worker] -= 1
            if not self._open_builds[claim.worker]:
                del self._open_builds[claim.worker]

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        self._declines.pop(job_id, None)

    def overdue(self, now: float) -> tuple[list[Claim], list[Claim], list[Claim]]:
        """What waited too long: (unanswered, aborts unconfirmed, orphans whose worker did not
        come back). The caller declines or releases them."""
        unanswered, unconfirmed, orphaned = [], [], []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, job_id, assignment_id = heapq.heappop(self._deadlines)
            claim = self.claims.get(job_id)
            if claim is None or claim.assignment_id != assignment_id:
                continue
            if claim.abort_by <= now:
                unconfirmed.append(claim)
            elif claim.answer_by <= now:
                unanswered.append(claim)
        for worker, until in list(self._orphans.items()):
            if until <= now:
                del self._orphans[worker]
                orphaned += [c for c in self.held_by(worker) if c.state != "claiming"]
        handled = {id(c) for c in (*unanswered, *unconfirmed)}
        return unanswered, unconfirmed, [c for c in orphaned if id(c) not in handled]

    def enter(self, entry: PoolEntry) -> None:
        """The job can be assigned."""
        assert entry.job_id not in self.claims
        self.pool.enter(entry)

    def _add(self, claim: Claim) -> None:
        assert claim.job_id not in self.claims
        self.claims[claim.job_id] = claim
        self._held.setdefault(claim.worker, {})[claim.job_id] = claim
        if claim.kind == "build":
            self._open_builds[claim.worker] = self.open_builds(claim.worker) + 1

    def _remind(self, claim: Claim, at: float) -> float:
        heapq.heappush(self._deadlines, (at, claim.job_id, claim.assignment_id))
        return at

    def _declined_by(self, worker: str, now: float) -> list[str]:
        nobody = (0.0, 0.0)
        return [j for j, by in self._declines.items() if by.get(worker, nobody)[0] > now]

    def _clear_idle(self, worker: str) -> None:
        self._idle.pop((worker, "build"), None)
        self._idle.pop((worker, "eval"), None)

    def check(self) -> None:
        """Asserts the invariants of this core."""
        self.pool.check()
        held = [c for claims in self._held.values() for c in claims.values()]
        assert len(held) == len(self.claims)
        for claim in held:
            assert self.claims[claim.job_id] is claim
            assert claim.job_id not in self.pool
        for worker, count in self._open_builds.items():
            assert count == sum(c.kind == "build" for c in self.held_by(worker)) > 0
        for worker in self._orphans:
            assert worker in self._held
