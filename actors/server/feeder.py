"""The feeder core: the graph of all jobs that have not ended, and what of it can start.

Rules of the file:

- A node lives here from its admission to its terminal status. `_set_status` alone changes a
  status, `_end` alone removes a node.
- A build can start when `waits_for` is 0. Whoever ends a build lowers it in its dependents, so
  a chain of builds advances with the report and never waits for a tick.
- Every change of a job goes out as one `Record`; the order of records is the order of changes,
  so a ledger that holds a prefix of them is a state this core was in.
- Methods take `now` (monotonic seconds) and return effects in the order to be performed.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from actors.ledger.port import Query
from actors.ledger.records import (
    TERMINAL,
    AddRequester,
    Admitted,
    DropRequester,
    ForeignChanges,
    JobRecord,
    Known,
    Rebuild,
    SetJob,
    SetPriority,
    SetSizes,
    Snapshot,
    Status,
)
from actors.server.effects import Abort, Ask, ClusterUnwanted, Effect, Enter, Leave, Record
from actors.server.jobs import Node, node_of, pool_entry
from transport import messages as m

MAX_BACKOFF_SECS = 3600.0
REBUILD = "rebuild "
"""Begins the tokens of queries for what makes lost paths; a job id follows."""
MAX_REBUILDS = 3
"""How often one job may have its inputs built again, however many attempts it has left."""
MAX_SIZES = 1_000_000
"""NAR sizes kept in memory; beyond it the oldest are forgotten and count as unknown."""


class Feeder:
    """See the rules above."""

    def __init__(
        self, *, max_attempts: int = 3, retry_backoff: float = 30.0, max_losses: int = 5
    ) -> None:
        self.nodes: dict[str, Node] = {}
        self.by_drv: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        self._max_attempts = max_attempts
        self._retry_backoff = retry_backoff
        self._max_losses = max_losses
        self._retries: list[tuple[float, str]] = []
        self._awaited: dict[str, dict[str, Node]] = {}
        """By the drv path of an input that nobody reported yet: who waits for it, by job id."""
        # What ended while an admission is between its look at the ledger and its merge.
        self._recent: dict[str, tuple[Status, tuple[str, ...]]] = {}
        # Requesters that were withdrawn while an admission was on its way.
        self._withdrawn: set[str] = set()
        self._admissions = 0
        self._out: list[Effect] = []

    @property
    def deadline(self) -> float:
        """When `due` has a retry to release; inf when never."""
        return self._retries[0][0] if self._retries else math.inf

    # -- start ---------------------------------------------------------------------------

    def load(self, snapshot: Snapshot, now: float) -> list[Effect]:
        """Takes over what the ledger holds. Jobs with an open claim do not enter the pool."""
        self.counts = Counter(snapshot.counts)
        self.sizes = dict(snapshot.sizes)
        claimed = {claim.job_id for claim in snapshot.claims}
        # Members that reported and wait for the verdict of their attempt.
        claimed |= {r.job_id for attempt in snapshot.attempts for r in attempt.reported}
        nodes = [node_of(r, snapshot.requesters.get(r.job_id, ())) for r in snapshot.jobs]
        for node in nodes:
            self._believe_times(node, now)
            self._add(node)
            node.failed_children = snapshot.failed_children.get(node.job_id, 0)
        inputs = {path: known for path, known in snapshot.inputs.items() if known is not None}
        for node in nodes:
            self._link(node, inputs, now)
        for node in nodes:
            if node.job_id in claimed or node.job_id not in self.nodes or node.waits_for:
                continue
            if node.retry_at is not None and node.retry_at > now:
                heapq.heappush(self._retries, (node.retry_at, node.job_id))
            elif node.status == "Queued" and node.ready_at is not None:
                self._enter(node)
            elif not node.evaluated:
                self._start(node, now)
        for node in nodes:
            self._settle_evaluation(node, now)
        return self._flush()

    # -- admission -----------------------------------------------------------------------

    def admission_sent(self, requester: str) -> None:
        """An admission is on its way to the ledger; `merge` or `admission_failed` follows."""
        self._admissions += 1
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.admissions += 1

    def admission_ended(self, requester: str, now: float) -> list[Effect]:
        """The last of the admission was merged, or the ledger refused it."""
        self._admissions -= 1
        if not self._admissions:
            self._recent.clear()
            self._withdrawn.clear()
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.admissions -= 1
            self._settle_evaluation(evaluation, now)
        return self._flush()

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
            self._add(node)
            self.counts[node.status] += 1
        for node in fresh:
            if admitted.dropped_inputs:
                node.inputs = tuple(i for i in node.inputs if i not in admitted.dropped_inputs)
            self._link(node, admitted.known, now)
        for node in fresh:
            if not node.waits_for and node.job_id in self.nodes:
                self._start(node, now)
        return self._flush()

    def merge_requeued(self, admitted: Admitted, now: float) -> list[Effect]:
        """Takes in what the admission queued again; comes before the first `merge`."""
        for record in admitted.requeued:
            self._recent.pop(record.drv_path or "", None)
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
        if not self._awaited:
            return True
        seen: set[str] = set()
        stack = [drv_path]
        while stack:
            path = stack.pop()
            if path in self._awaited:
                return False
            node = self.by_drv.get(path)
            if node is not None:
                stack += [i for i in node.inputs if i not in seen]
                seen.update(node.inputs)
        return True

    def is_awaited(self, drv_path: str) -> bool:
        """Whether jobs wait for a derivation that nobody reported yet."""
        return drv_path in self._awaited

    def sizes_known(self, sizes: Iterable[tuple[str, int]]) -> None:
        """NAR sizes that a submission or a report tells."""
        self.sizes.update(sizes)
        while len(self.sizes) > MAX_SIZES:
            del self.sizes[next(iter(self.sizes))]

    def _wanted_too(self, job_id: str, record: JobRecord, requester: str) -> None:
        node = self.nodes.get(job_id)
        if node is None or requester in node.requesters:
            return
        node.requesters |= {requester}
        evaluation = self.nodes.get(requester)
        if evaluation is not None:
            evaluation.children += 1
        if record.prioritized and not node.prioritized:
            node.prioritized = True
            self._out.append(Record(SetPriority(job_id, prioritized=True)))
        node.interactive = node.interactive or record.interactive

    # -- what becomes of a claimed job -----------------------------------------------------

    def claimed(self, job_id: str) -> None:
        """A claim is on its way to the ledger (its row sets the status there). If the claim is
        lost to another server the job stays so: it runs elsewhere."""
        node = self.nodes[job_id]
        self._set_status(node, "Evaluating" if node.kind == "eval" else "Building")

    def unclaimed(self, job_id: str) -> None:
        """The claim was never written."""
        self._set_status(self.nodes[job_id], "Queued")

    def completed(self, job_id: str, now: float) -> list[Effect]:
        """The worker reported success."""
        self._complete(self.nodes[job_id], now)
        return self._flush()

    def _complete(self, node: Node, now: float) -> None:
        node.attempts += 1
        if node.kind == "eval":
            node.evaluated = True
            node.error = node.broken  # that of an earlier attempt is over
            self._set_status(node, "Building")
            self._record(node, now)
            self._settle_evaluation(node, now)
        else:
            self._end(node, "Completed", None, now)

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
            self._end(node, "Aborted", node.abort_reason, now)
        elif kind == "Timeout":
            self._end(node, "TimedOut", error, now)
        elif kind == "Permanent" or node.attempts >= self._max_attempts:
            self._end(node, "Failed", error, now)
        elif kind == "InputsUnavailable" and node.rebuilds >= MAX_REBUILDS:
            why = f"its inputs are lost again after {node.rebuilds} rebuilds: {error}"
            self._end(node, "Failed", why, now)
        else:
            node.retry_at = now + self._backoff(node)
            node.error = error
            self._set_status(node, "Queued")
            self._record(node, now)
            if kind == "InputsUnavailable" and missing and node.inputs:
                node.lacks = frozenset(missing)
                asked = Query(
                    f"{REBUILD}{job_id}", "rebuild", (job_id, tuple(missing)), writes=True
                )
                self._out.append(Ask(asked))
            else:
                heapq.heappush(self._retries, (node.retry_at, node.job_id))
        return self._flush()

    def rebuilt(self, rebuild: Rebuild, now: float) -> list[Effect]:
        """The ledger queued again what made the paths that a job lacks, if there was anything."""
        fresh = []
        for record in rebuild.requeued:
            if record.drv_path in self.by_drv:
                continue  # another job lacked it too
            self._recent.pop(record.drv_path or "", None)
            node = node_of(record, rebuild.requesters)
            self._add(node)
            self.counts["Completed"] -= 1
            self.counts[node.status] += 1
            fresh.append(node)
        for node in fresh:
            self._link(node, rebuild.known, now)
        waiter = self.nodes.get(rebuild.job_id)
        if waiter is not None and waiter.lacks:
            lacks, waiter.lacks = waiter.lacks, frozenset()
            if self._wait_again(waiter, lacks):
                waiter.rebuilds += 1
                self._record(waiter, now)
            elif waiter.retry_at is not None:
                heapq.heappush(self._retries, (waiter.retry_at, waiter.job_id))
        for node in fresh:
            if not node.waits_for and self._is_here(node):
                self._start(node, now)
        return self._flush()

    def returned(self, job_id: str, now: float, *, lost: bool, why: str) -> list[Effect]:
        """The claim ended without a result: declined, cancelled, or lost with its worker.

        `lost` counts as one loss; after `max_losses` the job is failed.
        """
        node = self.nodes[job_id]
        if lost:
            node.losses += 1
        if node.abort_reason is not None:
            self._end(node, "Aborted", node.abort_reason, now)
        elif node.losses >= self._max_losses:
            self._end(node, "Failed", f"lost {node.losses} workers; the last: {why}", now)
        else:
            self._start(node, now)
        return self._flush()

    def aborted(self, job_id: str, now: float) -> list[Effect]:
        """The worker confirmed the abort, or never did within the limit."""
        node = self.nodes[job_id]
        self._end(node, "Aborted", node.abort_reason or "aborted", now)
        return self._flush()

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
                self._end(node, status, error, now, spare=spare)
        return self._flush()

    def due(self, now: float) -> list[Effect]:
        """Releases retries whose time has come."""
        while self._retries and self._retries[0][0] <= now:
            at, job_id = heapq.heappop(self._retries)
            node = self.nodes.get(job_id)
            if node is not None and node.retry_at == at:
                self._enter(node)
        return self._flush()

    # -- several servers on one ledger ---------------------------------------------------------

    def foreign(self, changes: ForeignChanges, mine: Collection[str], now: float) -> list[Effect]:
        """Follows what other servers wrote; nothing of it is written again. `mine` are the jobs
        with a claim of this server, whose word counts for them."""
        fresh: dict[str, Node] = {}
        for record in changes.jobs:
            node = self.nodes.get(record.job_id)
            if node is None and record.status not in TERMINAL:
                node = node_of(record, ())
                self._add(node)
                self.counts[node.status] += 1
                fresh[node.job_id] = node
        for node in fresh.values():
            self._link(node, changes.inputs, now)
        # What ended first: it frees what the records of its dependents then speak of.
        for record in sorted(changes.jobs, key=lambda r: r.status not in TERMINAL):
            node = self.nodes.get(record.job_id)
            if node is not None and record.job_id not in mine:
                self._follow(node, record, now, is_new=record.job_id in fresh)
        self._out = [effect for effect in self._out if not isinstance(effect, Record)]
        return self._flush()

    def recount(self, counts: Mapping[str, int]) -> None:
        """Takes the numbers of ended jobs from the ledger, where other servers end jobs too."""
        for status in TERMINAL:
            self.counts[status] = counts.get(status, 0)

    def _follow(self, node: Node, record: JobRecord, now: float, *, is_new: bool) -> None:
        if record.status in TERMINAL:
            self._end(node, record.status, record.error, now)
            return
        was_candidate = not is_new and node.status == "Queued" and node.retry_at is None
        if was_candidate and record.status != "Queued":
            self._out.append(Leave(node.job_id))
        node.attempts, node.losses = record.attempts, record.losses
        node.ready_at, node.retry_at = record.ready_at, record.retry_at
        self._believe_times(node, now)
        node.evaluated = node.kind == "eval" and record.status == "Building"
        if record.status == "Created" and not node.waits_for:
            self._wait_again(node, None)
        if node.waits_for or record.status == "Created":
            return
        self._set_status(node, record.status)
        if record.status != "Queued":
            return
        if node.retry_at is not None and node.retry_at > now:
            heapq.heappush(self._retries, (node.retry_at, node.job_id))
        elif not was_candidate:
            node.retry_at = None
            node.ready_at = now if node.ready_at is None else node.ready_at
            self._enter(node)

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
                self._out.append(ClusterUnwanted(node.cluster, "cancelled"))
                runs = node.status in ("Building", "Evaluating") and not node.evaluated
                (requested if runs else members).append(node.job_id)
            elif node.status in ("Building", "Evaluating") and not node.evaluated:
                if node.abort_reason is None:
                    node.abort_reason = "cancelled"
                    self._out.append(Abort(node.job_id, "cancelled"))
                requested.append(node.job_id)
            else:
                aborted.append(node.job_id)
        for job_id in aborted:
            # An earlier one's end may have taken this one along as its dependent.
            ended = self.nodes.get(job_id)
            if ended is not None:
                self._end(ended, "Aborted", "cancelled", now, spare=frozenset(aborted))
        return [*aborted, *members], requested, self._flush()

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
        if self._admissions:
            self._withdrawn.add(requester)
        self._out.append(Record(DropRequester(requester)))
        nested = [j for j in unwanted if j != requester and self.nodes[j].kind == "eval"]
        for evaluation_id in nested:
            more, effects = self.withdraw(evaluation_id)
            unwanted += more
            self._out[:0] = effects
        return list(dict.fromkeys(unwanted)), self._flush()

    def prioritize(self, job_id: str, *, prioritized: bool) -> list[Effect]:
        node = self.nodes[job_id]
        node.prioritized = prioritized
        return [Record(SetPriority(job_id, prioritized=prioritized))]

    def requested(self, job_id: str, requester: str) -> list[Effect]:
        """Someone else wants a job that is already here."""
        self.nodes[job_id].requesters |= {requester}
        return [Record(AddRequester(job_id, requester))]

    # -- the graph -----------------------------------------------------------------------------

    def _add(self, node: Node) -> None:
        self.nodes[node.job_id] = node
        if node.drv_path is not None:
            self.by_drv[node.drv_path] = node

    def _link(self, node: Node, known: Mapping[str, Known | None], now: float) -> None:
        """Counts what a new node waits for, and links what waits for it."""
        for requester in node.requesters:
            evaluation = self.nodes.get(requester)
            if evaluation is not None:
                evaluation.children += 1
        failed_input = None
        for path in node.inputs:
            dependency = self.by_drv.get(path)
            if dependency is not None and node.status == "Created":
                dependency.dependents.append(node)
                node.waits_for += 1
                continue
            status, outputs = self._recent.get(path) or _ledger_view(known.get(path))
            if node.status != "Created":
                # It could start, so all was built: what is being built again, or failed to be, is
                # so for another job's sake.
                node.built += outputs if dependency is None else dependency.outputs
            elif status == "Completed":
                node.built += outputs
            elif status is None:
                self._awaited.setdefault(path, {})[node.job_id] = node
                node.waits_for += 1
            else:
                failed_input = path
        for waiter in self._awaited.pop(node.drv_path or "", {}).values():
            node.dependents.append(waiter)
        if failed_input is not None:
            self._end(node, "DependencyFailed", f"input {failed_input} is not built", now)

    def _wait_again(self, node: Node, lacks: frozenset[str] | None) -> bool:
        """Links a job to those of its inputs that are being built again: the ones that make what
        it lacks, or all. Whether there are any."""
        for path in node.inputs:
            dependency = self.by_drv.get(path)
            if dependency is None or not (lacks is None or lacks.intersection(dependency.outputs)):
                continue
            dependency.dependents.append(node)
            node.waits_for += 1
        if node.waits_for:
            node.retry_at = None
            self._set_status(node, "Created")
        return node.waits_for > 0

    def _start(self, node: Node, now: float) -> None:
        """Nothing stands in the way of the job any more: it is `Queued` and a candidate."""
        if node.ready_at is None:
            node.ready_at = now
        node.retry_at = None
        self._set_status(node, "Queued")
        self._record(node, now)
        self._enter(node)

    def _enter(self, node: Node) -> None:
        self._out.append(Enter(pool_entry(node, self.sizes)))

    def _end(
        self,
        node: Node,
        status: Status,
        error: str | None,
        now: float,
        *,
        spare: frozenset[str] = frozenset(),
    ) -> None:
        """Gives a job its terminal status, and what needs it its own; iterative, since chains
        are as long as graphs are deep. Jobs in `spare` are ended by the caller."""
        stack: list[tuple[Node, Status, str | None]] = [(node, status, error)]
        evaluations: list[Node] = []
        while stack:
            node, status, error = stack.pop()
            if self.nodes.pop(node.job_id, None) is None:
                continue
            if node.drv_path is not None:
                del self.by_drv[node.drv_path]
                if self._admissions:
                    self._recent[node.drv_path] = (status, node.outputs)
            self._await_nothing(node)
            if node.status == "Queued":
                self._out.append(Leave(node.job_id))
            node.error, node.retry_at = error, None
            self._set_status(node, status)
            self._record(node, now)
            for requester in node.requesters:
                evaluation = self.nodes.get(requester)
                if evaluation is not None:
                    evaluation.children -= 1
                    evaluation.failed_children += status != "Completed"
                    evaluations.append(evaluation)
            for dependent in node.dependents:
                if not self._is_here(dependent):
                    continue
                if status == "Completed":
                    dependent.built += node.outputs
                    dependent.waits_for -= 1
                    if not dependent.waits_for:
                        self._start(dependent, now)
                elif dependent.job_id not in spare:
                    why = f"input {node.name} ({node.job_id}) ended {status}"
                    stack.append((dependent, "DependencyFailed", why))
        for evaluation in evaluations:
            self._settle_evaluation(evaluation, now)

    def _await_nothing(self, node: Node) -> None:
        for path in node.inputs if self._awaited else ():
            waiters = self._awaited.get(path, {})
            if waiters.pop(node.job_id, None) is not None and not waiters:
                del self._awaited[path]

    def _settle_evaluation(self, node: Node, now: float) -> None:
        """Ends an evaluation that is done and whose builds have all ended."""
        if not node.evaluated or node.admissions or node.job_id not in self.nodes:
            return
        for path, waiters in list(self._awaited.items()):
            for waiter in list(waiters.values()):
                if node.job_id in waiter.requesters and self._is_here(waiter):
                    self._end(waiter, "DependencyFailed", f"input {path} was never reported", now)
        if node.children:
            self._break_cycles(node, now)
        if node.children or node.job_id not in self.nodes:
            return
        if node.broken is not None:
            self._end(node, "Failed", node.broken, now)
        elif node.failed_children:
            self._end(node, "Failed", f"{node.failed_children} of its builds did not complete", now)
        else:
            self._end(node, "Completed", None, now)

    def _break_cycles(self, evaluation: Node, now: float) -> None:
        """Fails what can never start because batches of an evaluation need each other."""
        if not evaluation.unchecked:
            return
        evaluation.unchecked = False
        waits = {n.job_id: n.waits_for for n in self.nodes.values() if n.kind == "build"}
        ready = [n for n in self.nodes.values() if n.kind == "build" and not n.waits_for]
        while ready:
            node = ready.pop()
            del waits[node.job_id]
            for dependent in node.dependents:
                if dependent.job_id in waits and self._is_here(dependent):
                    waits[dependent.job_id] -= 1
                    if not waits[dependent.job_id]:
                        ready.append(dependent)
        awaited = {job_id for waiters in self._awaited.values() for job_id in waiters}
        if awaited:
            return  # not a cycle: other evaluations have yet to report inputs
        for job_id in waits:
            if job_id in self.nodes and evaluation.job_id in self.nodes[job_id].requesters:
                why = "its inputs need each other in a cycle"
                self._end(self.nodes[job_id], "DependencyFailed", why, now)

    def _is_here(self, node: Node) -> bool:
        """Whether it has not ended. By identity: a job that is queued again is a new node,
        while inputs of the old one that are still open go on naming it."""
        return self.nodes.get(node.job_id) is node

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

    def _set_status(self, node: Node, status: Status) -> None:
        self.counts[node.status] -= 1
        self.counts[status] += 1
        node.status = status

    def _record(self, node: Node, now: float) -> None:
        self._out.append(
            Record(
                SetJob(
                    job_id=node.job_id,
                    status=node.status,
                    at=now,
                    attempts=node.attempts,
                    losses=node.losses,
                    ready_at=node.ready_at,
                    retry_at=node.retry_at,
                    error=node.error,
                )
            )
        )

    def _flush(self) -> list[Effect]:
        out, self._out = self._out, []
        return out

    def check(self) -> None:
        """Asserts the graph's invariants."""
        for node in self.nodes.values():
            assert node.status not in TERMINAL, node
            assert node.drv_path is None or self.by_drv[node.drv_path] is node
            assert node.waits_for >= 0
            assert (node.status == "Created") == (node.waits_for > 0), node
        here = self._is_here
        waiting = Counter(d.job_id for n in self.nodes.values() for d in n.dependents if here(d))
        waiting.update(job_id for waiters in self._awaited.values() for job_id in waiters)
        for node in self.nodes.values():
            assert node.waits_for == waiting[node.job_id], node


def _ledger_view(known: Known | None) -> tuple[Status | None, tuple[str, ...]]:
    return (None, ()) if known is None else (known.status, known.outputs)
