"""The invariants I1-I9 (I7 in `clusters`) and the order of promises, checked after every step.

Watches from outside: what is written, what is sent, what is offered. It believes no core.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from actors.ledger.port import Batch
from actors.ledger.records import (
    TERMINAL,
    Admission,
    Admitted,
    ClaimRecord,
    CloseClaim,
    OpenAttempt,
    OpenClaim,
    Rebuild,
    SetJob,
    Write,
)
from actors.ledger.sqlite import SqliteLedger
from tests.sim.clusters import ClusterWatch
from transport import messages as m
from transport.codec import Decoder

STORY = 40
OFFERS_EVERY = 5
"""Turns between two looks at whether everybody was offered everything."""


Undo = dict[str, tuple[str | None, ClaimRecord | None, int]]
"""Status, open claim and completions of the jobs that a transaction touched, before it."""


class Violation(AssertionError):
    """An invariant does not hold; the text has the stories of the jobs involved."""


class Watch:
    """One farm's truth, across all lives of its server."""

    def __init__(self, clock: Any) -> None:
        self.clock = clock
        self.stories: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=STORY))
        self.trace: list[str] = []
        self.open: dict[str, ClaimRecord] = {}
        self.status: dict[str, str] = {}
        self.closed_in: dict[str, int] = {}
        self.journal: list[Undo] = []
        """What was written since the last sync, newest last."""
        self.has_lost_power = False
        self.promised: set[str] = set()
        """Jobs that a client was told are accepted."""
        self.recorded: set[str] = set()
        """Assignments that a worker was told are recorded."""
        self.kinds: dict[str, str] = {}
        self.requirements: dict[str, m.SubmittedJob] = {}
        self.entries: Counter[str] = Counter()
        self.offers: set[tuple[str, str, int, int, int]] = set()
        self.lists: Counter[str] = Counter()
        self.pagers = 0
        self.completions: Counter[str] = Counter()
        self.is_finished: Callable[[str], bool] = lambda _: True
        """Whether the assignment's worker really finished it."""
        self.turns = 0
        self.clusters = ClusterWatch(self.demand)
        self._decoder = Decoder(m.SERVER_MESSAGES)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock.now:.4f} {text}")

    def tell(self, job_id: str, text: str) -> None:
        line = f"{self.clock.now:.4f} {job_id} {text}"
        self.stories[job_id].append(line)
        self.trace.append(line)

    def demand(self, holds: bool, what: str, *jobs: str) -> None:
        if not holds:
            stories = "\n".join(line for job in jobs for line in self.stories[job])
            raise Violation(f"{what}\n{stories}")

    # -- the ledger --------------------------------------------------------------------------------

    def admitted(self, admission: Admission, admitted: Admitted) -> None:
        self._begin([j.job_id for j in (*admission.jobs, *admitted.requeued)])
        for job in admission.jobs:
            known = admitted.known.get(job.drv_path or "")
            if known is None:
                self.status[job.job_id] = job.status
                self.kinds[job.job_id] = job.kind
                self.tell(job.job_id, f"admitted {job.name}")
        self.clusters.admitted(admitted)
        for job in admitted.requeued:
            self.status[job.job_id] = "Created"
            self.completions[job.job_id] = 0
            self.tell(job.job_id, "queued again")

    def rebuilt(self, rebuild: Rebuild) -> None:
        """One transaction; without anything to build again it changes nothing."""
        if not rebuild.requeued:
            return
        self._begin([rebuild.job_id, *(job.job_id for job in rebuild.requeued)])
        self.status[rebuild.job_id] = "Created"
        for job in rebuild.requeued:
            self.demand(self.status[job.job_id] == "Completed", "rebuilt undone", job.job_id)
            self.status[job.job_id] = "Created"
            self.completions[job.job_id] = 0
            self.tell(job.job_id, f"to be built again for {rebuild.job_id}")

    def wrote(self, batch: Batch, results: list[bool]) -> None:
        self._begin([job for write in batch.writes for job in self._jobs_of(write)])
        for write, result in self._single(batch, results):
            self.clusters.wrote(write, result=result)
            match write:
                case OpenClaim() if result:
                    claim = write.claim
                    self.demand(claim.job_id not in self.open, "I1: two open claims", claim.job_id)
                    self.open[claim.job_id] = claim
                    self.status[claim.job_id] = "Claimed"
                    self.tell(claim.job_id, f"claimed {claim.assignment_id} by {claim.worker}")
                case CloseClaim() if result:
                    job = write.job_id
                    self.demand(
                        self.open[job].assignment_id == write.assignment_id,
                        "closed another claim", job,
                    )  # fmt: skip
                    del self.open[job]
                    self.closed_in[write.assignment_id] = batch.number
                    self.tell(job, f"closed {write.assignment_id} {write.outcome}")
                    is_member = self.clusters.closes(write.assignment_id, job, write.outcome)
                    if write.outcome == "Completed":
                        is_true = self.is_finished(write.assignment_id)
                        self.demand(is_true, "I4: completed by a stale report", job)
                        if not is_member:
                            self.completions[job] += 1
                            self.demand(self.completions[job] == 1, "I4: completed twice", job)
                case SetJob():
                    before = self.status.get(write.job_id)
                    self.demand(
                        before not in TERMINAL, f"I4: {before} became {write.status}", write.job_id
                    )
                    if write.status in TERMINAL:
                        self.demand(
                            write.job_id not in self.open, "ended with an open claim", write.job_id
                        )
                    self.status[write.job_id] = write.status
                    self.tell(write.job_id, f"is {write.status}")

    @staticmethod
    def _single(batch: Batch, results: list[bool]) -> Iterator[tuple[Write, bool]]:
        for write, result in zip(batch.writes, results, strict=True):
            yield write, result
            if isinstance(write, OpenAttempt):
                yield from ((claim, result) for claim in write.claims)

    def _jobs_of(self, write: Any) -> list[str]:
        match write:
            case OpenClaim():
                return [write.claim.job_id]
            case SetJob() | CloseClaim():
                return [write.job_id]
        return []

    # -- power loss --------------------------------------------------------------------------------

    def _begin(self, jobs: list[str]) -> None:
        """A transaction that touches these jobs: it may turn out to be lost."""
        before = {j: (self.status.get(j), self.open.get(j), self.completions[j]) for j in jobs}
        self.journal.append(before)

    def synced_all(self) -> None:
        self.journal.clear()

    def server_started(self, ledger: SqliteLedger) -> None:
        """After a power loss the ledger must be as it was at some moment since the last sync, and
        what was promised must hold (I9)."""
        if not self.has_lost_power:
            return
        self.has_lost_power = False
        with ledger.snapshot() as db:
            found = dict(db.execute("SELECT id, status FROM job").fetchall())
            claims = db.execute("SELECT id, job, closed_at FROM dispatched_job").fetchall()
        opened = {job: assignment for assignment, job, closed in claims if closed is None}
        found.update(dict.fromkeys(opened, "Claimed"))
        while not self._is_as(found, opened):
            self.demand(bool(self.journal), "I9: a state that was durable is lost, or never was")
            for job, (status, claim, completions) in self.journal.pop().items():
                _put(self.status, job, status)
                _put(self.open, job, claim)
                self.completions[job] = completions
        self.journal.clear()
        lost = sorted(self.promised - found.keys())
        self.demand(not lost, "I9: an accepted submission is lost", *lost[:1])
        closed = {assignment for assignment, _, at in claims if at is not None}
        gone = sorted(self.recorded - closed)
        self.demand(not gone, f"I9: recorded results are lost: {gone[:3]}")

    def _is_as(self, found: dict[str, str], opened: dict[str, str]) -> bool:
        return (
            self.status == found
            and {job: claim.assignment_id for job, claim in self.open.items()} == opened
        )

    # -- the wire ----------------------------------------------------------------------------------

    def sends(self, server: Any, peer: bytes, frames: list[bytes]) -> None:
        for frame in frames:
            message = self._decoder.decode(frame)
            self.clusters.sends(message)
            if isinstance(message, m.AssignJob):
                self._assigns(server, peer, message)
            elif isinstance(message, m.CmdSubmitted):
                self.promised.update(message.jobs.values(), message.evaluations)
            elif isinstance(message, m.Recorded):
                self.recorded.add(message.assignment_id)
                number = self.closed_in.get(message.assignment_id)
                is_durable = number is not None and number <= server.synced
                self.demand(is_durable, "Recorded before it is durable", message.job_id)

    def _assigns(self, server: Any, peer: bytes, message: m.AssignJob) -> None:
        job = message.job_id
        self.tell(job, f"AssignJob {message.assignment_id}")
        claim = self.open.get(job)
        is_committed = claim is not None and claim.assignment_id == message.assignment_id
        self.demand(is_committed, "I3: AssignJob without its row", job)
        session = server.sessions.by_peer.get(peer)
        self.demand(
            session is not None and session.worker == claim.worker, "assigned to a stranger", job
        )
        told = session.announced
        if isinstance(message.job, m.EvalJob):
            self.demand(session.capabilities.eval, "I5: evaluation without `eval`", job)
            return
        need = message.job.requirement
        fits = need.system in (*told.architectures, "builtin") and set(
            need.required_features
        ) <= set(told.system_features)
        self.demand(fits and not session.draining, "I5: must not run there", job)
        mine = [c for c in self.open.values()
                if c.worker == session.worker and self.kinds.get(c.job_id) == "build"]  # fmt: skip
        self.demand(len(mine) <= told.max_concurrent_builds, "I6: more builds than slots", job)

    # -- offers ------------------------------------------------------------------------------------

    def entered(self, job_id: str) -> None:
        self.entries[job_id] += 1

    def pager_started(self) -> None:
        self.pagers += 1

    def dispatch_started(self, _: Any) -> None:
        self.pagers += 1

    def list_requested(self, session: str) -> None:
        self.lists[session] += 1

    def offered(self, session: str, page: Any) -> None:
        for job_id in page.job_ids:
            key = (session, job_id, self.entries[job_id], self.pagers,
                   self.lists[session])  # fmt: skip
            self.demand(key not in self.offers, f"I8: offered twice to {session}", job_id)
            self.offers.add(key)

    # -- after every step --------------------------------------------------------------------------

    def settled(self, server: Any) -> None:
        self.turns += 1
        if self.turns % OFFERS_EVERY == 0:
            owed = self.missing_offers(server)
            self.demand(not owed, f"I8: an offer is owed: {owed[:1]}", *(j for _, j in owed[:1]))
        self.clusters.settled(server, self.clock.now)
        settlement = server.farm._settlement
        if settlement._writes or settlement._batches:
            return  # what closes a claim may be on its way
        for job_id, claim in self.open.items():
            held = server.farm.assigner.claims.get(job_id)
            known = held is not None and held.assignment_id == claim.assignment_id
            self.demand(known or bool(server.deferred or server.inbox), "a leaked claim", job_id)

    def missing_offers(self, server: Any) -> list[tuple[str, str]]:
        """(session, job) that are owed an offer: pages go out within the turn here."""
        owed: list[tuple[str, str]] = []
        if server.pager_is_new:
            return owed  # all of it comes with the `Reset`
        for session in server.sessions:
            view = session.view()
            is_there = session.peer in server.network.connections
            if not (session.listed and is_there) or view.draining:
                continue
            for entry in server.farm.assigner.pool:
                key = (session.id, entry.job_id, self.entries[entry.job_id], self.pagers,
                       self.lists[session.id])  # fmt: skip
                if self._fits(entry, view) and key not in self.offers:
                    owed.append((session.id, entry.job_id))
        return owed

    @staticmethod
    def _fits(entry: Any, view: Any) -> bool:
        if entry.cls.kind == "eval":
            return view.can_eval
        return (
            view.has_capabilities
            and entry.cls.system in (*view.architectures, "builtin")
            and entry.cls.features <= view.features
        )


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value
