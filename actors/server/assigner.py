"""The assigner core: who gets which job, and who holds what.

Rules of the file:

- A job is in the pool, or in one claim, or in neither (it waits or has ended); never in two.
- A claim is `claiming` while its row is on its way to the ledger, `unanswered` from the commit
  (only then is `AssignJob` sent), `accepted` from the worker's answer. `_add` and `release`
  alone begin and end one.
- A claim whose session is gone is an orphan: it waits for its worker until `_orphans` says.
- Memory is promised with a claim and freed with its release; a worker keeps memory free for at
  most one build that it holds back (`_reserved`).
- Only a `RequestJob` makes a claim. An unanswered request leaves an idle slot, nothing else.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from actors.ledger.records import AddMetric, AddPrefetch, ClaimRecord
from actors.server.averages import Instance
from actors.server.block import KIND_CODES
from actors.server.claims import Claim
from actors.server.history import Key, Profile
from actors.server.memory import MARGIN, Load, Reservation, load_of
from actors.server.model import PoolEntry, WorkerView
from actors.server.pool import Pool
from actors.server.scoring import Averages, Decider, Faults, NoWinner, Policy, find_held
from actors.server.scoring.columns import READ_SHARE_MBPS, seconds_per_byte
from actors.server.sessions import Session
from transport import messages as m

MAX_TRIES = 4
"""A lost race moves on to the next best three times, then the request stays unanswered."""
DECLINE_SECS, MAX_DECLINE_SECS = 1.0, 60.0
KEPT_REJECTED = 3
"""Of each decision, how many of the next best are kept in the ledger."""
SURVIVOR_SECS = 600.0
"""After which a cluster member that was told to stop is forgotten."""
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
        faults: Faults | None = None,
    ) -> None:
        self.pool = Pool()
        self.policy = policy
        self._holds_memory = policy.holds_memory
        self._decider = Decider(policy, self.pool, faults or Faults())
        self._reserved: dict[str, Reservation] = {}
        """By worker."""
        self.claims: dict[str, Claim] = {}
        self.kept: set[tuple[str, m.Kind]] = set()
        """Seats reserved for a cluster: they get no single job of the kind."""
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
        self._unanswered: dict[tuple[str, m.Kind], tuple[float, NoWinner]] = {}
        """By worker that is here: its last decision, and when, if nothing won."""
        self._declines: dict[str, dict[str, tuple[float, float]]] = {}
        self._deadlines: list[tuple[float, str, str]] = []

    @property
    def deadline(self) -> float:
        """When `overdue` has something to say; inf when never."""
        first = self._deadlines[0][0] if self._deadlines else math.inf
        return min(first, min(self._orphans.values(), default=math.inf))

    # -- workers ---------------------------------------------------------------------------

    def load(
        self,
        claims: Iterable[ClaimRecord],
        kinds: Mapping[str, m.Kind],
        orphans_until: float,
        origins: Mapping[str, tuple[str, Key]] | None = None,
    ) -> None:
        """Takes over the open claims of the ledger. Each waits for its worker's return, and
        its job is not blamed if the worker stays away: the server was. `origins` gives the
        project and the history's key of each job."""
        for row in claims:
            project, key = (origins or {}).get(row.job_id, ("", ("", "")))
            profile = self.pool.history.of_build(key, row.claimed_at)
            claim = Claim(
                row.assignment_id, row.job_id, kinds[row.job_id], row.worker, None,
                row.claimed_at, None, state="accepted", blames_job=False,
                project=project, predicted_mb=_peak(profile), attempt=row.attempt,
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
        self._mark_fetcher(view)
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
        self._mark_fetcher(view)
        if view.draining:
            self._clear_idle(session.worker)
            self._reserved.pop(session.worker, None)
        elif self._is_full(session, "build"):
            self._idle.pop((session.worker, "build"), None)
        if session.metrics is not None and session.metrics.build_peak_ram_mb:
            for job_id, peak in session.metrics.build_peak_ram_mb.items():
                claim = self.claims.get(job_id)
                if claim is not None and claim.worker == session.worker:
                    claim.peak_ram_mb = peak

    def detach(self, session: Session, now: float, *, wait: bool) -> list[Claim]:
        """A session ends. With `wait` its claims wait for the worker for `reconnect_grace`,
        else they are released and returned."""
        slot = self._slots.pop(session.id)
        self.pool.remove_worker(slot)
        self._decider.forget(slot)
        del self._views[session.id]
        self._clear_idle(session.worker)
        for kind in KIND_CODES:
            self._unanswered.pop((session.worker, kind), None)
        self._reserved.pop(session.worker, None)
        self.instance.fetch_workers.pop(session.worker, None)
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
        claim = None
        if (session.worker, kind) not in self.kept:
            claim = self._pick(session.worker, session.id, kind, now)
        if claim is None:
            self._idle[session.worker, kind] = now
        return claim

    def is_free(self, session: Session, kind: m.Kind, now: float) -> bool:
        """Whether a cluster member of this kind may sit on the worker now: it has a fresh idle
        slot and does not drain."""
        view = self._views.get(session.id)
        if view is None or view.draining or self._is_full(session, kind):
            return False
        return kind in self.idle_kinds(session.worker, now)

    def seat(self, job_id: str, session: Session, attempt: str, now: float) -> Claim:
        """Takes a cluster member out of the pool for a free worker, to be claimed in the ledger
        with the other members."""
        reported = self.pool.reported(self._slots[session.id], job_id)
        entry = self.pool.leave(job_id)
        assert entry is not None
        claim = self._claim_of(entry, session.worker, session.id, now, reported)
        claim.attempt = attempt
        self._add(claim)
        return claim

    def won(self, claim: Claim, now: float) -> None:
        """The claim's row is committed; `AssignJob` may go out."""
        assert claim.state == "claiming"
        assert claim.entry is not None
        claim.state = "unanswered"
        if claim.attempt is None:  # of a cluster member the prepare timeout rules
            claim.answer_by = self._remind(claim, now + self._answer_timeout)
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
        if following is None:
            self._idle[claim.worker, claim.kind] = now
        else:
            following.tries = claim.tries + 1
        return following

    def _is_full(self, session: Session, kind: m.Kind) -> bool:
        if kind == "eval":
            return False
        return self.open_builds(session.worker) >= self._views[session.id].max_builds

    def _pick(self, worker: str, session: str, kind: m.Kind, now: float) -> Claim | None:
        exclude = self._declined_by(worker, now) if self._declines else ()
        slot, averages = self._slots[session], self.instance.averages(self.pool, now)
        load = self._load(worker, slot, averages, now)
        decision = self._decider.decide(
            slot, kind, now, averages, exclude, load=load, rejected=KEPT_REJECTED
        )
        if isinstance(decision, NoWinner):
            self._unanswered[worker, kind] = now, decision
            return None
        self._unanswered.pop((worker, kind), None)
        reported = self.pool.reported(slot, decision.job_id)
        entry = self.pool.leave(decision.job_id)
        assert entry is not None
        claim = self._claim_of(entry, worker, session, now, reported)
        claim.total, claim.scores = decision.total, decision.scores
        claim.rejected = decision.rejected
        self._add(claim)
        return claim

    def _claim_of(
        self, entry: PoolEntry, worker: str, session: str, now: float, reported: m.Score | None
    ) -> Claim:
        kind = entry.cls.kind
        return Claim(
            self._new_assignment_id(), entry.job_id, kind, worker, session, now, entry,
            reported=reported, project=entry.cls.project,
            predicted_mb=_peak(self.pool.profile_of(entry)) if kind == "build" else 0.0,
        )  # fmt: skip

    def load_on(self, worker: str, now: float) -> Load:
        """What a worker that is here is busy with, and what it keeps memory free for."""
        session = next(s for s, view in self._views.items() if view.worker == worker)
        averages = self.instance.averages(self.pool, now)
        return self._load(worker, self._slots[session], averages, now)

    def _load(self, worker: str, slot: int, averages: Averages, now: float) -> Load:
        reserved = self._still_reserved(worker, slot)
        load = load_of(self._held.get(worker, {}).values(), reserved)
        if reserved is None and self._holds_memory and self._may_hold(load, self.pool.worker(slot)):
            reserved = find_held(self.pool, slot, now, averages, load)
            if reserved is not None:
                self._reserved[worker] = reserved
                load = replace(load, reserved=reserved)
        return load

    def _still_reserved(self, worker: str, slot: int) -> Reservation | None:
        """The worker's held build, as much as is expected of it by now; none when it is not
        pending any more, or will never run there."""
        reserved = self._reserved.get(worker)
        if reserved is None:
            return None
        entry = self.pool.get(reserved.job_id)
        if entry is not None and self.pool.is_candidate(slot, entry.job_id):
            peak = _peak(self.pool.profile_of(entry))
            total = self.pool.worker(slot).ram_total_mb
            if peak and (total is None or peak * MARGIN <= total):
                return replace(reserved, peak_mb=peak)
        del self._reserved[worker]
        return None

    def _may_hold(self, load: Load, view: WorkerView) -> bool:
        """Whether promises may keep any pending build from running."""
        if not load.promised_mb:
            return False
        needed = self.pool.profiles["build"].largest_peak_mb * MARGIN
        return needed > load.room_mb(view)

    def view_of(self, session: Session) -> WorkerView:
        """The session as it was last looked at."""
        return self._views[session.id]

    def slot_of(self, session: Session) -> int:
        """The session's slot in the pool."""
        return self._slots[session.id]

    def averages(self, now: float) -> Averages:
        """What rules compare with at `now`."""
        return self.instance.averages(self.pool, now)

    def unanswered(self, worker: str, kind: m.Kind) -> tuple[float, NoWinner] | None:
        """When the worker's last request was decided, if nothing was found for it."""
        return self._unanswered.get((worker, kind))

    def declines_until(self, worker: str, job_id: str, now: float) -> float | None:
        """When a worker that declined a job may get it again; None when it may now."""
        until, _ = self._declines.get(job_id, {}).get(worker, (0.0, 0.0))
        return until if until > now else None

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

    def progressed(self, claim: Claim, progress: m.BuildProgress | m.EvalProgress) -> None:
        """How far its worker is; prefetches and uploads under way are counted."""
        claim.progress = progress
        self._set_phase(claim, progress.phase if isinstance(progress, m.BuildProgress) else "")

    def finished(
        self, claim: Claim, session: Session, spans: Sequence[m.Span]
    ) -> list[AddPrefetch]:
        """A build is done: what its prefetch took beyond the bytes counts for the time that a
        path takes."""
        view = self._views.get(session.id)
        if view is None or claim.reported is None or not claim.reported.missing_count:
            return []
        fetched = []
        for span in spans:
            if span.phase == "prefetch":
                fleet = self.pool.download_mbps.mean
                per_byte = seconds_per_byte(view.download_speed_mbps, fleet, READ_SHARE_MBPS, 0)
                size = claim.reported.missing_nar_size if span.bytes is None else span.bytes
                secs = (span.end_ms - span.start_ms) / 1000 - size * per_byte
                fetched.append(AddPrefetch(claim.reported.missing_count, max(0.0, secs)))
                self.instance.paths.add(fetched[-1])
        return fetched

    def learn(self, metric: AddMetric) -> None:
        """A build or evaluation that ran for real: part of the history."""
        self.pool.history.add(metric)

    def tick(self, now: float) -> None:
        """The 5 s timer went off."""
        self.pool.tick(now)

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
        timeout = self._abort_timeout if claim.attempt is None else SURVIVOR_SECS
        claim.abort_by = self._remind(claim, now + timeout)
        return True

    def release(self, claim: Claim) -> None:
        """The claim is over; its slot is free."""
        assert self.claims.pop(claim.job_id) is claim
        held = self._held[claim.worker]
        del held[claim.job_id]
        if not held:
            del self._held[claim.worker]
            self._orphans.pop(claim.worker, None)
        self._set_phase(claim, "")
        self._count_project(claim.project, -1)
        if claim.worker in self.instance.fetch_workers:
            self.instance.fetch_workers[claim.worker] = claim.worker in self._held
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
        self._idle.pop((claim.worker, claim.kind), None)
        self._count_project(claim.project, 1)
        if claim.worker in self.instance.fetch_workers:
            self.instance.fetch_workers[claim.worker] = True
        if claim.kind == "build":
            self._open_builds[claim.worker] = self.open_builds(claim.worker) + 1

    def _count_project(self, project: str, change: int) -> None:
        counts = self.instance.project_claims
        counts[project] = counts.get(project, 0) + change
        if not counts[project]:
            del counts[project]

    def _set_phase(self, claim: Claim, phase: str) -> None:
        counts = self.instance.phases
        if claim.phase in counts:
            counts[claim.phase] -= 1
        claim.phase = phase
        if phase in counts:
            counts[phase] += 1

    def _mark_fetcher(self, view: WorkerView) -> None:
        if view.can_fetch:
            self.instance.fetch_workers[view.worker] = view.worker in self._held
        else:
            self.instance.fetch_workers.pop(view.worker, None)

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
        for phase, count in self.instance.phases.items():
            assert count == sum(c.phase == phase for c in held)
        assert sum(self.instance.project_claims.values()) == len(held)
        here = {view.worker for view in self._views.values()}
        assert self._reserved.keys() <= here
        assert {worker for worker, _ in self._unanswered} <= here
        for worker, is_busy in self.instance.fetch_workers.items():
            assert worker in here
            assert is_busy == (worker in self._held)


def _peak(profile: Profile | None) -> float:
    return 0.0 if profile is None or math.isnan(profile.peak_mb) else profile.peak_mb
