"""Clusters in the simulated farm: what is submitted, and invariant I7 from outside.

Believes no core: what was accepted is read off the wire, what is open off the ledger's writes, and
whether a placement exists is worked out anew, by augmenting paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

from actors.ledger.records import (
    TERMINAL,
    Admitted,
    CloseAttempt,
    OpenAttempt,
    OpenClaim,
    SetCluster,
    StartAttempt,
    Write,
)
from transport import messages as m
from transport.codec import Decoder

ZONES = ("a", "b", None)
PLACED_WITHIN = 7.0
"""Seconds for which a full placement may exist: a tick, and a commit that is tried again."""
HELD_FOR = 38.0
"""Seconds for which seats may be held before the start: the prepare timeout and a restart; their
workers give up after 40."""
LOOKED_EVERY = 3
"""Turns between two looks at whether placements exist."""


def clusters_of(
    random: Random,
    name: str,
    jobs: Sequence[m.SubmittedJob],
    zones: Sequence[str | None],
    refs: Sequence[str],
) -> list[m.SubmittedCluster]:
    """One to three clusters that fit on the workers, which sit in these zones."""
    clusters = []
    for c in range(random.randint(1, 3)):
        size = random.randint(2, min(5, len(zones)))
        same_zone = [z for z in ZONES if zones.count(z) >= size]
        zone = random.choice(same_zone) if same_zone and random.random() < 0.4 else "any"
        hosts = [f"w{n}" for n, z in enumerate(zones) if zone in ("any", z)]
        primary = random.randrange(size) if random.random() < 0.4 else None
        pins = random.sample(hosts, size)
        members = []
        for n in range(size):
            drv = f"{name}-k{c}-{n}"
            needs = random.sample(jobs, 1) if jobs and random.random() < 0.2 else []
            work: dict[str, Any] = {"job": m.SubmittedJob(
                drv_path=f"/nix/store/{drv}.drv", name=drv, required_features=[],
                system=random.choice(("x86_64-linux", "builtin")),
                outputs={"out": f"/nix/store/{drv}"},
                input_drvs=[job.drv_path for job in needs], input_srcs=[],
            )}  # fmt: skip
            if refs and random.random() < 0.15:
                source = m.EvalSource(kind="graph-file", ref=random.choice(refs))
                work = {"evaluation": m.SubmittedEvaluation(source=source)}
            members.append(m.SubmittedMember(
                role=random.choice(("node", "other")), primary=n == primary or None,
                pin=pins[n] if random.random() < 0.1 else None, **work,
            ))  # fmt: skip
        clusters.append(m.SubmittedCluster(
            members=members, same_zone=zone != "any", retry_budget=random.randint(0, 2),
            prioritized=random.random() < 0.2 or None,
        ))  # fmt: skip
    return clusters


class ClusterWatch:
    """I7, across all lives of the server: `StartCluster` only after all accepted; one verdict for
    all; nothing placed twice or by halves; placed when it can be; ended in the end."""

    def __init__(self, demand: Any) -> None:
        self.demand = demand
        self.members: dict[str, tuple[str, ...]] = {}
        self.primary: dict[str, str] = {}
        """Its job, by cluster."""
        self.status: dict[str, str] = {}
        self.of_job: dict[str, str] = {}
        self.open: dict[str, str] = {}
        """Open attempt by cluster."""
        self.claims: dict[str, tuple[OpenClaim, ...]] = {}
        """By attempt."""
        self.held_since: dict[str, float] = {}
        """By open attempt that was not started."""
        self.of_assignment: dict[str, str] = {}
        self.started: set[str] = set()
        self.closed: dict[str, str] = {}
        self.accepted: dict[str, set[str]] = defaultdict(set)
        self.outcomes: dict[str, dict[str, str]] = defaultdict(dict)
        """Of closed claims, by attempt and job."""
        self.placeable_since: dict[str, float] = {}
        self.turns = 0
        self._decoder = Decoder(m.WORKER_MESSAGES + m.COMMAND_MESSAGES)

    # -- what is written ---------------------------------------------------------------------

    def admitted(self, admitted: Admitted) -> None:
        for cluster in admitted.clusters:
            jobs = tuple(member.job_id for member in cluster.members)
            self.members[cluster.cluster_id] = jobs
            self.status[cluster.cluster_id] = "Queued"
            for member in cluster.members:
                if member.primary:
                    self.primary[cluster.cluster_id] = member.job_id
            for job in jobs:
                before = self.of_job.get(job)
                self.demand(
                    before is None or self.status[before] in TERMINAL, "in two clusters", job
                )
                self.of_job[job] = cluster.cluster_id

    def wrote(self, write: Write, *, result: bool) -> None:
        match write:
            case OpenAttempt() if result:
                jobs = {claim.claim.job_id for claim in write.claims}
                workers = {claim.claim.worker for claim in write.claims}
                whole = set(self.members[write.cluster_id])
                self.demand(jobs == whole, "I7: half a cluster was claimed", *whole)
                self.demand(len(workers) == len(jobs), "I7: two members on one worker", *jobs)
                self.demand(write.cluster_id not in self.open, "I7: two open attempts", *jobs)
                status = self.status[write.cluster_id]
                self.demand(status == "Queued", f"I7: placed when {status}", *jobs)
                self.open[write.cluster_id] = write.attempt_id
                self.claims[write.attempt_id] = write.claims
                for claim in write.claims:
                    self.of_assignment[claim.claim.assignment_id] = write.attempt_id
            case StartAttempt() if result:
                self.started.add(write.attempt_id)
                self.status[write.cluster_id] = "Running"
            case CloseAttempt() if result:
                jobs = {claim.claim.job_id for claim in self.claims[write.attempt_id]}
                self.demand(write.attempt_id not in self.closed, "I7: two verdicts", *jobs)
                self.closed[write.attempt_id] = write.outcome
                was_started = write.attempt_id in self.started
                fits = was_started or write.outcome in ("PrepareFailed", "Aborted")
                self.demand(fits, f"I7: {write.outcome} without a start", *jobs)
                fits = not was_started or write.outcome != "PrepareFailed"
                self.demand(fits, "I7: a started attempt ended as PrepareFailed", *jobs)
                cluster = self.of_job[next(iter(jobs))]
                del self.open[cluster]
                self._check_verdict(write, cluster, jobs)
            case SetCluster():
                before = self.status[write.cluster_id]
                jobs = set(self.members[write.cluster_id])
                self.demand(before not in TERMINAL, f"I7: {before}, then {write.status}", *jobs)
                self.status[write.cluster_id] = write.status

    def _check_verdict(self, close: CloseAttempt, cluster: str, jobs: set[str]) -> None:
        outcomes = self.outcomes[close.attempt_id]
        completed = {job for job, outcome in outcomes.items() if outcome == "Completed"}
        if close.outcome == "Succeeded":
            fits = completed == jobs or self.primary.get(cluster) in completed
        else:
            fits = close.outcome != "Failed" or completed != outcomes.keys()
        self.demand(fits, f"I7: {close.outcome} with {outcomes}", *jobs)

    def closes(self, assignment: str, job: str, outcome: str) -> bool:
        """Whether a closed claim is a member's, which may complete once in each attempt."""
        attempt = self.of_assignment.get(assignment)
        if attempt is None:
            return False
        self.demand(job not in self.outcomes[attempt], "I4: closed twice", job)
        self.outcomes[attempt][job] = outcome
        return True

    # -- the wire ----------------------------------------------------------------------------

    def receives(self, server: Any, peer: bytes, frames: Sequence[bytes]) -> None:
        """Frames on their way into a server."""
        session = server.sessions.by_peer.get(peer)
        for frame in frames:
            if session is None or b"AssignJobResponse" not in frame[:64]:
                continue
            answer = self._decoder.decode(frame)
            if isinstance(answer, m.AssignJobResponse) and answer.accepted:
                attempt = self.of_assignment.get(answer.assignment_id)
                if attempt is not None:
                    self.accepted[attempt].add(answer.assignment_id)

    def sends(self, message: m.Message) -> None:
        match message:
            case m.AssignJob(cluster=None):
                cluster = self.of_job.get(message.job_id)
                ended = cluster is None or self.status[cluster] in TERMINAL
                self.demand(ended, "a member was assigned singly", message.job_id)
            case m.AssignJob():
                attempt = self.of_assignment.get(message.assignment_id)
                self.demand(
                    attempt == message.cluster.attempt, "a seat of another attempt", message.job_id
                )
                self.demand(
                    attempt not in self.closed, "a seat of a closed attempt", message.job_id
                )
            case m.StartCluster():
                claims = self.claims[message.attempt]
                jobs = [claim.claim.job_id for claim in claims]
                self.demand(message.attempt in self.started, "I7: started before its row", *jobs)
                wanted = {claim.claim.assignment_id for claim in claims}
                accepted = self.accepted[message.attempt]
                self.demand(wanted <= accepted, "I7: started before all accepted", *jobs)
                self.demand(message.attempt not in self.closed, "I7: started when closed", *jobs)

    # -- after every step ----------------------------------------------------------------------

    def settled(self, server: Any, now: float) -> None:
        for attempt in self.open.values():
            if attempt not in self.started:
                jobs = [claim.claim.job_id for claim in self.claims[attempt]]
                held = now - self.held_since.setdefault(attempt, now)
                self.demand(held < HELD_FOR, f"seats of {attempt} are held for ever", *jobs)
        self.turns += 1
        if self.turns % LOOKED_EVERY or server.is_stopping:
            return
        coordinator = server.farm.coordinator
        placeable = {
            cluster.cluster_id
            for cluster in coordinator.clusters.values()
            if self._could_start(server, cluster, now)
        }
        for gone in self.placeable_since.keys() - placeable:
            del self.placeable_since[gone]
        for cluster_id in placeable:
            since = self.placeable_since.setdefault(cluster_id, now)
            self.demand(
                now - since < PLACED_WITHIN, "a full placement exists and is not taken",
                *self.members[cluster_id],
            )  # fmt: skip

    def _could_start(self, server: Any, cluster: Any, now: float) -> bool:
        assigner = server.farm.assigner
        pool = assigner.pool
        if cluster.attempt is not None or cluster.not_before > now or cluster.status != "Queued":
            return False
        if any(member.job_id not in pool for member in cluster.members):
            return False
        kept = set() if server.farm.coordinator.planner.is_reserved_for(cluster) else assigner.kept
        zones: dict[str | None, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for session in server.sessions:
            view = session.view()
            kinds = set(assigner.idle_kinds(session.worker, now)) - {
                kind for worker, kind in kept if worker == session.worker
            }
            if view.draining or session.announced is None:
                continue
            zone = session.announced.zone if cluster.same_zone else None
            for member in cluster.members:
                entry = pool.get(member.job_id)
                slot = assigner.slot_of(session)
                if member.pin not in (None, session.worker) or entry.cls.kind not in kinds:
                    continue
                if not pool.is_candidate(slot, member.job_id):
                    continue
                if pool.ticks(member.job_id) < 4 and pool.reported(slot, member.job_id) is None:
                    return False  # who may report yet is waited for
                zones[zone][member.job_id].append(session.worker)
        jobs = [member.job_id for member in cluster.members]
        return any(_has_full_matching(jobs, options) for options in zones.values())

    def judge(self, server: Any) -> None:
        """At the end everything has ended, and as one."""
        self.demand(not self.open, f"open attempts at the end: {self.open}")
        for cluster, status in self.status.items():
            jobs = self.members[cluster]
            self.demand(status in TERMINAL, f"cluster {cluster} is {status} at the end", *jobs)


def _has_full_matching(jobs: Sequence[str], options: dict[str, list[str]]) -> bool:
    taken: dict[str, str] = {}

    def seat(job: str, tried: set[str]) -> bool:
        for worker in options.get(job, ()):
            if worker not in tried:
                tried.add(worker)
                if worker not in taken or seat(taken[worker], tried):
                    taken[worker] = job
                    return True
        return False

    return all(seat(job, set()) for job in jobs)
