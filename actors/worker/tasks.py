"""The jobs of one worker: held, running, stopping, or ended and not yet confirmed.

Only `JobTable` changes them; the core decides. A slot of a job's kind is used from `hold` or
`run` until `end`, so also while its processes are being stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from actors.worker.events import Assignment
from actors.worker.executors.base import MAX_ERROR_CHARACTERS, Built, Evaluated, Failed, Outcome
from transport import messages as m


class Stop(Struct, frozen=True):
    """Why a job is being stopped; without a kind nothing is reported of it."""

    kind: m.FailureKind | None
    reason: str


SILENTLY = Stop(None, "its claim is not ours any more")


@dataclass(slots=True)
class Task:
    """A job in a slot."""

    assignment: Assignment
    hold_until: float | None = None
    """A cluster member that must not run yet."""
    stop: Stop | None = None
    replay: list[m.Message] = field(default_factory=list)
    """Batches of an evaluation: sent again in a new session, for who knows what arrived."""
    unsent_log_bytes: int = 0
    unsent_signals: list[m.ClusterSignal] = field(default_factory=list)
    """Of a cluster member, while there is no session."""
    progress_at: float | None = None

    @property
    def is_held(self) -> bool:
        return self.hold_until is not None


class Report(Struct, frozen=True):
    """A final report that the server has not confirmed."""

    job_id: str
    assignment_id: str
    messages: list[m.Message]


class JobTable:
    """Every job of this worker, by assignment id."""

    def __init__(self, slots: dict[m.Kind, int]) -> None:
        self.slots = slots
        self.tasks: dict[str, Task] = {}
        self.reports: dict[str, Report] = {}
        self._used: dict[m.Kind, int] = dict.fromkeys(slots, 0)

    def free(self, kind: m.Kind) -> int:
        return self.slots[kind] - self._used[kind]

    def held(self) -> list[Task]:
        return [task for task in self.tasks.values() if task.is_held]

    def running(self) -> list[Task]:
        """Also those that are being stopped."""
        return [task for task in self.tasks.values() if not task.is_held]

    def of_attempt(self, attempt: str) -> Task | None:
        for task in self.tasks.values():
            seat = task.assignment.seat
            if seat is not None and seat.attempt == attempt:
                return task
        return None

    def of_job(self, job_id: str) -> Task | None:
        for task in self.tasks.values():
            if task.assignment.job_id == job_id:
                return task
        return None

    def claims(self) -> list[m.ClaimRef]:
        """What a new session names: jobs that run, and reports without an answer."""
        running = [t.assignment for t in self.running() if t.stop is None or t.stop.kind]
        return [
            *(m.ClaimRef(c.job_id, c.assignment_id) for c in running),
            *(m.ClaimRef(r.job_id, r.assignment_id) for r in self.reports.values()),
        ]

    def take(self, assignment: Assignment, hold_until: float | None) -> Task:
        assert assignment.assignment_id not in self.tasks
        task = Task(assignment, hold_until)
        self.tasks[assignment.assignment_id] = task
        self._used[assignment.kind] += 1
        return task

    def release(self, task: Task) -> None:
        """Frees the slot."""
        del self.tasks[task.assignment.assignment_id]
        self._used[task.assignment.kind] -= 1

    def finish(self, task: Task, outcome: Outcome | None) -> list[m.Message]:
        """Frees the slot; returns the final report, which is kept until it is confirmed."""
        self.release(task)
        messages = final_report(task, outcome)
        if messages:
            claim = task.assignment
            self.reports[claim.assignment_id] = Report(
                claim.job_id, claim.assignment_id, [*task.replay, *messages]
            )
        return messages

    def check(self) -> None:
        """Asserts what always holds."""
        for kind, slots in self.slots.items():
            used = sum(t.assignment.kind == kind for t in self.tasks.values())
            assert used == self._used[kind] <= slots, (kind, used, self._used, slots)
        assert not self.tasks.keys() & self.reports.keys()
        attempts = [t.assignment.seat.attempt for t in self.tasks.values() if t.assignment.seat]
        assert len(attempts) == len(set(attempts))
        for task in self.held():
            assert task.assignment.seat is not None
            assert task.stop is None


def final_report(task: Task, outcome: Outcome | None) -> list[m.Message]:
    """What the server is told of a job that ended; nothing of one that was stopped silently."""
    claim, stop = task.assignment, task.stop
    ids = {"job_id": claim.job_id, "assignment_id": claim.assignment_id}
    if stop is not None and stop.kind is None:
        return []
    # A job that was done before the worker's own end reached it is done.
    is_done = isinstance(outcome, Built | Evaluated)
    if stop is not None and not (is_done and stop.kind == "Canceled"):
        metrics = outcome.metrics if isinstance(outcome, Built | Failed) else None
        return [_failed(ids, Failed(stop.kind or "Aborted", stop.reason, metrics=metrics))]
    match outcome:
        case Built(outputs, substituted, metrics, spans):
            output = m.BuildOutput(outputs=outputs, substituted=substituted, metrics=metrics)
            return [m.JobUpdate(**ids, update=output), m.JobCompleted(**ids, spans=spans or None)]
        case Evaluated(spans):
            return [m.JobCompleted(**ids, spans=spans or None)]
        case Failed():
            return [_failed(ids, outcome)]
        case None:
            return [_failed(ids, Failed("Canceled", "the job was stopped by the worker"))]


def _failed(ids: dict[str, str], outcome: Failed) -> m.JobFailed:
    return m.JobFailed(
        **ids,
        # File names in it may be no UTF-8.
        error=outcome.error[:MAX_ERROR_CHARACTERS].encode(errors="replace").decode(),
        kind=outcome.kind,
        missing_paths=outcome.missing_paths or None,
        spans=outcome.spans or None,
        metrics=outcome.metrics,
    )
