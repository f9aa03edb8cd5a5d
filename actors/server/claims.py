"""One open assignment, as the server holds it in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from actors.ledger.records import ClaimRecord
from actors.server.model import PoolEntry
from transport import messages as m

State = Literal["claiming", "unanswered", "accepted"]


@dataclass(slots=True, eq=False)
class Claim:
    """From the pick to the close of its row. The assigner alone changes it."""

    assignment_id: str
    job_id: str
    kind: m.Kind
    worker: str
    session: str | None
    """The session that holds it; none while its worker is away."""
    claimed_at: float
    entry: PoolEntry | None
    """The candidate it was; none when it was taken over from the ledger."""
    state: State = "claiming"
    answer_by: float = math.inf
    abort_by: float = math.inf
    abort_reason: str | None = None
    blames_job: bool = True
    """Whether losing its worker counts as one loss of the job."""
    tries: int = 1
    reported: m.Score | None = None
    """What the worker had reported of it."""
    total: float = 0.0
    scores: dict[str, float] | None = None
    progress: m.BuildProgress | m.EvalProgress | None = None
    peak_ram_mb: int | None = None
    """Observed so far."""
    project: str = ""
    predicted_mb: float = 0.0
    """Expected peak memory of a build; 0 = no prediction."""
    phase: str = ""
    """Of a build, as its worker last said."""
    rejected: tuple[tuple[str, float], ...] = ()
    """The next best candidates and their totals."""
    output: m.BuildOutput | None = None
    attempt: str | None = None
    """Of a cluster member."""

    def record(self, server: str) -> ClaimRecord:
        """Its row in the ledger."""
        return ClaimRecord(
            assignment_id=self.assignment_id,
            job_id=self.job_id,
            worker=self.worker,
            session=self.session or "",
            server=server,
            claimed_at=self.claimed_at,
            attempt=self.attempt,
        )


def breakdown(claim: Claim) -> dict[str, Any]:
    """Why it was the best, as the ledger keeps it."""
    reported = claim.reported
    return {
        "total": claim.total,
        "rules": claim.scores or {},
        "rejected": claim.rejected,
        "missing": reported and (reported.missing_nar_size, reported.missing_count),
    }
