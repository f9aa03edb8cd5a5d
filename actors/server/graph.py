"""The graph of all jobs that have not ended: what waits for what, what starts, what ends.

Rules of the file:

- A node lives here from its admission to its terminal status. `set_status` alone changes a
  status, `end` alone removes a node.
- A build can start when `waits_for` is 0. Whoever ends a build lowers it in its dependents, so
  a chain of builds advances with the report and never waits for a tick.
- Every change of a job goes out as one `Record`; the order of records is the order of changes,
  so a ledger that holds a prefix of them is a state this graph was in.
- Effects collect in `out`, in the order to be performed, until `flush`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from actors.ledger.records import TERMINAL, Known, SetJob, Status
from actors.server.effects import Effect, Enter, Leave, Record
from actors.server.jobs import Node, pool_entry


class JobGraph:
    """See the rules above."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        """By job id."""
        self.by_drv: dict[str, Node] = {}
        self.counts: Counter[str] = Counter()
        """Jobs by status, ended ones included."""
        self.sizes: dict[str, int] = {}
        """NAR sizes in bytes by path."""
        self.awaited: dict[str, dict[str, Node]] = {}
        """By the drv path of an input that nobody reported yet: who waits for it, by job id."""
        self.recent: dict[str, tuple[Status, tuple[str, ...]]] = {}
        """What ended while an admission is between its look at the ledger and its merge."""
        self.admissions = 0
        """On their way through the ledger."""
        self.out: list[Effect] = []

    def add(self, node: Node) -> None:
        """A node of its own, not linked yet."""
        self.nodes[node.job_id] = node
        if node.drv_path is not None:
            self.by_drv[node.drv_path] = node

    def link(self, node: Node, known: Mapping[str, Known | None], now: float) -> None:
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
            status, outputs = self.recent.get(path) or _ledger_view(known.get(path))
            if node.status != "Created":
                # It could start, so all was built: what is being built again, or failed to be, is
                # so for another job's sake.
                node.built += outputs if dependency is None else dependency.outputs
            elif status == "Completed":
                node.built += outputs
            elif status is None:
                self.awaited.setdefault(path, {})[node.job_id] = node
                node.waits_for += 1
            else:
                failed_input = path
        for waiter in self.awaited.pop(node.drv_path or "", {}).values():
            node.dependents.append(waiter)
        if failed_input is not None:
            self.end(node, "DependencyFailed", f"input {failed_input} is not built", now)

    def wait_again(self, node: Node, lacks: frozenset[str] | None) -> bool:
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
            self.set_status(node, "Created")
        return node.waits_for > 0

    def start(self, node: Node, now: float) -> None:
        """Nothing stands in the way of the job any more: it is `Queued` and a candidate."""
        if node.ready_at is None:
            node.ready_at = now
        node.retry_at = None
        self.set_status(node, "Queued")
        self.record(node, now)
        self.enter(node)

    def enter(self, node: Node) -> None:
        """It is a candidate."""
        self.out.append(Enter(pool_entry(node, self.sizes)))

    def end(
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
                if self.admissions:
                    self.recent[node.drv_path] = (status, node.outputs)
            self._await_nothing(node)
            if node.status == "Queued":
                self.out.append(Leave(node.job_id))
            node.error, node.retry_at = error, None
            self.set_status(node, status)
            self.record(node, now)
            # Sorted, or the hashes of texts would decide what ends first.
            for requester in sorted(node.requesters):
                evaluation = self.nodes.get(requester)
                if evaluation is not None:
                    evaluation.children -= 1
                    evaluation.failed_children += status != "Completed"
                    evaluations.append(evaluation)
            for dependent in node.dependents:
                if not self.is_here(dependent):
                    continue
                if status == "Completed":
                    dependent.built += node.outputs
                    dependent.waits_for -= 1
                    if not dependent.waits_for:
                        self.start(dependent, now)
                elif dependent.job_id not in spare:
                    why = f"input {node.name} ({node.job_id}) ended {status}"
                    stack.append((dependent, "DependencyFailed", why))
        for evaluation in evaluations:
            self.settle_evaluation(evaluation, now)

    def _await_nothing(self, node: Node) -> None:
        for path in node.inputs if self.awaited else ():
            waiters = self.awaited.get(path, {})
            if waiters.pop(node.job_id, None) is not None and not waiters:
                del self.awaited[path]

    def settle_evaluation(self, node: Node, now: float) -> None:
        """Ends an evaluation that is done and whose builds have all ended."""
        if not node.evaluated or node.admissions or node.job_id not in self.nodes:
            return
        for path, waiters in list(self.awaited.items()):
            for waiter in list(waiters.values()):
                if node.job_id in waiter.requesters and self.is_here(waiter):
                    self.end(waiter, "DependencyFailed", f"input {path} was never reported", now)
        if node.children:
            self._break_cycles(node, now)
        if node.children or node.job_id not in self.nodes:
            return
        if node.broken is not None:
            self.end(node, "Failed", node.broken, now)
        elif node.failed_children:
            self.end(node, "Failed", f"{node.failed_children} of its builds did not complete", now)
        else:
            self.end(node, "Completed", None, now)

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
                if dependent.job_id in waits and self.is_here(dependent):
                    waits[dependent.job_id] -= 1
                    if not waits[dependent.job_id]:
                        ready.append(dependent)
        awaited = {job_id for waiters in self.awaited.values() for job_id in waiters}
        if awaited:
            return  # not a cycle: other evaluations have yet to report inputs
        for job_id in waits:
            if job_id in self.nodes and evaluation.job_id in self.nodes[job_id].requesters:
                why = "its inputs need each other in a cycle"
                self.end(self.nodes[job_id], "DependencyFailed", why, now)

    def is_here(self, node: Node) -> bool:
        """Whether it has not ended. By identity: a job that is queued again is a new node,
        while inputs of the old one that are still open go on naming it."""
        return self.nodes.get(node.job_id) is node

    def set_status(self, node: Node, status: Status) -> None:
        """The only way to change one."""
        self.counts[node.status] -= 1
        self.counts[status] += 1
        node.status = status

    def record(self, node: Node, now: float) -> None:
        """Its state is to be written down."""
        self.out.append(
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

    def flush(self) -> list[Effect]:
        """The effects since the last time, in order."""
        out, self.out = self.out, []
        return out

    def check(self) -> None:
        """Asserts the graph's invariants."""
        for node in self.nodes.values():
            assert node.status not in TERMINAL, node
            assert node.drv_path is None or self.by_drv[node.drv_path] is node
            assert node.waits_for >= 0
            assert (node.status == "Created") == (node.waits_for > 0), node
        here = self.is_here
        waiting = Counter(d.job_id for n in self.nodes.values() for d in n.dependents if here(d))
        waiting.update(job_id for waiters in self.awaited.values() for job_id in waiters)
        for node in self.nodes.values():
            assert node.waits_for == waiting[node.job_id], node


def _ledger_view(known: Known | None) -> tuple[Status | None, tuple[str, ...]]:
    return (None, ()) if known is None else (known.status, known.outputs)
