"""A cluster and its attempt as the server holds them in memory. The coordinator alone changes
them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from actors.ledger.records import ClusterRecord, ClusterStatus, MemberRecord, Reported
from actors.server.claims import Claim

Phase = Literal[
    "opening",  # its rows are on their way to the ledger
    "preparing",  # seats are held until every member has accepted
    "starting",  # every member accepted, and that is on its way to the ledger
    "started",
]


class Result(Struct, frozen=True):
    """What came of one member of an attempt."""

    status: Literal["Completed", "Failed", "TimedOut"]
    error: str | None = None


Doomed = Literal["Failed", "Aborted"]


class Doom(Struct, frozen=True):
    """What is to become of a cluster as soon as its attempt can be closed."""

    status: Doomed
    reason: str


class Ended(Struct, frozen=True):
    """A cluster that has ended, for people."""

    cluster_id: str
    status: str
    attempt: str | None
    """That decided it."""
    members: tuple[MemberRecord, ...]


@dataclass(slots=True, eq=False)
class Cluster:
    """One that has not ended."""

    cluster_id: str
    members: tuple[MemberRecord, ...]
    same_zone: bool
    retry_budget: int
    is_prioritized: bool
    created_at: float
    status: ClusterStatus = "Queued"
    attempts: int = 0
    not_before: float = -math.inf
    """It is not placed earlier."""
    last_failure: str | None = None
    """Of its newest attempt."""
    attempt: Attempt | None = None
    doom: Doom | None = None
    reserves_at: float = -math.inf
    """It reserves no seats earlier."""


@dataclass(slots=True, eq=False)
class Seat:
    """A member of an attempt on its worker."""

    member: MemberRecord
    claim: Claim
    has_accepted: bool = False
    is_started: bool = False
    """`StartCluster` went out to it."""


@dataclass(slots=True, eq=False)
class Attempt:
    """One try of a cluster, open."""

    attempt_id: str
    cluster: Cluster
    seats: dict[str, Seat]
    """By job id; after a restart only of members whose claims are open."""
    created_at: float
    phase: Phase = "opening"
    prepare_by: float = math.inf
    started_at: float | None = None
    results: dict[str, Result] = field(default_factory=dict)
    """By job id, in the order of the reports."""


class Opening(Struct, frozen=True):
    """Awaits the commit of an attempt's rows."""

    attempt: Attempt


class Starting(Struct, frozen=True):
    """Awaits the commit of an attempt's start."""

    attempt: Attempt


_STATUSES: dict[str, Literal["Completed", "TimedOut"]] = {
    "Completed": "Completed", "TimedOut": "TimedOut",
}  # fmt: skip


def result_of(reported: Reported) -> Result:
    """What a member's closed claim says."""
    return Result(_STATUSES.get(reported.outcome, "Failed"), reported.error or reported.outcome)


def cluster_of(record: ClusterRecord) -> Cluster:
    """The in-memory form of a record that has not ended."""
    return Cluster(
        cluster_id=record.cluster_id,
        members=record.members,
        same_zone=record.same_zone,
        retry_budget=record.retry_budget,
        is_prioritized=record.prioritized,
        created_at=record.created_at,
        status=record.status,
        attempts=record.attempts,
    )
