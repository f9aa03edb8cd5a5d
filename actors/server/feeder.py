"""The feeder core: what becomes of jobs when they are admitted, run, fail, and are wanted no more.

The graph of jobs and its rules are in graph.py. Methods take `now` (monotonic seconds) and return
effects in the order to be performed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from actors.ledger.port import Query
from actors.ledger.records import (
    TERMINAL,
    AddRequester,
    Admitted,
    DropRequester,
    ForeignChanges,
    JobRecord,
    Rebuild,
    SetPriority,
    SetSizes,
    Snapshot,
    Status,
)
from actors.server.effects import Abort, Ask, ClusterUnwanted, Effect, Leave, Record
from actors.server.graph import JobGraph
from actors.server.jobs import Node, node_of
from transport import messages as m

MAX_BACKOFF_SECS = 3600.0
REBUILD = "rebuild "
"""Begins the tokens of queries for what makes lost paths; a job id follows."""
MAX_REBUILDS = 3
"""How often one job may have its inputs built again, however many attempts it has left."""
MAX_ALSO_WANTED = 2_000
"""Jobs that an evaluation comes to want in one pass; beyond it they are reported in batches."""
MAX_SIZES = 1_000_000
"""NAR sizes kept in memory; beyond it the oldest are forgotten and count as unknown."""


class Feeder:
    """See the rules above."""

    def __init__(
        self, *, max_attempts: int = 3, retry_backoff: float = 30.0, max_losses: int = 5
    ) -> None:
        self._graph = JobGraph()
        self.nodes = self._graph.nodes
        self.by_drv = self._graph.by_drv
        self.counts = self._graph.counts
        self.sizes = self._graph.sizes
        self._max_attempts = max_attempts
        self._retry_backoff = retry_backoff
        self._max_losses = max_losses
        self._retries: list[tuple[float, str]] = []
        # Requesters that were withdrawn while an admission was on its way.
        self._withdrawn: set[str] = set()

    @property
    def deadline(self) -> float:
        """When `due` has a retry to release; inf when never."""
        return self._retries[0][0] if self._retries else math.inf

    # -- start ---------------------------------------------------------------------------

    def load(self, snapshot: Snapshot, now: float) -> list[Effect]:
        """Takes over what the ledger holds. Jobs with an open claim do not enter the pool."""
        self.counts.update(snapshot.counts)
        self.sizes.update(snapshot.sizes)
        claimed = {claim.job_id for claim in snapshot.claims}
        # Members that reported and wait for the verdict of their attempt.
        claimed |= {r.job_id for attempt in snapshot.attempts for r in attempt.reported}
        nodes = [node_of(r, snapshot.requesters.get(r.job_id, ())) for r in snapshot.jobs]
        for node in nodes:
            self._believe_times(node, now)
            self._graph.add(node)
            node.failed_children = snapshot.failed_children.get(node.job_id, 0)
        inputs = {path: known for path, known in snapshot.inputs.items() if known is not None}
        for node in nodes:
            self._graph.link(node, inputs, now)
        for node in nodes:
            if node.job_id in claimed or node.job_id not in self.nodes or node.waits_for:
                continue
            if node.retry_at is not None and node.retry_at > now:
                heapq.heappush(self._retries, (node.retry_at, node.job_id))
            elif node.status == "Queued" and node.ready_at is not None:
                self._graph.enter(node)
            elif not node.evaluated:
                self._graph.start(node, now)
        for node in nodes:
            self._graph.settle_evaluation(node, now)
        return self._graph.flush()

    # -- admission -----------------------------------------------------------------------

    def admission_sent(self, requester: str) -> None:
        """An admission is on its way to the ledger; `merge` or `admission_failed` follows."""
        self._graph.admissions += 1
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.admissions += 1

    def admission_ended(self, requester: str, now: float) -> list[Effect]:
        """The last of the admission was merged, or the ledger refused it."""
        self._graph.admissions -= 1
        if not self._graph.admissions:
            self._graph.recent.clear()
            self._withdrawn.clear()
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.admissions -= 1
            self._graph.settle_evaluation(evaluation, now)
        return self._graph.flush()

    def merge(
        self, records: Sequence[JobRecord], requester: str, admitted: Admitted, now: float
    ) -> list[Effect]:
        """Takes in a part of an admission that the ledger took; inputs come in earlier parts
        or the same one."""
        fresh = []
        for record in records:
            known = admitted.known.get(record.drv_path) if record.drv_path else None
            if known is None:
                fresh.append(record)
            else:
                self._wanted_too(known.job_id, record, requester)
        effects = self._take_in(fresh, requester, admitted, now)
        if requester in self._withdrawn:
            unwanted, more = self.withdraw(requester)
            effects += more
            effects += self.cancel(unwanted, now)[2]
        return effects

    def _take_in(
        self, records: Sequence[JobRecord], requester: str, admitted: Admitted, now: float
    ) -> list[Effect]:
        fresh = []
        for record in records:
            node = node_of(record, (requester,))
            fresh.append(node)
            self._graph.add(node)
            self.counts[node.status] += 1
        for node in fresh:
            if admitted.dropped_inputs:
                node.inputs = tuple(i for i in node.inputs if i not in admitted.dropped_inputs)
            self._graph.link(node, admitted.known, now)
        for node in fresh:
            if not node.waits_for and node.job_id in self.nodes:
                self._graph.start(node, now)
        return self._graph.flush()

    def merge_requeued(self, admitted: Admitted, now: float) -> list[Effect]:
        """Takes in what the admission queued again; comes before the first `merge`."""
        for record in admitted.requeued:
            self._graph.recent.pop(record.drv_path or "", None)
        self.counts.subtract(admitted.requeued_from)
        return self._take_in(admitted.requeued, admitted.requester, admitted, now)

    def evaluation_broken(self, job_id: str, why: str) -> None:
        """A batch of the evaluation could not be taken, so it cannot complete."""
        self.nodes[job_id].broken = why

    def is_whole(self, drv_path: str) -> bool:
        """Whether a derivation is here with all that it needs, so that nobody must report it
        again. Ended ones count as unknown: reporting them again is cheap and always right."""
        if drv_path not in self.by_drv:
            return False
        if not self._graph.awaited:
            return True
        seen: set[str] = set()
        stack = [drv_path]
        while stack:
            path = stack.pop()
            if path in self._graph.awaited:
                return False
            node = self.by_drv.get(path)
            if node is not None:
                stack += [i for i in node.inputs if i not in seen]
                seen.update(node.inputs)
        return True

    def is_awaited(self, drv_path: str) -> bool:
        """Whether jobs wait for a derivation that nobody reported yet."""
        return drv_path in self._graph.awaited

    def sizes_known(self, sizes: Iterable[tuple[str, int]]) -> None:
        """NAR sizes that a submission or a report tells."""
        self.sizes.update(sizes)
        while len(self.sizes) > MAX_SIZES:
            del self.sizes[next(iter(self.sizes))]

    def also_wanted(self, drv_path: str, requester: str) -> bool:
        """An evaluation wants what another one reported, with all that it waits for: it need not
        report that again. False if it must, because that is not here whole, or so much that the
        loop would be held up. `flush` has the effects."""
        if not self.is_whole(drv_path):
            return False
        found: dict[str, Node] = {}
        stack = [self.by_drv[drv_path]]
        while stack:
            node = stack.pop()
            if requester in node.requesters or node.job_id in found:
                continue
            if len(found) == MAX_ALSO_WANTED:
                return False
            found[node.job_id] = node
            stack += [self.by_drv[path] for path in node.inputs if path in self.by_drv]
        evaluation = self.nodes[requester]
        for node in found.values():
            self._want(node, requester, evaluation)
            self._graph.out.append(Record(AddRequester(node.job_id, requester)))
        return True

    def flush(self) -> list[Effect]:
        """The effects of `also_wanted`."""
        return self._graph.flush()

    def _wanted_too(self, job_id: str, record: JobRecord, requester: str) -> None:
        node = self.nodes.get(job_id)
        if node is not None and requester not in node.requesters:
            self._want(node, requester, record)

    def _want(self, node: Node, requester: str, wish: JobRecord | Node) -> None:
        """`wish` has how much it is wanted."""
        node.requesters |= {requester}
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.children += 1
        if wish.prioritized and not node.prioritized:
            node.prioritized = True
            self._graph.out.append(Record(SetPriority(node.job_id, prioritized=True)))
        node.interactive = node.interactive or wish.interactive

    # -- what becomes of a claimed job -----------------------------------------------------

    def claimed(self, job_id: str) -> None:
        """A claim is on its way to the ledger (its row sets the status there). If the claim is
        lost to another server the job stays so: it runs elsewhere."""
        node = self.nodes[job_id]
        self._graph.set_status(node, "Evaluating" if node.kind == "eval" else "Building")

    def unclaimed(self, job_id: str) -> None:
        """The claim was never written."""
        self._graph.set_status(self.nodes[job_id], "Queued")

    def completed(self, job_id: str, now: float) -> list[Effect]:
        """The worker reported success."""
        self._complete(self.nodes[job_id], now)
        return self._graph.flush()

    def _complete(self, node: Node, now: float) -> None:
        node.attempts += 1
        if node.kind == "eval":
            node.evaluated = True
            node.error = node.broken  # that of an earlier attempt is over
            self._graph.set_status(node, "Building")
            self._graph.record(node, now)
            self._graph.settle_evaluation(node, now)
        else:
            self._graph.end(node, "Completed", None, now)

    def outputs_reported(self, outputs: Mapping[str, m.Output]) -> list[Effect]:
        """Sizes of a build's outputs, for the candidates that need them."""
        told = [o for o in outputs.values() if o.nar_size is not None or o.nar_hash is not None]
        self.sizes_known((o.path, o.nar_size) for o in told if o.nar_size is not None)
        if not told:
            return []
        return [Record(SetSizes(tuple((o.path, o.nar_size, o.nar_hash) for o in told)))]

    def failed(
        self,
        job_id: str,
        kind: m.FailureKind,
        error: str,
        now: float,
        *,
        missing: Collection[str] = (),
    ) -> list[Effect]:
        """The worker reported `Permanent`, `Timeout`, `Transient` or `InputsUnavailable`.

        What made the `missing` paths is built again first, if a job did.
        """
        node = self.nodes[job_id]
        node.attempts += 1
        if node.abort_reason is not None:
            self._graph.end(node, "Aborted", node.abort_reason, now)
        elif kind == "Timeout":
            self._graph.end(node, "TimedOut", error, now)
        elif kind == "Permanent" or node.attempts >= self._max_attempts:
            self._graph.end(node, "Failed", error, now)
        elif kind == "InputsUnavailable" and node.rebuilds >= MAX_REBUILDS:
            why = f"its inputs are lost again after {node.rebuilds} rebuilds: {error}"
            self._graph.end(node, "Failed", why, now)
        else:
            node.retry_at = now + self._backoff(node)
            node.error = error
            self._graph.set_status(node, "Queued")
            self._graph.record(node, now)
            if kind == "InputsUnavailable" and missing and node.inputs:
                node.lacks = frozenset(missing)
                asked = Query(
                    f"{REBUILD}{job_id}", "rebuild", (job_id, tuple(missing)), writes=True
                )
                self._graph.out.append(Ask(asked))
            else:
                heapq.heappush(self._retries, (node.retry_at, node.job_id))
        return self._graph.flush()

    def rebuilt(self, rebuild: Rebuild, now: float) -> list[Effect]:
        """The ledger queued again what made the paths that a job lacks, if there was anything."""
        fresh = []
        for record in rebuild.requeued:
            if record.drv_path in self.by_drv:
                continue  # another job lacked it too
            self._graph.recent.pop(record.drv_path or "", None)
            node = node_of(record, rebuild.requesters)
            self._graph.add(node)
            self.counts["Completed"] -= 1
            self.counts[node.status] += 1
            fresh.append(node)
        for node in fresh:
            self._graph.link(node, rebuild.known, now)
        waiter = self.nodes.get(rebuild.job_id)
        if waiter is not None and waiter.lacks:
            lacks, waiter.lacks = waiter.lacks, frozenset()
            if self._graph.wait_again(waiter, lacks):
                waiter.rebuilds += 1
                self._graph.record(waiter, now)
            elif waiter.retry_at is not None:
                heapq.heappush(self._retries, (waiter.retry_at, waiter.job_id))
        for node in fresh:
            if not node.waits_for and self._graph.is_here(node):
                self._graph.start(node, now)
        return self._graph.flush()

    def returned(self, job_id: str, now: float, *, lost: bool, why: str) -> list[Effect]:
        """The claim ended without a result: declined, cancelled, or lost with its worker.

        `lost` counts as one loss; after `max_losses` the job is failed.
        """
        node = self.nodes[job_id]
        if lost:
            node.losses += 1
        if node.abort_reason is not None:
            self._graph.end(node, "Aborted", node.abort_reason, now)
        elif node.losses >= self._max_losses:
            self._graph.end(node, "Failed", f"lost {node.losses} workers; the last: {why}", now)
        else:
            self._graph.start(node, now)
        return self._graph.flush()

    def aborted(self, job_id: str, now: float) -> list[Effect]:
        """The worker confirmed the abort, or never did within the limit."""
        node = self.nodes[job_id]
        self._graph.end(node, "Aborted", node.abort_reason or "aborted", now)
        return self._graph.flush()

    def can_start(self, job_id: str) -> bool:
        """Whether a job has not ended and nothing that it needs is missing."""
        node = self.nodes.get(job_id)
        return node is not None and not node.waits_for

    def settled(
        self, verdicts: Sequence[tuple[str, Status, str | None]], now: float
    ) -> list[Effect]:
        """The verdict of a cluster ends these members as it says: (job, status, reason). A
        completed evaluation goes on to wait for its builds."""
        spare = frozenset(job_id for job_id, _, _ in verdicts)
        for job_id, status, error in verdicts:
            node = self.nodes.get(job_id)
            if node is None:
                continue
            node.cluster = None
            if status == "Completed":
                self._complete(node, now)
            else:
                node.attempts += status != "Aborted"
                self._graph.end(node, status, error, now, spare=spare)
        return self._graph.flush()

    def due(self, now: float) -> list[Effect]:
        """Releases retries whose time has come."""
        while self._retries and self._retries[0][0] <= now:
            at, job_id = heapq.heappop(self._retries)
            node = self.nodes.get(job_id)
            if node is not None and node.retry_at == at:
                self._graph.enter(node)
        return self._graph.flush()

    # -- several servers on one ledger ---------------------------------------------------------

    def foreign(self, changes: ForeignChanges, mine: Collection[str], now: float) -> list[Effect]:
        """Follows what other servers wrote; nothing of it is written again. `mine` are the jobs
        with a claim of this server, whose word counts for them."""
        fresh: dict[str, Node] = {}
        for record in changes.jobs:
            node = self.nodes.get(record.job_id)
            if node is None and record.status not in TERMINAL:
                node = node_of(record, ())
                self._graph.add(node)
                self.counts[node.status] += 1
                fresh[node.job_id] = node
        for node in fresh.values():
            self._graph.link(node, changes.inputs, now)
        # What ended first: it frees what the records of its dependents then speak of.
        for record in sorted(changes.jobs, key=lambda r: r.status not in TERMINAL):
            node = self.nodes.get(record.job_id)
            if node is not None and record.job_id not in mine:
                self._follow(node, record, now, is_new=record.job_id in fresh)
        self._graph.out = [effect for effect in self._graph.out if not isinstance(effect, Record)]
        return self._graph.flush()

    def recount(self, counts: Mapping[str, int]) -> None:
        """Takes the numbers of ended jobs from the ledger, where other servers end jobs too."""
        for status in TERMINAL:
            self.counts[status] = counts.get(status, 0)

    def _follow(self, node: Node, record: JobRecord, now: float, *, is_new: bool) -> None:
        if record.status in TERMINAL:
            self._graph.end(node, record.status, record.error, now)
            return
        was_candidate = not is_new and node.status == "Queued" and node.retry_at is None
        if was_candidate and record.status != "Queued":
            self._graph.out.append(Leave(node.job_id))
        node.attempts, node.losses = record.attempts, record.losses
        node.ready_at, node.retry_at = record.ready_at, record.retry_at
        self._believe_times(node, now)
        node.evaluated = node.kind == "eval" and record.status == "Building"
        if record.status == "Created" and not node.waits_for:
            self._graph.wait_again(node, None)
        if node.waits_for or record.status == "Created":
            return
        self._graph.set_status(node, record.status)
        if record.status != "Queued":
            return
        if node.retry_at is not None and node.retry_at > now:
            heapq.heappush(self._retries, (node.retry_at, node.job_id))
        elif not was_candidate:
            node.retry_at = None
            node.ready_at = now if node.ready_at is None else node.ready_at
            self._graph.enter(node)

    # -- what people ask for -----------------------------------------------------------------

    def cancel(
        self, job_ids: Iterable[str], now: float
    ) -> tuple[list[str], list[str], list[Effect]]:
        """Ends jobs that do not run and asks for the end of those that do. A member takes its
        cluster along.

        Returns (aborted, requested, effects). The cancelled end `Aborted`; what needs them and
        is not itself cancelled ends `DependencyFailed`.
        """
        nodes = [self.nodes[j] for j in dict.fromkeys(job_ids) if j in self.nodes]
        aborted: list[str] = []
        requested: list[str] = []
        members: list[str] = []
        for node in nodes:  # all leave the pool before anything else can be assigned
            if node.cluster is not None:
                self._graph.out.append(ClusterUnwanted(node.cluster, "cancelled"))
                runs = node.status in ("Building", "Evaluating") and not node.evaluated
                (requested if runs else members).append(node.job_id)
            elif node.status in ("Building", "Evaluating") and not node.evaluated:
                if node.abort_reason is None:
                    node.abort_reason = "cancelled"
                    self._graph.out.append(Abort(node.job_id, "cancelled"))
                requested.append(node.job_id)
            else:
                aborted.append(node.job_id)
        for job_id in aborted:
            # An earlier one's end may have taken this one along as its dependent.
            ended = self.nodes.get(job_id)
            if ended is not None:
                self._graph.end(ended, "Aborted", "cancelled", now, spare=frozenset(aborted))
        return [*aborted, *members], requested, self._graph.flush()

    def withdraw(self, requester: str) -> tuple[list[str], list[Effect]]:
        """A submission or evaluation wants none of its jobs any more.

        Returns the jobs that nobody else wants (an evaluation's own job included).
        """
        unwanted = [requester] if requester in self.nodes else []
        for node in self.nodes.values():
            if requester in node.requesters:
                node.requesters -= {requester}
                if not node.requesters:
                    unwanted.append(node.job_id)
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.children = 0
        if self._graph.admissions:
            self._withdrawn.add(requester)
        self._graph.out.append(Record(DropRequester(requester)))
        nested = [j for j in unwanted if j != requester and self.nodes[j].kind == "eval"]
        for evaluation_id in nested:
            more, effects = self.withdraw(evaluation_id)
            unwanted += more
            self._graph.out[:0] = effects
        return list(dict.fromkeys(unwanted)), self._graph.flush()

    def prioritize(self, job_id: str, *, prioritized: bool) -> list[Effect]:
        node = self.nodes[job_id]
        node.prioritized = prioritized
        return [Record(SetPriority(job_id, prioritized=prioritized))]

    def _backoff(self, node: Node) -> float:
        return min(self._retry_backoff * 2.0 ** (node.attempts - 1), MAX_BACKOFF_SECS)

    def _believe_times(self, node: Node, now: float) -> None:
        """Times come back from the ledger as far off as the wall clock was set meanwhile: nothing
        could start after now, and nobody waits for longer than a retry takes."""
        if node.ready_at is not None:
            node.ready_at = min(node.ready_at, now)
        if node.retry_at is not None:
            node.retry_at = min(node.retry_at, now + self._backoff(node))

    # -- bookkeeping ---------------------------------------------------------------------------

    def check(self) -> None:
        """Asserts the graph's invariants."""
        self._graph.check()
