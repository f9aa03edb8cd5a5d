"""The placement pass: which waiting clusters sit where, and for whom seats are kept.

A cluster is considered once all its members are pending and every possible seat of each has
reported the member, or the member saw 4 ticks. Prioritized clusters come first, then the oldest;
a worker seated for one is not offered to the next in the same pass. One that waited for
`reserve_after` reserves the cheapest seats of all, idle or not; one reservation at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from actors.server.assigner import Assigner
from actors.server.clusters.capacity import Capacity
from actors.server.clusters.model import Cluster
from actors.server.clusters.placement import cheapest, costs
from actors.server.clusters.reservation import Reservation
from actors.server.sessions import Session, SessionTable
from transport.messages import Kind

UNSCORED_TICKS = 4
MAX_CONSIDERED = 200
"""Clusters looked at in one pass; with more, passes take turns."""


class Plan(Struct, frozen=True):
    """A seat for every member of a cluster."""

    cluster: Cluster
    seats: tuple[tuple[str, Session], ...]
    """(job id, session), in the order of the members."""


class Planner:
    """See above. Reads the assigner; takes no seat itself."""

    def __init__(
        self,
        assigner: Assigner,
        sessions: SessionTable,
        *,
        reserve_after: float,
        reserve_timeout: float,
    ) -> None:
        self._assigner = assigner
        self._sessions = sessions
        self._reserve_after = reserve_after
        self._reserve_timeout = reserve_timeout
        self._turn = 0
        self.reservation: Reservation | None = None

    # -- seats -----------------------------------------------------------------------------

    def plans(self, clusters: Iterable[Cluster], now: float) -> Iterator[Plan]:
        """Plans for the clusters that can start now. Each is to be carried out, or refused,
        before the next one is asked for."""
        waiting = self._in_turn([c for c in clusters if self.is_waiting(c, now)])
        if not waiting:
            return
        reserved = self.reservation.cluster_id if self.reservation is not None else None
        capacity = self.capacity(now, only_idle=True)
        own = None
        for cluster in waiting:
            seats = capacity
            if cluster.cluster_id == reserved:
                seats = own = self.capacity(now, only_idle=True, cluster=cluster)
            columns = self._columns(cluster, seats)
            if columns is None:
                continue
            workers = [seats.workers[column] for column in columns]
            if seats is own:
                capacity.take([i for i, s in enumerate(capacity.workers) if s in workers])
            else:
                capacity.take(columns)
            jobs = [member.job_id for member in cluster.members]
            yield Plan(cluster, tuple(zip(jobs, workers, strict=True)))

    def _columns(self, cluster: Cluster, capacity: Capacity) -> list[int] | None:
        if len(cluster.members) > capacity.room:
            return None
        seats = capacity.seats(cluster.members)
        for row, member in enumerate(cluster.members):
            allowed = seats.allowed[row]
            if not allowed.any():
                return None
            if self._assigner.pool.ticks(member.job_id) < UNSCORED_TICKS and not (
                seats.reported[row][allowed].all()
            ):
                return None
        return cheapest(costs(seats), capacity.zones if cluster.same_zone else None)

    def capacity(self, now: float, *, only_idle: bool, cluster: Cluster | None = None) -> Capacity:
        """The workers as seats for a cluster; without one, for those that reserved nothing."""
        kept: Collection[tuple[str, Kind]] = self._assigner.kept
        if cluster is not None and self.is_reserved_for(cluster):
            kept = ()
        return Capacity(self._assigner, list(self._sessions), now, only_idle=only_idle, taken=kept)

    def is_pending(self, cluster: Cluster) -> bool:
        """Whether every member can start and waits for the others."""
        pool = self._assigner.pool
        return cluster.attempt is None and all(m.job_id in pool for m in cluster.members)

    def is_waiting(self, cluster: Cluster, now: float) -> bool:
        """Whether nothing but seats is missing."""
        return cluster.status == "Queued" and cluster.not_before <= now and self.is_pending(cluster)

    def waits_since(self, cluster: Cluster) -> float:
        """Since when nothing but seats is missing."""
        entries = [self._assigner.pool.get(m.job_id) for m in cluster.members]
        ready = [entry.ready_at for entry in entries if entry is not None]
        return max(cluster.not_before, *ready)

    def is_prioritized(self, cluster: Cluster) -> bool:
        """Whether the cluster or one of its members is."""
        entries = [self._assigner.pool.get(m.job_id) for m in cluster.members]
        return cluster.is_prioritized or any(e is not None and e.prioritized for e in entries)

    def _in_turn(self, clusters: list[Cluster]) -> list[Cluster]:
        clusters.sort(
            key=lambda c: (
                not self.is_reserved_for(c), not self.is_prioritized(c), c.created_at,
                c.cluster_id,
            )
        )  # fmt: skip
        if len(clusters) <= MAX_CONSIDERED:
            return clusters
        start = self._turn % len(clusters)
        self._turn += MAX_CONSIDERED
        return (clusters[start:] + clusters[:start])[:MAX_CONSIDERED]

    # -- reservation -----------------------------------------------------------------------

    def age(self, clusters: Collection[Cluster], now: float) -> None:
        """Ends a reservation that is over, and makes one for the first cluster in line that
        starves."""
        self.review(now, clusters)
        if self.reservation is not None:
            return
        starving = [
            c
            for c in clusters
            if self.is_waiting(c, now)
            and self.waits_since(c) + self._reserve_after <= now
            and c.reserves_at <= now
        ]
        for cluster in self._in_turn(starving):
            if self._reserve(cluster, now):
                return

    def _reserve(self, cluster: Cluster, now: float) -> bool:
        capacity = self.capacity(now, only_idle=False)
        seats = capacity.seats(cluster.members)
        matrix = costs(seats, capacity.idle(cluster.members))
        columns = cheapest(matrix, capacity.zones if cluster.same_zone else None)
        if columns is None:
            return False
        self.reservation = Reservation(
            cluster.cluster_id,
            {
                member.job_id: (capacity.workers[column].worker, capacity.kind_of(member))
                for member, column in zip(cluster.members, columns, strict=True)
            },
            now,
            now + self._reserve_timeout,
        )
        self._assigner.kept = self.reservation.kept
        return True

    def review(self, now: float, clusters: Collection[Cluster]) -> None:
        """Ends the reservation if its time is over, a seat went or cannot be one any more, or
        its cluster does not wait any more."""
        reservation = self.reservation
        if reservation is None:
            return
        cluster = next((c for c in clusters if c.cluster_id == reservation.cluster_id), None)
        if cluster is not None and reservation.until <= now:
            # Others have their chance before it reserves again.
            cluster.reserves_at = now + self._reserve_after
        elif (
            cluster is not None
            and self.is_waiting(cluster, now)
            and all(self._holds(job_id, *seat) for job_id, seat in reservation.seats.items())
        ):
            return
        self.drop()

    def _holds(self, job_id: str, worker: str, kind: Kind) -> bool:
        session = self._sessions.by_worker.get(worker)
        if session is None:
            return False
        view = self._assigner.view_of(session)
        has_slots = kind == "eval" or view.max_builds > 0
        slot = self._assigner.slot_of(session)
        return has_slots and not view.draining and self._assigner.pool.is_candidate(slot, job_id)

    def lose(self, worker: str) -> None:
        """A worker is gone, and with it a reservation that has a seat on it."""
        if self.reservation is not None and self.reservation.has_worker(worker):
            self.drop()

    def drop(self) -> None:
        """Nothing is reserved any more."""
        self.reservation = None
        self._assigner.kept = set()

    def is_reserved_for(self, cluster: Cluster) -> bool:
        """Whether seats are kept for it."""
        return self.reservation is not None and self.reservation.cluster_id == cluster.cluster_id
