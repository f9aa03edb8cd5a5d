"""A server's cores with clusters: workers that hold seats, step by step."""

from __future__ import annotations

import sqlite3
from typing import Any

from tests.server.farm_harness import BOTH, Harness, job
from transport import messages as m


def evaluation(name: str) -> m.SubmittedEvaluation:
    source = m.EvalSource(kind="graph-file", ref=name)
    return m.SubmittedEvaluation(source=source, job_id=name)


def member(
    name: str, role: str = "node", *, needs: tuple[str, ...] = (), **more: Any
) -> m.SubmittedMember:
    return m.SubmittedMember(role=role, job=job(name, *needs), **more)


def cluster(*members: m.SubmittedMember | str, **more: Any) -> m.SubmittedCluster:
    """Members by name are builds of role `node`."""
    return m.SubmittedCluster(
        members=[member(x) if isinstance(x, str) else x for x in members], **more
    )


class Clusters(Harness):
    """A farm of workers that say what they have, and what they were told."""

    def join(self, *names: str, zone: str | None = None, slots: int = 1, **more: Any) -> None:
        """Workers connect and announce what they can do."""
        for name in names:
            self.worker(name, slots=slots, can=BOTH, **more)
            if zone is not None:
                self.send(
                    name,
                    m.WorkerCapabilities(
                        architectures=["x86_64-linux"],
                        system_features=[],
                        max_concurrent_builds=slots,
                        zone=zone,
                        endpoint=f"{name}:9000",
                    ),
                )

    def idle(
        self, *names: str, kind: m.Kind = "build", sizes: dict[str, int] | None = None
    ) -> None:
        """Workers score all there is and ask in vain."""
        for name in names:
            self.score_sizes(name, sizes or {})
            self.send(name, m.RequestJob(kind=kind))

    def score_sizes(self, peer: str, sizes: dict[str, int]) -> None:
        scores = [
            m.Score(e.job_id, 1, sizes.get(e.name, 0), outputs_present=False)
            for e in self.farm.assigner.pool
        ]
        if scores:
            self.send(peer, m.RequestJobChunk(scores=scores))

    cluster = staticmethod(cluster)

    def submit_cluster(self, *members: m.SubmittedMember | str, **more: Any) -> str:
        """Submits one cluster; returns its id."""
        answer = self.submit(clusters=[cluster(*members, **more)])
        assert isinstance(answer, m.CmdSubmitted), answer
        [cluster_id] = answer.clusters
        return cluster_id

    def all_told(self, peer: str, kind: type[m.Message]) -> list[Any]:
        return [a for a in self.answers.get(peer.encode(), []) if isinstance(a, kind)]

    def last(self, peer: str, kind: type[m.Message]) -> Any:
        """The newest message of a kind; None when there is none."""
        told = self.all_told(peer, kind)
        return told[-1] if told else None

    def seat(self, peer: str) -> m.AssignJob:
        given = self.last(peer, m.AssignJob)
        assert given is not None
        assert given.cluster is not None, f"{peer} got a single job"
        return given

    def accept(self, *peers: str) -> None:
        for peer in peers:
            self.answer(peer, self.seat(peer), accepted=True)

    def run(self, *peers: str) -> None:
        """Idle workers get seats, accept them, and are started."""
        self.idle(*peers)
        self.accept(*peers)
        for peer in peers:
            assert self.last(peer, m.StartCluster) is not None

    def forget_told(self) -> None:
        self.answers.clear()

    def forget_told_but(self, kind: type[m.Message]) -> None:
        for peer, told in self.answers.items():
            self.answers[peer] = [message for message in told if isinstance(message, kind)]

    # -- the ledger --------------------------------------------------------------------------

    def rows(self, sql: str, *arguments: Any) -> list[Any]:
        with sqlite3.connect(self.folder / "ledger.sqlite3") as db:
            rows = db.execute(sql, arguments).fetchall()
        db.close()
        return rows

    def cluster_status(self, cluster_id: str) -> str:
        [(status,)] = self.rows("SELECT status FROM cluster_job WHERE id = ?", cluster_id)
        return status

    def budget(self, cluster_id: str) -> int:
        [(budget,)] = self.rows("SELECT retry_budget FROM cluster_job WHERE id = ?", cluster_id)
        return budget

    def attempts(self, cluster_id: str) -> list[tuple[bool, str | None]]:
        """(started, outcome) of each attempt, the oldest first."""
        sql = (
            "SELECT started_at IS NOT NULL, outcome FROM cluster_attempt WHERE cluster = ?"
            " ORDER BY created_at, id"
        )
        return [(bool(started), outcome) for started, outcome in self.rows(sql, cluster_id)]

    def open_rows(self) -> int:
        [(count,)] = self.rows("SELECT count(*) FROM dispatched_job WHERE closed_at IS NULL")
        return count
