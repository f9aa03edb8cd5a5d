"""What workers report of the jobs they hold, turned into what becomes of the jobs.

Rules of the file:

- A report counts only under the ids of the open claim that its session holds; any other is
  stale: counted, and without effect.
- A claim ends in `_close` alone: its row is closed, its slot is free, and then the feeder says
  what becomes of the job, in the same transaction.
- `Recorded` goes out when that transaction is durable.
"""

from __future__ import annotations

from typing import Literal

from actors.ledger.records import AddMessages, AddMetric, CloseClaim, Outcome
from actors.server.admissions import Admissions
from actors.server.assigner import Assigner
from actors.server.claims import Claim
from actors.server.clusters.coordinator import Coordinator
from actors.server.clusters.model import Result
from actors.server.effects import Effect, Log, Record, Released, Tell, TellDurable
from actors.server.feeder import Feeder
from actors.server.scoring.columns import CONTENTION_PER_BUILD
from actors.server.sessions import Session
from transport import messages as m

Report = (
    m.AssignJobResponse | m.JobUpdate | m.JobCompleted | m.JobFailed | m.BuildProgress
    | m.EvalProgress | m.QueryKnownDerivations | m.LogChunk
)  # fmt: skip

REPORTS = (
    m.AssignJobResponse, m.JobUpdate, m.JobCompleted, m.JobFailed, m.BuildProgress,
    m.EvalProgress, m.QueryKnownDerivations, m.LogChunk,
)  # fmt: skip

_OUTCOMES: dict[str, Outcome] = {
    "Transient": "Transient",
    "Permanent": "Failed",
    "Timeout": "TimedOut",
    "InputsUnavailable": "InputsUnavailable",
    "Aborted": "Aborted",
    "Canceled": "Canceled",
}


class Reports:
    """See the rules above. `stale` counts the reports that were dropped."""

    def __init__(
        self,
        assigner: Assigner,
        feeder: Feeder,
        admissions: Admissions,
        coordinator: Coordinator,
    ) -> None:
        self._assigner = assigner
        self._feeder = feeder
        self._admissions = admissions
        self._coordinator = coordinator
        self.stale = 0
        # Evaluations that are done while derivations of theirs are on the way to the ledger.
        self._held: dict[str, tuple[Session, m.JobCompleted]] = {}

    @property
    def holds_any(self) -> bool:
        """Whether completions wait for what they promise to become durable."""
        return bool(self._held)

    def take(self, session: Session, report: Report, now: float) -> list[Effect]:
        """One report of a session."""
        claim = self._assigner.find(session, report.job_id, report.assignment_id)
        if claim is None:
            self.stale += 1
            if isinstance(report, m.AssignJobResponse) and report.accepted:
                return self._coordinator.late(session, report.assignment_id)
            return []
        match report:
            case m.AssignJobResponse():
                return self._answered(session, claim, report, now)
            case m.JobUpdate():
                return self._updated(session, claim, report.update, now)
            case m.JobCompleted():
                return self._completed(session, claim, report, now)
            case m.JobFailed():
                return self._failed(session, claim, report, now)
            case m.BuildProgress() | m.EvalProgress():
                self._assigner.progressed(claim, report)
                return []
            case m.LogChunk():
                return [Log(claim.job_id, claim.assignment_id, report.data)]
            case m.QueryKnownDerivations():
                also_wanted, requester = self._feeder.also_wanted, claim.job_id
                known = [path for path in report.drv_paths if also_wanted(path, requester)]
                answer = m.KnownDerivations(query_id=report.query_id, known=known)
                return [*self._feeder.flush(), Tell(session.peer, answer)]

    def lost(self, claim: Claim, now: float, *, why: str, blame: bool) -> list[Effect]:
        """The claim's worker will not report any more; the claim was released."""
        closed = self._close(claim, "Abandoned", why, now)
        if claim.attempt is not None:
            return [*closed, *self._coordinator.ended(claim, Result("Failed", why), now)]
        lost = blame and claim.blames_job and claim.state == "accepted"
        return [*closed, *self._feeder.returned(claim.job_id, now, lost=lost, why=why)]

    def unanswered(self, claim: Claim, now: float) -> list[Effect]:
        """The worker did not answer `AssignJob` in time."""
        if claim.attempt is not None:
            # Taken over by a restarted dispatch, which may have missed its report.
            self._assigner.release(claim)
            closed = self._close(claim, "Unanswered", None, now)
            lost = Result("Failed", f"worker {claim.worker} did not answer after a restart")
            return [*closed, *self._coordinator.ended(claim, lost, now)]
        self._assigner.declined(claim, now)
        closed = self._close(claim, "Unanswered", None, now)
        return [*closed, *self._feeder.returned(claim.job_id, now, lost=False, why="no answer")]

    def unconfirmed(self, claim: Claim, now: float) -> list[Effect]:
        """The worker never confirmed an abort."""
        self._assigner.release(claim)
        closed = self._close(claim, "Aborted", "the abort was not confirmed", now)
        if claim.attempt is not None:
            return [*closed, *self._coordinator.ended(claim, Result("Failed"), now)]
        return [*closed, *self._feeder.aborted(claim.job_id, now)]

    def undeliverable(self, claim: Claim, now: float) -> list[Effect]:
        """The `AssignJob` could not be sent, or is not wanted any more."""
        self._assigner.release(claim)
        closed = self._close(claim, "Undeliverable", None, now)
        if claim.attempt is not None:
            lost = Result("Failed", f"worker {claim.worker} could not be told")
            return [*closed, *self._coordinator.ended(claim, lost, now)]
        return [*closed, *self._feeder.returned(claim.job_id, now, lost=False, why="not sent")]

    def admitted(self, requester: str, now: float) -> list[Effect]:
        """Derivations of an evaluation are in; its held completion may count now."""
        held = self._held.get(requester)
        node = self._feeder.nodes.get(requester)
        if held is None or (node is not None and node.admissions):
            return []
        del self._held[requester]
        session, report = held
        claim = self._assigner.claims.get(requester)
        if claim is None or claim.assignment_id != report.assignment_id:
            return []
        return self._completed(session, claim, report, now)

    # -- one kind of report each -------------------------------------------------------------

    def _answered(
        self, session: Session, claim: Claim, answer: m.AssignJobResponse, now: float
    ) -> list[Effect]:
        if answer.accepted:
            return self._accepted(session, claim, now)
        if claim.state != "unanswered":
            self.stale += 1
            return []
        if claim.attempt is not None:
            self._assigner.release(claim)
            closed = self._close(claim, "Declined", answer.reason, now)
            why = f"worker {claim.worker} declined: {answer.reason or 'no reason given'}"
            return [*closed, *self._coordinator.ended(claim, Result("Failed", why), now)]
        self._assigner.declined(claim, now)
        closed = self._close(claim, "Declined", answer.reason, now)
        return [*closed, *self._feeder.returned(claim.job_id, now, lost=False, why="declined")]

    def _accepted(self, session: Session, claim: Claim, now: float) -> list[Effect]:
        if claim.state != "unanswered":
            return []
        self._assigner.accepted(session, claim)
        return self._coordinator.accepted(claim, now)

    def _updated(
        self, session: Session, claim: Claim, update: m.AnyUpdate, now: float
    ) -> list[Effect]:
        return [
            *self._accepted(session, claim, now),
            *self._took(session, claim, update, now),
        ]

    def _took(
        self, session: Session, claim: Claim, update: m.AnyUpdate, now: float
    ) -> list[Effect]:
        match update:
            case m.EvalResult():
                return self._evaluated(session, claim, update, now)
            case m.BuildOutput():
                claim.output = update
                return self._feeder.outputs_reported(update.outputs)
            case m.Building() | m.Evaluating() | m.Fetching():
                if claim.abort_reason is not None:
                    return [Tell(session.peer, abort_message(claim))]
                return []

    def _evaluated(
        self, session: Session, claim: Claim, result: m.EvalResult, now: float
    ) -> list[Effect]:
        if claim.kind != "eval":
            text = "JobUpdate: `update` EvalResult on a build"
            return [Tell(session.peer, m.Error(code=400, message=text))]
        effects: list[Effect] = []
        if result.warnings or result.errors or result.targets:
            told = AddMessages(
                claim.job_id, tuple(result.warnings), tuple(result.errors),
                tuple((result.targets or {}).items()),
            )  # fmt: skip
            effects.append(Record(told))
        if result.derivations and claim.abort_reason is None:
            project = self._feeder.nodes[claim.job_id].cls.project
            effects += self._admissions.evaluated(claim.job_id, project, result.derivations, now)
        return effects

    def _completed(
        self, session: Session, claim: Claim, report: m.JobCompleted, now: float
    ) -> list[Effect]:
        if self._feeder.nodes[claim.job_id].admissions:
            # `Recorded` promises that its derivations are durable too. A dispatch that is
            # restarted meanwhile must not take the job for one that still runs.
            self._held[claim.job_id] = (session, report)
            session.accepted.discard(claim.assignment_id)
            return []
        fetched = self._assigner.finished(claim, session, report.spans or ())
        self._assigner.release(claim)
        effects = self._close(claim, "Completed", None, now)
        effects += map(Record, fetched)
        output = claim.output
        if claim.kind == "eval":
            effects += self._learn(session, claim, _duration(claim, now), now)
        elif output is not None and output.metrics is not None and not output.substituted:
            effects += self._learn(session, claim, output.metrics, now)
        if claim.attempt is not None:
            effects += self._coordinator.ended(claim, Result("Completed"), now)
        else:
            effects += self._feeder.completed(claim.job_id, now)
        return [*effects, _recorded(session, claim)]

    def _failed(
        self, session: Session, claim: Claim, report: m.JobFailed, now: float
    ) -> list[Effect]:
        self._held.pop(claim.job_id, None)
        self._assigner.release(claim)
        effects = self._close(claim, _OUTCOMES[report.kind], report.error, now)
        metrics = report.metrics
        if claim.kind == "build" and metrics is not None and metrics.oom:
            effects += self._learn(session, claim, metrics, now)
        if claim.attempt is not None:
            status: Literal["TimedOut", "Failed"] = (
                "TimedOut" if report.kind == "Timeout" else "Failed"
            )
            effects += self._coordinator.ended(claim, Result(status, report.error), now)
        elif report.kind not in ("Aborted", "Canceled"):
            effects += self._feeder.failed(
                claim.job_id, report.kind, report.error, now, missing=report.missing_paths or ()
            )
        elif claim.abort_reason is not None:
            effects += self._feeder.aborted(claim.job_id, now)
        else:
            lost = not (report.kind == "Canceled" and session.draining)
            effects += self._feeder.returned(claim.job_id, now, lost=lost, why=report.error)
        return [*effects, _recorded(session, claim)]

    def _close(self, claim: Claim, outcome: Outcome, error: str | None, now: float) -> list[Effect]:
        assert self._assigner.claims.get(claim.job_id) is not claim, "released first"
        closed = CloseClaim(claim.job_id, claim.assignment_id, now, outcome, error)
        return [Record(closed), Released(claim.worker)]

    def _learn(
        self, session: Session, claim: Claim, metrics: m.BuildMetrics, now: float
    ) -> list[Effect]:
        """What ran for real becomes history: here, and in the ledger for later servers."""
        node = self._feeder.nodes[claim.job_id]
        others = self._assigner.open_builds(session.worker)
        metric = AddMetric(
            assignment_id=claim.assignment_id,
            package=node.package,
            system=node.cls.system,
            at=now,
            wall_time_ms=metrics.wall_time_ms,
            cpu_time_ms=metrics.cpu_time_ms,
            peak_ram_mb=metrics.peak_ram_mb,
            output_nar_size=metrics.output_nar_size,
            oom=bool(metrics.oom),
            contention=1 + CONTENTION_PER_BUILD * others,
            core_score=session.announced.cpu_core_score if session.announced else None,
        )
        self._assigner.learn(metric)
        return [Record(metric)]


def _duration(claim: Claim, now: float) -> m.BuildMetrics:
    """Of an evaluation that is done, all that is known is how long it took."""
    return m.BuildMetrics(wall_time_ms=round(max(0.0, now - claim.claimed_at) * 1000))


def abort_message(claim: Claim, reason: str | None = None) -> m.AbortJob | m.AbortCluster:
    """Tells the claim's worker to stop the job."""
    reason = reason or claim.abort_reason or "not wanted any more"
    if claim.attempt is not None:
        return m.AbortCluster(claim.attempt, reason)
    return m.AbortJob(claim.job_id, claim.assignment_id, reason)


def _recorded(session: Session, claim: Claim) -> TellDurable:
    message = m.Recorded(job_id=claim.job_id, assignment_id=claim.assignment_id)
    return TellDurable(session.peer, message)
