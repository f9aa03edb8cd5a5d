"""What is written to the ledger and read back: plain values, no SQL.

Times in these records are seconds on the server's monotonic clock. The ledger alone turns them
into wall-clock columns and back (`wall_offset` = wall - monotonic, measured at each call), so a
jump of the wall clock never reaches a core.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Status = Literal[
    "Created",  # a build whose inputs are not built
    "Queued",
    "Building",  # a build with an open claim; an evaluation that waits for its builds
    "Evaluating",  # an evaluation with an open claim
    "Completed",
    "Failed",
    "TimedOut",
    "DependencyFailed",
    "Aborted",
]
TERMINAL: frozenset[str] = frozenset(
    {"Completed", "Failed", "TimedOut", "DependencyFailed", "Aborted"}
)

Outcome = Literal[
    "Completed", "Failed", "TimedOut", "Transient", "InputsUnavailable", "Aborted", "Canceled",
    "Declined", "Unanswered", "Undeliverable", "Abandoned",
]  # fmt: skip

ClusterStatus = Literal["Queued", "Running", "Completed", "Failed", "Aborted"]
AttemptOutcome = Literal["Succeeded", "Failed", "PrepareFailed", "Aborted"]

KEPT_PREFETCHES = 1_000


class JobRecord(Struct, frozen=True):
    """One job as the ledger keeps it."""

    job_id: str
    kind: Literal["eval", "build"]
    project: str
    name: str
    status: Status
    drv_path: str | None
    """Of a build; none for an evaluation."""
    outputs: tuple[str, ...]
    """Output paths of a build, in the order of its output names."""
    payload: bytes
    """CBOR of the `SubmittedJob` or `SubmittedEvaluation`."""
    inputs: tuple[str, ...]
    """drv paths this build waits for, each once. Inputs assumed built are not among them. The
    ledger keeps no order of them."""
    prioritized: bool = False
    interactive: bool = False
    attempts: int = 0
    losses: int = 0
    ready_at: float | None = None
    """When the last dependency finished; none while it cannot start."""
    retry_at: float | None = None
    error: str | None = None
    cluster: str | None = None
    """The cluster that it is a member of; none once that has ended."""


class ClaimRecord(Struct, frozen=True):
    """One open row of `dispatched_job`."""

    assignment_id: str
    job_id: str
    worker: str
    session: str
    server: str
    claimed_at: float
    attempt: str | None = None
    """Of a cluster member."""


class MemberRecord(Struct, frozen=True):
    """One member of a cluster."""

    job_id: str
    role: str
    index: int
    """0.. within the role."""
    primary: bool = False
    pin: str | None = None
    """The worker that it must sit on."""


class ClusterRecord(Struct, frozen=True):
    """One cluster as the ledger keeps it."""

    cluster_id: str
    project: str
    status: ClusterStatus
    members: tuple[MemberRecord, ...]
    same_zone: bool = False
    retry_budget: int = 0
    attempts: int = 0
    prioritized: bool = False
    created_at: float = 0.0
    ended_at: float | None = None
    tried_at: float | None = None
    """When its newest closed attempt was closed."""


class Reported(Struct, frozen=True):
    """A member of an attempt whose claim is closed while the attempt is open."""

    job_id: str
    outcome: Outcome
    error: str | None


class AttemptRecord(Struct, frozen=True):
    """One open attempt; its other members have open claims that bear its id."""

    attempt_id: str
    cluster_id: str
    server: str
    created_at: float
    started_at: float | None
    reported: tuple[Reported, ...] = ()
    """In the order in which they were closed."""


# -- writes: one transaction takes a sequence of them, in order -----------------------------


class OpenClaim(Struct, frozen=True):
    """Claims a `Queued` job: the row goes in and the job becomes `Building` (`Evaluating`
    for an evaluation). Won if the job was still `Queued` and had no open row."""

    claim: ClaimRecord
    score: bytes | None = None
    """CBOR of the score breakdown."""


class OpenAttempt(Struct, frozen=True):
    """Opens an attempt of a `Queued` cluster with the claims of all its members, or does nothing:
    won if all rows went in."""

    attempt_id: str
    cluster_id: str
    server: str
    created_at: float
    claims: tuple[OpenClaim, ...]


class StartAttempt(Struct, frozen=True):
    """Every member accepted: the attempt is started and its cluster `Running`, unless the attempt
    is closed."""

    attempt_id: str
    cluster_id: str
    at: float


class CloseAttempt(Struct, frozen=True):
    """Closes an open attempt; one that is closed already keeps its outcome."""

    attempt_id: str
    at: float
    outcome: AttemptOutcome


class SetCluster(Struct, frozen=True):
    """Sets the mutable columns of a cluster. A terminal status also sets its end time."""

    cluster_id: str
    status: ClusterStatus
    at: float
    retry_budget: int


class CloseClaim(Struct, frozen=True):
    """Closes an open row; a row that is closed already keeps its outcome."""

    job_id: str
    assignment_id: str
    closed_at: float
    outcome: Outcome
    error: str | None = None


class SetJob(Struct, frozen=True):
    """Sets every mutable column of a job. A terminal status also sets its end time."""

    job_id: str
    status: Status
    at: float
    attempts: int
    losses: int
    ready_at: float | None = None
    retry_at: float | None = None
    error: str | None = None


class SetPriority(Struct, frozen=True):
    job_id: str
    prioritized: bool


class SetCordon(Struct, frozen=True):
    """An operator's drain of a worker; lifted with `reason=None`."""

    worker: str
    at: float
    reason: str | None


class AddRequester(Struct, frozen=True):
    job_id: str
    requester: str


class DropRequester(Struct, frozen=True):
    """The submission or evaluation wants none of its jobs any more."""

    requester: str


class SetSizes(Struct, frozen=True):
    """NAR sizes in bytes and hashes that a build reported of its outputs."""

    sizes: tuple[tuple[str, int | None, str | None], ...]


class AddMetric(Struct, frozen=True):
    """One row of `build_metric`, the history that scoring reads."""

    assignment_id: str
    package: str
    system: str
    at: float
    wall_time_ms: int | None
    cpu_time_ms: int | None
    peak_ram_mb: int | None
    output_nar_size: int | None
    oom: bool
    contention: float
    core_score: float | None


class AddPrefetch(Struct, frozen=True):
    """How long a prefetch took beyond the transfer of its bytes; the newest `KEPT_PREFETCHES`
    are kept."""

    paths: int
    secs: float


class SeeWorker(Struct, frozen=True):
    """A worker is, or was just now, here."""

    worker: str
    at: float
    name: str
    capabilities: bytes | None = None
    """CBOR of what it can do; None leaves what is known."""


class AddMessages(Struct, frozen=True):
    """Warnings and errors that an evaluation reported, and what it was asked for."""

    job_id: str
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    targets: tuple[tuple[str, str], ...] = ()
    """(attribute, drv path)."""


Write = (
    OpenClaim | CloseClaim | SetJob | SetPriority | SetCordon | AddRequester | DropRequester
    | SetSizes | AddMetric | AddPrefetch | SeeWorker | AddMessages | OpenAttempt | StartAttempt
    | CloseAttempt | SetCluster
)  # fmt: skip


# -- admission of new jobs -------------------------------------------------------------------


class Admission(Struct, frozen=True):
    """New jobs, taken whole or not at all. Inputs come before what needs them."""

    requester: str
    """Submission id, or the job id of the evaluation that reported them."""
    jobs: tuple[JobRecord, ...]
    """Builds are `Created`, evaluations `Queued`."""
    sizes: tuple[tuple[str, int], ...] = ()
    unknown_inputs: Literal["refuse", "later", "built"] = "refuse"
    """An input that is neither here nor in the ledger: refuse all, expect it in a later
    admission, or take it as built (the edge is dropped)."""
    clusters: tuple[ClusterRecord, ...] = ()
    """`Queued`; their members are among the jobs."""


class Known(Struct, frozen=True):
    """What the ledger already holds of a derivation."""

    job_id: str
    status: Status
    outputs: tuple[str, ...]


class Admitted(Struct, frozen=True):
    """The admission is committed (not yet fsynced)."""

    requester: str
    known: dict[str, Known]
    """By drv path: what the ledger held already of the admission's own derivations and of
    all their inputs, as it stands after the admission (a requeued one is `Created`)."""
    requeued: tuple[JobRecord, ...]
    """Jobs that had ended other than `Completed`: those submitted again, and those that had
    become `DependencyFailed` for their sake; and members of its clusters that had ended, however.
    Now `Created` with attempts and losses 0."""
    dropped_inputs: frozenset[str]
    """Inputs taken as built."""
    requeued_from: dict[str, int] = {}
    """How many of `requeued` had which status before."""
    clusters: tuple[ClusterRecord, ...] = ()
    """Those of the admission, with the ids that their members have in the ledger."""


class Rebuild(Struct, frozen=True):
    """What is built again because a job cannot get it anywhere."""

    job_id: str
    """The job that waits for it."""
    requeued: tuple[JobRecord, ...] = ()
    """Jobs that were `Completed` and are `Created` now, attempts and losses 0. If there are any,
    the job that waits for them is `Created` too."""
    known: dict[str, Known] = {}
    """By drv path: the inputs of these jobs."""
    requesters: tuple[str, ...] = ()
    """Who wants the job, and with it these."""


class PastWait(Struct, frozen=True):
    """How long a build waited before it was assigned."""

    claimed_at: float
    waited: float
    missing: tuple[int, int] | None
    """NAR size in bytes and number of paths that its worker had reported missing."""


class SeenWorker(Struct, frozen=True):
    """A worker that was here once."""

    worker: str
    name: str
    capabilities: bytes
    """CBOR, as in `SeeWorker`."""
    last_seen: float


class Snapshot(Struct, frozen=True):
    """All that a starting server needs."""

    jobs: tuple[JobRecord, ...]
    """Every job that has not ended, in id order."""
    claims: tuple[ClaimRecord, ...]
    requesters: dict[str, tuple[str, ...]]
    """By job id, for the jobs above."""
    failed_children: dict[str, int]
    """By job id of an evaluation above: how many of its jobs ended other than `Completed`."""
    inputs: dict[str, Known | None]
    """By drv path: every input of the jobs above that is not itself among them; none for a
    derivation that no admission brought yet."""
    sizes: dict[str, int]
    """NAR sizes of outputs of the inputs above and of the jobs themselves. What else a job needs
    only its payload names; see `SqliteLedger.sizes_of`."""
    counts: dict[str, int]
    """Jobs by status, ended ones included."""
    cordons: dict[str, str]
    metrics: tuple[AddMetric, ...] = ()
    """The newest builds of each package, and the newest evaluations, oldest first."""
    waits: tuple[PastWait, ...] = ()
    """Of the builds assigned in the last hour, oldest first."""
    workers: tuple[SeenWorker, ...] = ()
    prefetches: tuple[AddPrefetch, ...] = ()
    """The newest, oldest first."""
    clusters: tuple[ClusterRecord, ...] = ()
    """Every cluster that has not ended, and the newest of those that have."""
    attempts: tuple[AttemptRecord, ...] = ()


class Adopted(Struct, frozen=True):
    """What dead servers had open, now this server's."""

    claims: tuple[ClaimRecord, ...]
    attempts: tuple[AttemptRecord, ...]


class ForeignChanges(Struct, frozen=True):
    """What other servers on the same ledger did lately."""

    jobs: tuple[JobRecord, ...]
    """In id order, as they are now."""
    inputs: dict[str, Known]
    """By drv path: the inputs of these jobs."""
    clusters: tuple[ClusterRecord, ...] = ()
    """Those that they brought or changed."""


class EvalTarget(Struct, frozen=True):
    """What an evaluation was asked for; without a job while nobody reported the derivation."""

    attribute: str
    drv_path: str
    job_id: str | None
    status: str | None
    payload: bytes | None


class EvalOutcome(Struct, frozen=True):
    """What became of an evaluation."""

    kind: str
    status: str
    error: str | None
    warnings: tuple[str, ...]
    errors: tuple[str, ...]
    targets: tuple[EvalTarget, ...]
    builds: dict[str, int]
    """How many of its builds have which status."""
    failed: tuple[tuple[str, str, str, str | None], ...]
    """Id, name, status and error of its first builds that failed themselves."""


class JobInfo(Struct, frozen=True):
    """One line of `headrace jobs`."""

    job_id: str
    kind: str
    status: str
    name: str
    worker: str | None
    """Of the newest claim, if any."""
    assignment_id: str | None
    attempts: int
    error: str | None
    drv_path: str | None
    cluster: str | None = None
    """The newest cluster that it is or was a member of."""


class PastClaim(Struct, frozen=True):
    """A row of `dispatched_job`, open or closed."""

    claim: ClaimRecord
    closed_at: float | None
    outcome: Outcome | None
    error: str | None
    score: bytes | None
    """CBOR of the score breakdown."""


class PastAttempt(Struct, frozen=True):
    """A row of `cluster_attempt`, with the seats that its members had."""

    attempt_id: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    outcome: AttemptOutcome | None
    seats: tuple[PastClaim, ...]
