"""Every message of the wire protocol, version 1, as a typed value.

Rules of the file:

- One Struct per message; the class name is the message's `type` on the wire, the
  field names are the wire's field names. Shapes nested in messages have no `type`.
- A field with a default is the wire's `?`: missing and null mean the same.
- Bounds that the protocol states (ids, texts, pages, integers) stand in the type, so that a
  value which passes `convert` is within them and nothing behind the codec checks again.
- Sizes are bytes unless the name ends in `_mb` (2**20 bytes), speeds `_mbps` are megabits
  a second except `disk_speed_mbps` (MiB/s), times end in their unit.

Worker and server messages come first, then the commands' (`Cmd...`), which docs/commands.md
describes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

PROTOCOL_VERSIONS = (1, 1)
"""Oldest and newest protocol version that this program speaks."""

# libzmq cuts a connection that sends a larger frame (MAXMSGSIZE).
MAX_FRAME_BYTES = 8 * 2**20
MAX_FRAMES = 256
MAX_HANDSHAKE_FRAME_BYTES = 64 * 2**10
MAX_DEPTH = 16
MAX_PAGE_CANDIDATES = 1_000
MAX_PAGE_BYTES = 2 * 2**20
MAX_EVAL_BATCH = 50
MAX_KNOWN_ASKED = 1_000
MAX_LOG_CHUNK_BYTES = 256 * 2**10
MAX_SIGNAL_BYTES = 64 * 2**10

_MAX_I63 = 2**63 - 1  # what a ledger column holds; larger sizes are nonsense, not data

Id = Annotated[
    str,
    Meta(min_length=1, max_length=200, pattern=r"\A[^\x00-\x1f\x7f-\x9f\ud800-\udfff]*\Z"),
]
Text = Annotated[str, Meta(max_length=64 * 2**10)]
LongText = Annotated[str, Meta(max_length=2**20)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=_MAX_I63)]
U64 = Annotated[int, Meta(ge=0)]
# Excludes NaN and the infinities: neither compares as within the bounds.
F64 = Annotated[float, Meta(ge=-1.7e308, le=1.7e308)]
Positive = Annotated[float, Meta(ge=0, le=1.7e308)]
Percent = Annotated[float, Meta(ge=0, le=100)]

Kind = Literal["eval", "build"]
FailureKind = Literal[
    "Transient", "Permanent", "Timeout", "InputsUnavailable", "Aborted", "Canceled"
]


class Message(Struct, frozen=True, omit_defaults=True, tag_field="type", tag=True):
    """Base of everything that is a frame of its own."""


class Shape(Struct, frozen=True, omit_defaults=True):
    """Base of the maps inside messages."""


# -- shapes ------------------------------------------------------------------------------


class Capabilities(Shape, frozen=True):
    fetch: bool
    eval: bool
    build: bool


class ClaimRef(Shape, frozen=True):
    job_id: Id
    assignment_id: Id


class FailedPeer(Shape, frozen=True):
    peer: Id
    reason: Text


class Score(Shape, frozen=True):
    """What one worker says of one candidate."""

    job_id: Id
    missing_count: U32
    missing_nar_size: U63
    outputs_present: bool


class Span(Shape, frozen=True):
    """One phase of a job, in milliseconds since the worker got `AssignJob`."""

    phase: Text
    start_ms: U63
    end_ms: U63
    bytes: U63 | None = None


class BuildMetrics(Shape, frozen=True):
    peak_ram_mb: U63 | None = None
    cpu_time_ms: U63 | None = None
    wall_time_ms: U63 | None = None
    disk_bytes: U63 | None = None
    output_nar_size: U63 | None = None
    oom: bool | None = None


class RequiredPath(Shape, frozen=True):
    path: Text
    nar_size: U63 | None = None


class Requirement(Shape, frozen=True):
    system: Text
    required_features: list[Text]


class JobCandidate(Shape, frozen=True):
    job_id: Id
    kind: Kind
    project: Id
    required_paths: list[RequiredPath]
    drv_paths: list[Text]
    output_paths: list[Text]
    requirement: Requirement | None = None


class Derivation(Shape, frozen=True):
    """A build as evaluations report it and as files submit it (see `SubmittedJob`)."""

    drv_path: Text
    name: Text
    system: Text
    required_features: list[Text]
    outputs: dict[Text, Text]
    input_drvs: list[Text]
    input_srcs: list[Text]
    pname: Text | None = None
    is_fixed_output: bool | None = None
    prefer_local_build: bool | None = None
    timeout_secs: U32 | None = None
    max_silent_secs: U32 | None = None
    builder: Text | None = None
    args: list[LongText] | None = None
    env: dict[Text, LongText] | None = None


class SubmittedJob(Derivation, frozen=True):
    """A job of headrace's own file format."""

    job_id: Id | None = None
    project: Id | None = None
    prioritized: bool | None = None
    required_paths: list[RequiredPath] | None = None


class EvalSource(Shape, frozen=True):
    kind: Literal["nix-file", "flake", "graph-file"]
    ref: Text


class SubmittedEvaluation(Shape, frozen=True):
    source: EvalSource
    job_id: Id | None = None
    project: Id | None = None
    prioritized: bool | None = None
    attributes: list[Text] = []
    timeout_secs: U32 | None = None


class SubmittedMember(Shape, frozen=True):
    """A member of a cluster: a build or an evaluation, whole or by name. A build's name is the
    `drv_path` or `job_id` of one of the submission's jobs, an evaluation's is its `job_id`."""

    role: Id
    job: SubmittedJob | Text | None = None
    evaluation: SubmittedEvaluation | Text | None = None
    index: U32 | None = None
    """0.. within the role; without it, members are numbered in their order."""
    primary: bool | None = None
    pin: Id | None = None
    """The worker that it must sit on."""


class SubmittedCluster(Shape, frozen=True):
    """Jobs that start together on distinct workers, or not at all."""

    members: list[SubmittedMember]
    cluster_id: Id | None = None
    same_zone: bool | None = None
    retry_budget: U32 | None = None
    prioritized: bool | None = None


class Output(Shape, frozen=True):
    path: Text
    nar_size: U63 | None = None
    nar_hash: Text | None = None


class BuildJob(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="build"):
    """What a worker needs to run a build; a limit of 0 disables it."""

    project: Id
    drv_path: Text
    name: Text
    outputs: dict[Text, Text]
    requirement: Requirement
    required_paths: list[RequiredPath]
    timeout_secs: U32
    max_silent_secs: U32
    derivation: dict[str, Any] | None = None


class EvalJob(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="eval"):
    project: Id
    source: EvalSource
    attributes: list[Text]
    timeout_secs: U32


Job = BuildJob | EvalJob


class ClusterSeat(Shape, frozen=True):
    """The `cluster` field of an `AssignJob`."""

    attempt: Id
    role: Text
    index: U32
    hold_secs: F64


class MemberRef(Shape, frozen=True):
    role: Text
    index: U32


class RosterEntry(Shape, frozen=True):
    role: Text
    index: U32
    worker_id: Id
    primary: bool
    endpoint: Text | None = None


# -- updates of a running job ------------------------------------------------------------


class Update(Struct, frozen=True, omit_defaults=True, tag_field="kind", tag=True):
    """Base of what a `JobUpdate` carries."""


class Fetching(Update, frozen=True, tag=True):
    pass


class Evaluating(Update, frozen=True, tag=True):
    pass


class EvalResult(Update, frozen=True, tag=True):
    derivations: Annotated[list[Derivation], Meta(max_length=MAX_EVAL_BATCH)]
    warnings: list[Text]
    errors: list[Text]
    targets: dict[Text, Text] | None = None
    """Beyond the protocol page: what was asked for, as drv paths by attribute."""


class Building(Update, frozen=True, tag=True):
    pass


class BuildOutput(Update, frozen=True, omit_defaults=True, tag=True):
    outputs: dict[Text, Output]
    substituted: bool
    metrics: BuildMetrics | None = None


AnyUpdate = Fetching | Evaluating | EvalResult | Building | BuildOutput


# -- handshake and liveness --------------------------------------------------------------


class InitConnection(Message, frozen=True):
    versions: tuple[U32, U32]
    id: Id
    capabilities: Capabilities
    name: Text | None = None
    agent: Text | None = None
    running: list[ClaimRef] | None = None


class AuthChallenge(Message, frozen=True):
    peers: list[Id]


class AuthResponse(Message, frozen=True):
    tokens: dict[Id, Text]


class InitAck(Message, frozen=True):
    version: U32
    session: Id
    capabilities: Capabilities
    authorized_peers: list[Id]
    failed_peers: list[FailedPeer]
    resumed: list[Id]
    heartbeat_timeout: F64


class Reject(Message, frozen=True):
    code: U32
    reason: Text


class ReauthRequest(Message, frozen=True):
    pass


class AuthUpdate(Message, frozen=True):
    authorized_peers: list[Id]
    failed_peers: list[FailedPeer]


class Ping(Message, frozen=True):
    nonce: U64


class Pong(Message, frozen=True):
    nonce: U64


class Draining(Message, frozen=True):
    """Either side: no new jobs from now on."""


# -- worker to server --------------------------------------------------------------------


class WorkerCapabilities(Message, frozen=True):
    architectures: list[Text]
    system_features: list[Text]
    max_concurrent_builds: U32
    cpu_count: U32 | None = None
    ram_total_mb: U63 | None = None
    cpu_core_score: Positive | None = None
    zone: Text | None = None
    endpoint: Text | None = None


class WorkerMetrics(Message, frozen=True):
    cpu_usage_pct: Percent | None = None
    ram_free_mb: U63 | None = None
    disk_speed_mbps: Positive | None = None
    upload_speed_mbps: Positive | None = None
    download_speed_mbps: Positive | None = None
    build_peak_ram_mb: dict[Id, U63] | None = None
    trouble: Text | None = None
    """Why the worker asks for no jobs, if it does not: its disk is full."""


class RequestJobList(Message, frozen=True):
    pass


class RequestJobChunk(Message, frozen=True):
    scores: list[Score]
    is_final: bool | None = None


class RequestJob(Message, frozen=True):
    kind: Kind


class AssignJobResponse(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    accepted: bool
    reason: Text | None = None


class JobUpdate(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    update: AnyUpdate


class JobCompleted(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    spans: list[Span] | None = None


class JobFailed(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    error: Text
    kind: FailureKind
    missing_paths: list[Text] | None = None
    spans: list[Span] | None = None
    metrics: BuildMetrics | None = None


class BuildProgress(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    phase: Literal["prefetch", "build", "upload"]
    bytes_done: U63 | None = None
    bytes_total: U63 | None = None
    paths_done: U32 | None = None
    paths_total: U32 | None = None


class EvalProgress(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    derivations: U63


class QueryKnownDerivations(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    query_id: U64
    drv_paths: list[Text]


class LogChunk(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    data: Annotated[bytes, Meta(max_length=MAX_LOG_CHUNK_BYTES)]


class ClusterSignal(Message, frozen=True, rename={"sender": "from"}):
    """A worker fills `to` (nobody = every other member), the server fills `from`."""

    attempt: Id
    payload: Annotated[bytes, Meta(max_length=MAX_SIGNAL_BYTES)]
    to: MemberRef | None = None
    sender: MemberRef | None = None


class Goodbye(Message, frozen=True):
    pass


# -- server to worker --------------------------------------------------------------------


class JobListChunk(Message, frozen=True):
    candidates: Annotated[list[JobCandidate], Meta(max_length=MAX_PAGE_CANDIDATES)]
    is_final: bool


class JobOffer(Message, frozen=True):
    candidates: Annotated[list[JobCandidate], Meta(max_length=MAX_PAGE_CANDIDATES)]


class AssignJob(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    job: Job
    cluster: ClusterSeat | None = None


class AbortJob(Message, frozen=True):
    job_id: Id
    assignment_id: Id
    reason: Text


class Recorded(Message, frozen=True):
    job_id: Id
    assignment_id: Id


class KnownDerivations(Message, frozen=True):
    query_id: U64
    known: list[Text]


class StartCluster(Message, frozen=True):
    attempt: Id
    roster: list[RosterEntry]


class AbortCluster(Message, frozen=True):
    attempt: Id
    reason: Text


class Error(Message, frozen=True):
    code: U32
    message: Text


# -- commands: client to server ----------------------------------------------------------
#
# Every request carries a `request` number of the client's choice; each answer repeats it.


class CmdHello(Message, frozen=True):
    versions: tuple[U32, U32]
    agent: Text | None = None


class CmdSubmit(Message, frozen=True):
    """One part of a submission; taken whole, once the final part is in and durable."""

    request: U64
    is_final: bool
    jobs: list[SubmittedJob] = []
    evaluations: list[SubmittedEvaluation] = []
    clusters: list[SubmittedCluster] = []
    assume_inputs_built: bool = False
    interactive: bool = False
    """A person at a terminal waits for it (`headrace build`): scored higher."""


class CmdStatus(Message, frozen=True):
    request: U64


class CmdHealth(Message, frozen=True):
    """Is everything up and does the ledger take writes?"""

    request: U64


class CmdJobs(Message, frozen=True):
    """One page of the jobs with ids after `after`, in id order."""

    request: U64
    status: Text | None = None
    after: Text | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_CANDIDATES)] = MAX_PAGE_CANDIDATES


class CmdWait(Message, frozen=True):
    """How many of these jobs are still open; without jobs: of all."""

    request: U64
    jobs: Annotated[list[Text], Meta(max_length=50_000)] = []


class CmdCancel(Message, frozen=True):
    """Targets are job ids, unique prefixes of them, drv paths or submission ids."""

    request: U64
    targets: Annotated[list[Text], Meta(min_length=1, max_length=10_000)]


class CmdPrioritize(Message, frozen=True):
    request: U64
    targets: Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
    prioritized: bool = True


class CmdLogs(Message, frozen=True):
    """The log of a job's newest run from byte `offset` on."""

    request: U64
    job: Text
    offset: U63 = 0


class CmdExplain(Message, frozen=True):
    """Why a job waits, or why it went where it went."""

    request: U64
    job: Text


class CmdResult(Message, frozen=True):
    """What an evaluation was asked for, and what became of it."""

    request: U64
    job: Text


class CmdClusters(Message, frozen=True):
    """One page of the clusters with ids after `after`, in id order."""

    request: U64
    status: Text | None = None
    after: Text | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE_CANDIDATES)] = MAX_PAGE_CANDIDATES


class CmdCluster(Message, frozen=True):
    """A cluster (id or unique prefix) with its members, attempts and seats."""

    request: U64
    cluster: Text


class CmdClusterCancel(Message, frozen=True):
    """Ends clusters (ids or unique prefixes) with all their members."""

    request: U64
    clusters: Annotated[list[Text], Meta(min_length=1, max_length=10_000)]


class CmdDrain(Message, frozen=True):
    request: U64
    worker: Id
    reason: Text = ""


class CmdUndrain(Message, frozen=True):
    request: U64
    worker: Id


class CmdKillActor(Message, frozen=True):
    """Ends an actor at its next await. Only a server with `--chaos` knows this message."""

    request: U64
    actor: Id


# -- commands: server to client ----------------------------------------------------------


class CmdWelcome(Message, frozen=True):
    version: U32
    server: Text


class CmdError(Message, frozen=True):
    """The request was refused and changed nothing; `code` is the command's exit code."""

    request: U64
    code: U32
    message: Text


class CmdSubmitted(Message, frozen=True):
    """One part of the answer to a submission that is durable."""

    request: U64
    is_final: bool
    submission: Id
    jobs: dict[Text, Id] = {}
    evaluations: list[Id] = []
    clusters: list[Id] = []


class CmdStatusReply(Message, frozen=True):
    request: U64
    status: dict[str, Any]


class CmdHealthReply(Message, frozen=True):
    request: U64
    problems: list[Text]
    """One line each; none when all is well."""


class CmdJobsReply(Message, frozen=True):
    request: U64
    jobs: list[dict[str, Any]]
    next: Text | None = None
    """Pass it as `after` for the next page; none on the last one."""


class CmdWaitReply(Message, frozen=True):
    request: U64
    open: U63
    failed: U63
    """Of the jobs asked for, how many ended other than Completed."""
    unknown: list[Text] = []


class CmdCancelReply(Message, frozen=True):
    request: U64
    aborted: list[Id]
    requested: list[Id]
    """Running: their workers were told to stop and have not confirmed yet."""
    unchanged: list[Id]
    """Already ended, or still wanted by another submission."""


class CmdLogsReply(Message, frozen=True):
    request: U64
    job_id: Id
    offset: U63
    """Where the next chunk starts."""
    data: bytes
    is_end: bool
    """The job has ended and the log holds no more than this."""


class CmdExplainReply(Message, frozen=True):
    request: U64
    explanation: dict[str, Any]


class CmdResultReply(Message, frozen=True):
    request: U64
    result: dict[str, Any]
    """`{status, error, warnings, errors, targets, builds, failed}`; a target has `attribute`,
    `drv_path`, `job_id`, `status` and `outputs` (paths by name), `builds` counts by status, what
    failed itself has `job_id`, `name`, `status` and `error`."""


class CmdClustersReply(Message, frozen=True):
    request: U64
    clusters: list[dict[str, Any]]
    next: Text | None = None
    """Pass it as `after` for the next page; none on the last one."""


class CmdClusterReply(Message, frozen=True):
    request: U64
    cluster: dict[str, Any]


class CmdDone(Message, frozen=True):
    request: U64
    message: Text = ""


WORKER_MESSAGES: tuple[type[Message], ...] = (
    InitConnection, AuthResponse, ReauthRequest, WorkerCapabilities, WorkerMetrics,
    RequestJobList, RequestJobChunk, RequestJob, AssignJobResponse, JobUpdate, JobCompleted,
    JobFailed, BuildProgress, EvalProgress, QueryKnownDerivations, LogChunk, ClusterSignal,
    Draining, Goodbye, Ping, Pong,
)  # fmt: skip
COMMAND_MESSAGES: tuple[type[Message], ...] = (
    CmdHello, CmdSubmit, CmdStatus, CmdJobs, CmdWait, CmdCancel, CmdPrioritize, CmdLogs,
    CmdExplain, CmdResult, CmdDrain, CmdUndrain, CmdHealth, CmdClusters, CmdCluster,
    CmdClusterCancel,
)  # fmt: skip
CHAOS_MESSAGES: tuple[type[Message], ...] = (CmdKillActor,)
SERVER_MESSAGES: tuple[type[Message], ...] = (
    AuthChallenge, InitAck, Reject, AuthUpdate, JobListChunk, JobOffer, AssignJob, AbortJob,
    Recorded, KnownDerivations, StartCluster, ClusterSignal, AbortCluster, Error, Draining,
    Ping, Pong, CmdWelcome, CmdError, CmdSubmitted, CmdStatusReply, CmdJobsReply,
    CmdWaitReply, CmdCancelReply, CmdLogsReply, CmdExplainReply, CmdResultReply, CmdHealthReply,
    CmdDone, CmdClustersReply, CmdClusterReply,
)  # fmt: skip
