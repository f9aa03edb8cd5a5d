"""How a running job reports to the core: `ReportingContext`, and the task around an executor."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

import trio

from actors.worker import events as e
from actors.worker.executors.base import Executor, Failed, Outcome, Spans
from actors.worker.signals import Member, Signal
from transport import messages as m

log = logging.getLogger("headrace.worker")

ANSWER_SECS = 10.0

Report = Callable[[e.Event], Awaitable[None]]


class Questions:
    """What running evaluations have asked the server. An answer that does not come within
    `ANSWER_SECS`, for the connection was lost, is taken as 'none': what is known is only reported
    again."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, tuple[trio.Event, list[str]]] = {}

    async def ask(self, report: Report, assignment_id: str, drv_paths: list[str]) -> set[str]:
        self._next += 1
        number, answered, known = self._next, trio.Event(), list[str]()
        self._open[number] = answered, known
        try:
            await report(e.JobAsked(assignment_id, number, drv_paths))
            with trio.move_on_after(ANSWER_SECS):
                await answered.wait()
        finally:
            del self._open[number]
        return set(known)

    def answered(self, answer: e.JobAnswered) -> None:
        """The server's word; nobody may be waiting for it any more."""
        if answer.query_id in self._open:
            event, known = self._open[answer.query_id]
            known.extend(answer.known)
            event.set()


class ReportingContext:
    """The `JobContext` of one job. `report` waits while the core or the server is behind."""

    def __init__(
        self,
        assignment: e.Assignment,
        report: Report,
        peaks: dict[str, int],
        questions: Questions,
        roster: Sequence[m.RosterEntry] = (),
    ) -> None:
        self._assignment = assignment
        self._report = report
        self._peaks = peaks
        self._questions = questions
        self.spans = Spans()
        seat = assignment.seat
        self.member = None if seat is None else Member(seat, roster, self._signal)

    @property
    def job_id(self) -> str:
        return self._assignment.job_id

    @property
    def assignment_id(self) -> str:
        return self._assignment.assignment_id

    async def _signal(self, signal: Signal) -> None:
        await self._report(e.SignalSent(self.assignment_id, signal.peer, signal.payload))

    async def log(self, data: bytes) -> None:
        await self._report(e.JobLogged(self.assignment_id, data))

    async def update(self, update: m.AnyUpdate) -> None:
        await self._report(e.JobUpdated(self.assignment_id, update))

    async def advance_build(
        self,
        phase: Literal["prefetch", "build", "upload"],
        *,
        bytes_done: int | None = None,
        bytes_total: int | None = None,
        paths_done: int | None = None,
        paths_total: int | None = None,
    ) -> None:
        await self._report(
            e.BuildAdvanced(
                self.assignment_id, phase, bytes_done, bytes_total, paths_done, paths_total
            )
        )

    async def known(self, drv_paths: Sequence[str]) -> set[str]:
        return await self._questions.ask(self._report, self.assignment_id, list(drv_paths))

    async def advance_eval(self, derivations: int) -> None:
        await self._report(e.EvalAdvanced(self.assignment_id, derivations))

    def observe_peak(self, ram_mb: int) -> None:
        self._peaks[self.job_id] = max(ram_mb, self._peaks.get(self.job_id, 0))


async def run_job(
    executor: Executor, assignment: e.Assignment, context: ReportingContext
) -> Outcome | None:
    """Runs one job to its outcome. An executor's bug fails this job and nothing else."""
    try:
        if isinstance(assignment.job, m.BuildJob):
            return await executor.run_build(assignment.job, context)
        return await executor.run_eval(assignment.job, context)
    except Exception as error:
        log.exception("job %s failed inside the worker", assignment.job_id)
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        return Failed("Transient", f"internal error of the worker: {text}")
