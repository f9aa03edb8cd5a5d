"""What command-line clients ask: each request answered once, from memory or the ledger.

Targets are resolved by the ledger (`find`: exact id, unique prefix, drv path, name), since most
jobs have ended and are not in memory. Answers of the ledger come back under a token; the token
says who asked what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from actors.ledger.port import Answer, Query
from actors.ledger.records import (
    TERMINAL,
    ClusterRecord,
    EvalOutcome,
    JobInfo,
    PastClaim,
    SetCordon,
)
from actors.server.admissions import Admissions
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.shown import ClusterViews
from actors.server.effects import Ask, Effect, HealthRequest, ReadLog, Record, Tell, TellDurable
from actors.server.explain import Explainer
from actors.server.feeder import Feeder
from actors.server.ids import Ids
from actors.server.registry import Registry
from transport import messages as m
from transport.codec import decode_value

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
MAX_ATTEMPTS_SHOWN = 50
MAX_WAITING = 10_000
"""Requests that wait for the ledger; a further one is refused."""

_Then = Callable[[Any, float], list[Effect]]


@dataclass(slots=True)
class _Waiting:
    peer: bytes
    request: int
    then: _Then


@dataclass(slots=True)
class _Targets:
    """A request that names several targets, resolved one by one."""

    peer: bytes
    request: int
    left: list[str]
    found: list[str]
    then: Callable[[list[str], float], list[Effect]]


class Commands:
    """Handles `Cmd...` messages; returns effects."""

    def __init__(
        self,
        ids: Ids,
        registry: Registry,
        feeder: Feeder,
        admissions: Admissions,
        explainer: Explainer,
        coordinator: Coordinator,
        cluster_views: ClusterViews,
    ) -> None:
        self._ids = ids
        self._registry = registry
        self._feeder = feeder
        self._admissions = admissions
        self._explainer = explainer
        self._coordinator = coordinator
        self._cluster_views = cluster_views
        self._waiting: dict[str, _Waiting] = {}
        self.accepting = True

    def take(self, peer: bytes, message: m.Message, now: float) -> list[Effect]:
        """One request of a client; `CmdStatus` is the shell's."""
        match message:
            case m.CmdSubmit():
                if not self.accepting:
                    text = "the server is stopping: submit later"
                    return _refuse(peer, message.request, text, EXIT_FAILED)
                return self._admissions.submitted(peer, message, now)
            case m.CmdJobs():
                return self._jobs(peer, message)
            case m.CmdWait():
                return self._wait(peer, message)
            case m.CmdCancel():
                return self._resolve(
                    _Targets(
                        peer, message.request, self._with_members(message.targets), [],
                        lambda ids, at: self._cancel(peer, message.request, ids, at),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdPrioritize():
                return self._resolve(
                    _Targets(
                        peer, message.request, self._with_members(message.targets), [],
                        lambda ids, _: self._prioritize(peer, message, ids),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdLogs():
                return self._resolve(
                    _Targets(
                        peer, message.request, [message.job], [],
                        lambda ids, _: self._logs(peer, message, ids[0]),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdExplain():
                return self._resolve(
                    _Targets(
                        peer, message.request, [message.job], [],
                        lambda ids, _: self._explain(peer, message.request, ids[0]),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdHealth():
                return self._health(peer, message.request)
            case m.CmdClusters():
                return self._clusters(peer, message)
            case m.CmdCluster():
                return self._resolve_clusters(
                    _Targets(
                        peer, message.request, [message.cluster], [],
                        lambda ids, _: self._cluster(peer, message.request, ids[0]),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdClusterCancel():
                return self._resolve_clusters(
                    _Targets(
                        peer, message.request, list(dict.fromkeys(message.clusters)), [],
                        lambda ids, at: self._cancel(peer, message.request, ids, at),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdResult():
                return self._resolve(
                    _Targets(
                        peer, message.request, [message.job], [],
                        lambda ids, _: self._result(peer, message.request, ids[0]),
                    ),
                    now,
                )  # fmt: skip
            case m.CmdDrain():
                return self._drain(peer, message.request, message.worker, message.reason, now)
            case m.CmdUndrain():
                return self._drain(peer, message.request, message.worker, None, now)
            case _:
                return []

    def refused(self, query: Query) -> list[Effect]:
        """The ledger takes no more queries for now."""
        waiting = self._waiting.pop(query.token)
        text = "too many requests at once: try again"
        return _refuse(waiting.peer, waiting.request, text, EXIT_FAILED)

    def answered(self, answer: Answer, now: float) -> list[Effect]:
        """The ledger answered one of our queries."""
        waiting = self._waiting.pop(answer.token, None)
        if waiting is None:
            return []
        if answer.error is not None:
            text = f"the ledger cannot be read: {answer.error}"
            return _refuse(waiting.peer, waiting.request, text, EXIT_FAILED)
        return waiting.then(answer.result, now)

    def ask(
        self,
        peer: bytes,
        request: int,
        then: _Then,
        method: str,
        *arguments: object,
        writes: bool = False,
    ) -> list[Effect]:
        """Asks the ledger for a client; `then` makes effects of the result."""
        if len(self._waiting) >= MAX_WAITING:
            return _refuse(peer, request, "too many requests at once: try again", EXIT_FAILED)
        token = self._ids.new("q")
        self._waiting[token] = _Waiting(peer, request, then)
        return [Ask(Query(token, method, arguments, writes))]

    def _health(self, peer: bytes, request: int) -> list[Effect]:
        def answer(problem: str | None, _: float) -> list[Effect]:
            return [HealthRequest(peer, request, problem)]

        return self.ask(peer, request, answer, "probe", writes=True)

    # -- jobs and wait ---------------------------------------------------------------------

    def _jobs(self, peer: bytes, message: m.CmdJobs) -> list[Effect]:
        def answer(page: list[JobInfo], _: float) -> list[Effect]:
            jobs = [_shown(info) for info in page]
            following = page[-1].job_id if len(page) == message.limit else None
            reply = m.CmdJobsReply(request=message.request, jobs=jobs, next=following)
            return [Tell(peer, reply)]

        return self.ask(
            peer, message.request, answer, "jobs_page", message.status, message.after,
            message.limit,
        )  # fmt: skip

    def _wait(self, peer: bytes, message: m.CmdWait) -> list[Effect]:
        nodes, counts = self._feeder.nodes, self._feeder.counts
        if not message.jobs:
            failed = sum(counts[s] for s in TERMINAL if s != "Completed")
            if not nodes and counts["Aborted"]:
                return self._wait_for_all(peer, message.request, failed)
            reply = m.CmdWaitReply(request=message.request, open=len(nodes), failed=failed)
            return [Tell(peer, reply)]
        is_open = [job for job in message.jobs if job in nodes]
        others = [job for job in message.jobs if job not in nodes]
        if not others:
            reply = m.CmdWaitReply(request=message.request, open=len(is_open), failed=0)
            return [Tell(peer, reply)]

        def answer(result: Any, _: float) -> list[Effect]:
            ended, failed, unknown = result
            reply = m.CmdWaitReply(
                request=message.request,
                open=len(message.jobs) - len(ended) - len(unknown),
                failed=len(failed),
                unknown=unknown,
            )
            return [Tell(peer, reply)]

        return self.ask(peer, message.request, answer, "ended_among", others)

    def _wait_for_all(self, peer: bytes, request: int, failed: int) -> list[Effect]:
        """Everything has ended; what a completed cluster stopped did not fail."""

        def answer(companions: int, _: float) -> list[Effect]:
            open_jobs = len(self._feeder.nodes)
            left = max(0, failed - companions)
            reply = m.CmdWaitReply(request=request, open=open_jobs, failed=left)
            return [Tell(peer, reply)]

        return self.ask(peer, request, answer, "companions")

    # -- targets ---------------------------------------------------------------------------

    def _resolve(self, targets: _Targets, now: float) -> list[Effect]:
        while targets.left:
            target = targets.left[0]
            if target in self._feeder.nodes or self._is_submission(target):
                targets.found.append(targets.left.pop(0))
                continue
            return self._look_up(targets, "find", "job", "jobs", self._resolve)
        return targets.then(targets.found, now)

    def _resolve_clusters(self, targets: _Targets, now: float) -> list[Effect]:
        if not targets.left:
            return targets.then(targets.found, now)
        return self._look_up(
            targets, "find_cluster", "cluster", "cluster list", self._resolve_clusters
        )

    def _look_up(
        self,
        targets: _Targets,
        method: str,
        what: str,
        command: str,
        further: Callable[[_Targets, float], list[Effect]],
    ) -> list[Effect]:
        """Asks the ledger for the first target that is left, and goes on with the others."""
        target = targets.left[0]

        def answer(ids: list[str], at: float) -> list[Effect]:
            if not ids:
                text = f"no {what} {target!r}: `headrace {command}` lists them"
                return _refuse(targets.peer, targets.request, text)
            if len(ids) > 1:
                text = f"{target!r} fits several {what}s: {', '.join(ids[:3])}, ...: give more"
                return _refuse(targets.peer, targets.request, text)
            targets.found.append(ids[0])
            targets.left.pop(0)
            return further(targets, at)

        return self.ask(targets.peer, targets.request, answer, method, target, 4)

    def _is_submission(self, target: str) -> bool:
        return any(target in node.requesters for node in self._feeder.nodes.values())

    def _cancel(self, peer: bytes, request: int, ids: list[str], now: float) -> list[Effect]:
        unwanted: list[str] = []
        effects: list[Effect] = []
        for target in self._with_members(ids):
            node = self._feeder.nodes.get(target)
            if node is None or node.kind == "eval":
                jobs, more = self._feeder.withdraw(target)
                unwanted += jobs
                effects += more
            else:
                unwanted.append(target)
        aborted, requested, more = self._feeder.cancel(unwanted, now)
        touched = {*aborted, *requested}
        reply = m.CmdCancelReply(
            request=request,
            aborted=aborted,
            requested=requested,
            unchanged=[
                t
                for t in ids
                if t not in touched
                and t not in self._feeder.nodes
                and t not in self._coordinator.clusters
            ],
        )
        return [*effects, *more, TellDurable(peer, reply)]

    def _with_members(self, targets: Iterable[str]) -> list[str]:
        """The targets, each once, with its members in the place of a cluster."""
        found: dict[str, None] = {}
        for target in targets:
            cluster = self._coordinator.clusters.get(target)
            members = [target] if cluster is None else [mb.job_id for mb in cluster.members]
            found.update(dict.fromkeys(members))
        return list(found)

    def _clusters(self, peer: bytes, message: m.CmdClusters) -> list[Effect]:
        def answer(page: Sequence[ClusterRecord], _: float) -> list[Effect]:
            rows = [self._cluster_views.row(record) for record in page]
            following = page[-1].cluster_id if len(page) == message.limit else None
            reply = m.CmdClustersReply(request=message.request, clusters=rows, next=following)
            return [Tell(peer, reply)]

        return self.ask(
            peer, message.request, answer, "clusters_page", message.status, message.after,
            message.limit,
        )  # fmt: skip

    def _cluster(self, peer: bytes, request: int, cluster_id: str) -> list[Effect]:
        def answer(found: Any, at: float) -> list[Effect]:
            record, jobs, attempts = found
            detail = self._cluster_views.detail(record, jobs, attempts, at)
            return [Tell(peer, m.CmdClusterReply(request=request, cluster=detail))]

        return self.ask(peer, request, answer, "cluster", cluster_id, MAX_ATTEMPTS_SHOWN)

    def _logs(self, peer: bytes, message: m.CmdLogs, job_id: str) -> list[Effect]:
        has_ended = job_id not in self._feeder.nodes
        return [ReadLog(peer, message.request, job_id, message.offset, has_ended)]

    def _explain(self, peer: bytes, request: int, job_id: str) -> list[Effect]:
        def answer(found: tuple[JobInfo | None, list[PastClaim]], at: float) -> list[Effect]:
            info, claims = found
            if info is None:
                text = f"{job_id} is a submission: name one of its jobs (`headrace jobs`)"
                return _refuse(peer, request, text)
            told = self._explainer.waiting(job_id, claims, at)
            if told is None:
                told = self._explainer.decided(info, claims, at)
            return [Tell(peer, m.CmdExplainReply(request=request, explanation=told))]

        return self.ask(peer, request, answer, "decision_of", job_id)

    def _result(self, peer: bytes, request: int, job_id: str) -> list[Effect]:
        def answer(found: EvalOutcome | None, _: float) -> list[Effect]:
            if found is None or found.kind != "eval":
                return _refuse(peer, request, f"{job_id} is not an evaluation")
            return [Tell(peer, m.CmdResultReply(request=request, result=_shown_outcome(found)))]

        return self.ask(peer, request, answer, "outcome_of", job_id)

    def _prioritize(self, peer: bytes, message: m.CmdPrioritize, ids: list[str]) -> list[Effect]:
        effects: list[Effect] = []
        for job_id in ids:
            if job_id not in self._feeder.nodes:
                continue
            effects += self._feeder.prioritize(job_id, prioritized=message.prioritized)
        return [*effects, TellDurable(peer, m.CmdDone(request=message.request))]

    def _drain(
        self, peer: bytes, request: int, worker: str, reason: str | None, now: float
    ) -> list[Effect]:
        if reason is None and worker not in self._registry.cordons:
            return _refuse(peer, request, f"worker {worker} is not drained", EXIT_FAILED)
        recorded = Record(SetCordon(worker, now, reason))
        effects = self._registry.cordon(worker, reason)
        return [recorded, *effects, TellDurable(peer, m.CmdDone(request=request))]


def _shown_outcome(found: EvalOutcome) -> dict[str, Any]:
    return {
        "status": found.status, "error": found.error,
        "warnings": list(found.warnings), "errors": list(found.errors),
        "targets": [
            {"attribute": t.attribute, "drv_path": t.drv_path, "job_id": t.job_id,
             "status": t.status,
             "outputs": {} if t.payload is None else decode_value(t.payload).get("outputs", {})}
            for t in found.targets
        ],
        "builds": found.builds,
        "failed": [
            {"job_id": job_id, "name": name, "status": status, "error": error}
            for job_id, name, status, error in found.failed
        ],
    }  # fmt: skip


def _shown(info: JobInfo) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(info)
    return shown


def _refuse(peer: bytes, request: int, text: str, code: int = EXIT_BAD_INPUT) -> list[Effect]:
    return [Tell(peer, m.CmdError(request=request, code=code, message=text))]
