"""What a started attempt comes to. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from actors.ledger.records import AttemptOutcome, ClusterStatus
from actors.server.clusters.model import Attempt

Kind = Literal["Complete", "Retry", "Fail", "Abort"]

OUTCOMES: dict[Kind, AttemptOutcome] = {
    "Complete": "Succeeded", "Retry": "Failed", "Fail": "Failed", "Abort": "Aborted",
}  # fmt: skip
STATUSES: dict[Kind, ClusterStatus] = {
    "Complete": "Completed", "Retry": "Queued", "Fail": "Failed", "Abort": "Aborted",
}  # fmt: skip


class Verdict(Struct, frozen=True):
    """How the attempt ends, with the reason for people."""

    kind: Kind
    reason: str


def decide(attempt: Attempt, *, can_retry: bool) -> Verdict | None:
    """The verdict once a report decides; None while the others are waited for.

    To be asked after each result: the first deciding one decides. `can_retry` says whether every
    member can still start.
    """
    cluster = attempt.cluster
    if cluster.doom is not None:
        kind: Kind = "Abort" if cluster.doom.status == "Aborted" else "Fail"
        return Verdict(kind, cluster.doom.reason)
    for member in cluster.members:
        result = attempt.results.get(member.job_id)
        if result is None:
            continue
        name = f"member {member.role}[{member.index}]"
        if result.status != "Completed":
            why = f"{name} failed: {result.error or result.status}"
            return Verdict("Retry" if cluster.retry_budget and can_retry else "Fail", why)
        if member.primary:
            return Verdict("Complete", f"the primary {name} completed")
    if len(attempt.results) == len(cluster.members):
        return Verdict("Complete", "every member completed")
    return None
