"""The cluster book: every cluster that has not ended, and whose member each job is."""

from __future__ import annotations

from collections import deque

from actors.ledger.records import ClusterRecord
from actors.server.clusters.model import Cluster, Ended, cluster_of

MAX_ENDED = 100
"""Ended clusters that the status goes on to show."""


class Book:
    """`add` and `drop` alone change it. `retry_delay` is in seconds."""

    def __init__(self, retry_delay: float) -> None:
        self.clusters: dict[str, Cluster] = {}
        self.ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        """The newest, oldest first."""
        self._retry_delay = retry_delay
        self._of_job: dict[str, Cluster] = {}

    def add(self, record: ClusterRecord) -> None:
        """A cluster is there; one that has ended is only remembered for people."""
        if record.ended_at is not None:
            self.ended.append(Ended(record.cluster_id, record.status, None, record.members))
            return
        cluster = cluster_of(record)
        self.clusters[cluster.cluster_id] = cluster
        for member in cluster.members:
            self._of_job[member.job_id] = cluster
        self._wait_after(cluster, record)

    def follow(self, cluster: Cluster, record: ClusterRecord) -> None:
        """Another server changed a cluster that has not ended."""
        cluster.status, cluster.retry_budget = record.status, record.retry_budget
        cluster.attempts = record.attempts
        self._wait_after(cluster, record)

    def _wait_after(self, cluster: Cluster, record: ClusterRecord) -> None:
        if record.tried_at is not None:
            cluster.not_before = max(cluster.not_before, record.tried_at + self._retry_delay)

    def drop(self, cluster: Cluster, status: str, attempt: str | None = None) -> None:
        """The cluster has ended, decided by `attempt` if by any."""
        del self.clusters[cluster.cluster_id]
        for member in cluster.members:
            del self._of_job[member.job_id]
        self.ended.append(Ended(cluster.cluster_id, status, attempt, cluster.members))

    def of_job(self, job_id: str) -> Cluster | None:
        """The open cluster that a job is a member of."""
        return self._of_job.get(job_id)

    def check(self) -> None:
        """Asserts that both indexes say the same."""
        for cluster in self.clusters.values():
            for member in cluster.members:
                assert self._of_job[member.job_id] is cluster
        assert len(self._of_job) == sum(len(c.members) for c in self.clusters.values())
