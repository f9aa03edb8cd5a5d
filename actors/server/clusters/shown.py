"""Clusters for people: the status, `headrace cluster`, and why one waits. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from actors.ledger.records import ClusterRecord, MemberRecord, PastAttempt
from actors.server.assigner import Assigner
from actors.server.claims import Claim
from actors.server.clusters.capacity import Capacity
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.model import Attempt, Cluster, Ended
from actors.server.clusters.placement import seatable
from actors.server.clusters.planner import Planner
from actors.server.feeder import Feeder

MAX_SHOWN = 1_000
"""Clusters in one status."""
MAX_REASONS = 20
"""Waiting clusters of one status whose reason is worked out."""

Shown = dict[str, Any]


class _Look:
    """The workers at one moment, made into seats once for all clusters that are looked at."""

    def __init__(self, planner: Planner, now: float) -> None:
        self.now = now
        self._planner = planner
        self._made: dict[tuple[bool, bool], Capacity] = {}

    def capacity(self, cluster: Cluster, *, only_idle: bool) -> Capacity:
        key = only_idle, self._planner.is_reserved_for(cluster)
        if key not in self._made:
            self._made[key] = self._planner.capacity(self.now, only_idle=only_idle, cluster=cluster)
        return self._made[key]


class ClusterViews:
    """See above."""

    def __init__(self, coordinator: Coordinator, assigner: Assigner, feeder: Feeder) -> None:
        self._coordinator = coordinator
        self._assigner = assigner
        self._feeder = feeder

    def status(self, now: float) -> list[Shown]:
        """The `clusters` of the status: those that have not ended, then the newest that have."""
        clusters = list(self._coordinator.clusters.values())[:MAX_SHOWN]
        waiting = [c for c in clusters if c.attempt is None][:MAX_REASONS]
        look = _Look(self._coordinator.planner, now)
        reasons = {c.cluster_id: self._reason(c, look)["text"] for c in waiting}
        shown = [
            {
                "id": c.cluster_id,
                "status": c.status,
                "attempt": c.attempt.attempt_id if c.attempt is not None else None,
                "phase": c.attempt.phase if c.attempt is not None else None,
                "members": [self._member(member) for member in c.members],
                "attempts": c.attempts,
                "retry_budget": c.retry_budget,
                "reason": reasons.get(c.cluster_id),
            }
            for c in clusters
        ]
        return [*shown, *(_ended(c) for c in reversed(self._coordinator.book.ended))]

    def _member(self, member: MemberRecord) -> Shown:
        node = self._feeder.nodes.get(member.job_id)
        claim = self._assigner.claims.get(member.job_id)
        return {
            **_named(member),
            "status": node.status if node is not None else None,
            "worker": claim.worker if claim is not None else None,
        }

    def seat(self, claim: Claim, now: float) -> Shown | None:
        """Of a running job: the seat of a cluster that it sits on; None for a single job."""
        if claim.attempt is None:
            return None
        attempt = self._coordinator.attempts.get(claim.attempt)
        if attempt is None:
            return {"attempt": claim.attempt, "phase": "stopping"}
        member = attempt.seats[claim.job_id].member
        shown = {
            "id": attempt.cluster.cluster_id,
            "attempt": claim.attempt,
            "phase": attempt.phase,
            "role": member.role,
            "index": member.index,
        }
        if attempt.phase == "preparing":
            shown["hold_secs_left"] = round(max(0.0, attempt.prepare_by - now), 3)
        return shown

    def is_held(self, claim: Claim) -> bool:
        """Whether the claim is a seat that waits for its cluster's start."""
        attempt = self._coordinator.attempts.get(claim.attempt or "")
        return attempt is not None and attempt.phase != "started"

    # -- why it waits ----------------------------------------------------------------------

    def standing(self, job_id: str, now: float) -> Shown | None:
        """Why a member does not run; None when it does, or is none."""
        cluster = self._coordinator.book.of_job(job_id)
        if cluster is None:
            return None
        attempt = cluster.attempt
        if attempt is not None and attempt.phase == "started" and job_id not in attempt.results:
            return None
        return self.reason(cluster, now)

    def reason(self, cluster: Cluster, now: float) -> Shown:
        """Code and text of why a cluster has not started, with what the text is made of."""
        return self._reason(cluster, _Look(self._coordinator.planner, now))

    def _reason(self, cluster: Cluster, look: _Look) -> Shown:
        now = look.now
        shown: Shown = {"code": "cluster", "cluster": cluster.cluster_id,
                        "needed": len(cluster.members)}  # fmt: skip
        if cluster.attempt is not None:
            return {**shown, "text": self._in_attempt(cluster.attempt, now)}
        if not self._coordinator.planner.is_pending(cluster):
            return {**shown, "text": self._not_pending(cluster)}
        if cluster.not_before > now:
            secs = math.ceil(cluster.not_before - now)
            last = f"; the last attempt: {cluster.last_failure}" if cluster.last_failure else ""
            return {**shown, "text": f"placed again in {secs} s at the earliest{last}"}
        return {**shown, **self._seats(cluster, look)}

    def _in_attempt(self, attempt: Attempt, now: float) -> str:
        seats = attempt.seats.values()
        held = ", ".join(seat.claim.worker for seat in seats)
        if attempt.phase == "started":
            left = [seat.member for job_id, seat in attempt.seats.items()
                    if job_id not in attempt.results]  # fmt: skip
            return f"reported; the verdict waits for {_listed(left)}"
        if attempt.phase != "preparing":
            return f"its seats on {held} are being claimed"
        silent = ", ".join(seat.claim.worker for seat in seats if not seat.has_accepted)
        since, left_secs = now - attempt.created_at, attempt.prepare_by - now
        return (
            f"seats are held on {held} for {since:.0f} s; waits for {silent} to accept, "
            f"{left_secs:.0f} s left"
        )

    def _not_pending(self, cluster: Cluster) -> str:
        missing, stopping, elsewhere = [], [], []
        for member in cluster.members:
            node = self._feeder.nodes.get(member.job_id)
            if node is not None and node.waits_for:
                missing.append(member)
            elif member.job_id in self._assigner.claims:
                stopping.append(member)
            elif node is None or node.status != "Queued":
                elsewhere.append(member)
        size = len(cluster.members)
        if elsewhere:
            return "runs at another server"
        if stopping:
            return f"waits for {len(stopping)} of {size} members to stop: {_listed(stopping)}"
        return (
            f"waits for {len(missing)} of {size} members whose inputs are not built: "
            f"{_listed(missing)}"
        )

    def _seats(self, cluster: Cluster, look: _Look) -> Shown:
        size = len(cluster.members)
        everyone = look.capacity(cluster, only_idle=False)
        exist, where = seatable(
            everyone.seats(cluster.members).allowed,
            everyone.zones if cluster.same_zone else None,
        )
        if exist < size:
            text = f"{size} needed, {exist} exist{_in_zone(cluster, exist, where)}"
            return {"text": text, "exist": exist, "idle": 0, "zone": where}
        capacity = look.capacity(cluster, only_idle=True)
        seats = capacity.seats(cluster.members)
        zones = capacity.zones if cluster.same_zone else None
        idle, where = seatable(seats.allowed, zones)
        text = f"{size} needed, {idle} idle{_in_zone(cluster, idle, where)}"
        if idle == size:
            waited = np.flatnonzero((seats.allowed & ~seats.reported).any(axis=0))
            silent = [capacity.workers[column].worker for column in waited]
            text += f"; waits for {', '.join(silent)} to report what it lacks" if silent else ""
        shown: Shown = {"exist": exist, "idle": idle, "zone": where}
        reservation = self._coordinator.planner.reservation
        if reservation is not None and reservation.cluster_id == cluster.cluster_id:
            kept = sorted(reservation.seats.values())
            left = reservation.until - look.now
            busy = [worker for worker, kind in kept
                    if kind not in self._assigner.idle_kinds(worker, look.now)]  # fmt: skip
            text += f"; seats are kept on {', '.join(w for w, _ in kept)} for {left:.0f} s more"
            text += f", {', '.join(busy)} still busy" if busy else ""
            shown["reservation"] = {
                "seats": [{"worker": worker, "kind": kind} for worker, kind in kept],
                "secs_left": round(left, 3),
            }
        return {"text": text, **shown}

    # -- `headrace cluster` ----------------------------------------------------------------

    def row(self, record: ClusterRecord) -> Shown:
        """One line of `headrace cluster list`."""
        cluster = self._coordinator.clusters.get(record.cluster_id)
        attempt = cluster.attempt if cluster is not None else None
        return {
            "id": record.cluster_id,
            "status": record.status,
            "members": len(record.members),
            "attempt": attempt.attempt_id if attempt is not None else None,
            "attempts": record.attempts,
            "retry_budget": record.retry_budget,
            "same_zone": record.same_zone,
            "prioritized": record.prioritized,
            "created_at": _iso(record.created_at),
            "ended_at": _iso(record.ended_at),
        }

    def detail(
        self,
        record: ClusterRecord,
        jobs: Mapping[str, tuple[str, str]],
        attempts: Sequence[PastAttempt],
        now: float,
    ) -> Shown:
        """All that `headrace cluster show` prints; of `jobs` status and name."""
        cluster = self._coordinator.clusters.get(record.cluster_id)
        roles = {member.job_id: member for member in record.members}
        return {
            **self.row(record),
            "reason": None if cluster is None or cluster.status == "Running"
            else self.reason(cluster, now),
            "members": [
                {
                    **self._member(member),
                    "name": jobs[member.job_id][1],
                    "status": jobs[member.job_id][0],
                }
                for member in record.members
            ],
            "history": [_attempt(attempt, roles) for attempt in attempts],
        }  # fmt: skip


def _named(member: MemberRecord) -> Shown:
    return {
        "job_id": member.job_id,
        "role": member.role,
        "index": member.index,
        "primary": member.primary,
        "pin": member.pin,
    }


def _ended(cluster: Ended) -> Shown:
    return {
        "id": cluster.cluster_id,
        "status": cluster.status,
        "attempt": cluster.attempt,
        "members": [_named(member) for member in cluster.members],
    }


def _attempt(attempt: PastAttempt, roles: Mapping[str, MemberRecord]) -> Shown:
    return {
        "attempt": attempt.attempt_id,
        "created_at": _iso(attempt.created_at),
        "started_at": _iso(attempt.started_at),
        "finished_at": _iso(attempt.finished_at),
        "outcome": attempt.outcome,
        "seats": [
            {
                "job_id": seat.claim.job_id,
                "role": roles[seat.claim.job_id].role,
                "index": roles[seat.claim.job_id].index,
                "worker": seat.claim.worker,
                "assignment_id": seat.claim.assignment_id,
                "closed_at": _iso(seat.closed_at),
                "outcome": seat.outcome,
                "error": seat.error,
            }
            for seat in attempt.seats
        ],
    }


def _in_zone(cluster: Cluster, count: int, zone: str | None) -> str:
    if not cluster.same_zone or not count:
        return " in one zone" if cluster.same_zone else ""
    return f" in zone {zone}" if zone is not None else " among workers without a zone"


def _listed(members: Iterable[MemberRecord]) -> str:
    return ", ".join(f"{member.role}[{member.index}]" for member in members)


def _iso(wall: float | None) -> str | None:
    if wall is None:
        return None
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
