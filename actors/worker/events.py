"""What goes into the worker's core and what comes out of it.

Events are facts that the shell saw; effects are what it is to do, in order. A connection has
a number: what belongs to an older one than the core's current is ignored, so that nothing of
one session can leak into the next.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from actors.worker.executors.base import Outcome
from transport import messages as m

Level = Literal["debug", "info", "warning", "error"]


class Assignment(Struct, frozen=True):
    """A job this worker took, by the claim that it runs under."""

    job_id: str
    assignment_id: str
    job: m.Job
    seat: m.ClusterSeat | None = None

    @property
    def kind(self) -> m.Kind:
        return "build" if isinstance(self.job, m.BuildJob) else "eval"


# -- events ------------------------------------------------------------------------------


class Tick(Struct, frozen=True):
    """The core's deadline has come."""


class Received(Struct, frozen=True):
    connection: int
    message: m.Message


class Garbled(Struct, frozen=True):
    """A frame of the server's that is no message."""

    connection: int
    reason: str


class Lost(Struct, frozen=True):
    """The connection is over, or takes nothing any more."""

    connection: int
    reason: str


class Scored(Struct, frozen=True):
    connection: int
    page: int
    scores: list[m.Score]


class JobUpdated(Struct, frozen=True):
    """`Fetching`, `Evaluating` or a batch of derivations from a running job."""

    assignment_id: str
    update: m.AnyUpdate


class BuildAdvanced(Struct, frozen=True):
    """Its job and assignment ids are filled in by the core."""

    assignment_id: str
    phase: Literal["prefetch", "build", "upload"]
    bytes_done: int | None = None
    bytes_total: int | None = None
    paths_done: int | None = None
    paths_total: int | None = None


class EvalAdvanced(Struct, frozen=True):
    assignment_id: str
    derivations: int


class JobAsked(Struct, frozen=True):
    """Which of these derivations are known whole; `JobAnswered` follows if the server tells."""

    assignment_id: str
    query_id: int
    drv_paths: list[str]


class SignalSent(Struct, frozen=True):
    """A running cluster member has something for one other member, or for all (no `to`)."""

    assignment_id: str
    to: m.MemberRef | None
    payload: bytes


class JobLogged(Struct, frozen=True):
    assignment_id: str
    data: bytes


class JobFinished(Struct, frozen=True):
    """Nothing of the job runs any more. No outcome: it was stopped."""

    assignment_id: str
    outcome: Outcome | None


class MetricsReady(Struct, frozen=True):
    metrics: m.WorkerMetrics


class DisksChecked(Struct, frozen=True):
    """Why no job should start for want of room; none when there is room."""

    trouble: str | None


class CapabilitiesChanged(Struct, frozen=True):
    capabilities: m.WorkerCapabilities


class PeersChanged(Struct, frozen=True):
    """The peers file changed: tokens by peer, `*` answers for all others."""

    tokens: dict[str, str]


class DrainRequested(Struct, frozen=True):
    """The worker is to stop; `exit_code` is what its process then ends with."""

    exit_code: int = 0


Event = (
    Tick | Received | Garbled | Lost | Scored | JobUpdated | BuildAdvanced | EvalAdvanced
    | JobAsked | SignalSent | JobLogged | JobFinished | MetricsReady | DisksChecked
    | CapabilitiesChanged
    | PeersChanged | DrainRequested
)  # fmt: skip


# -- effects -----------------------------------------------------------------------------


class Connect(Struct, frozen=True):
    """Open a fresh connection under this number."""

    connection: int


class Disconnect(Struct, frozen=True):
    """Close the current connection, after what was sent before."""


class Send(Struct, frozen=True):
    message: m.Message


class ScorePage(Struct, frozen=True):
    connection: int
    page: int
    candidates: list[m.JobCandidate]


class StartJob(Struct, frozen=True):
    assignment: Assignment
    roster: list[m.RosterEntry] = []
    """Of its cluster."""


class StopJob(Struct, frozen=True):
    """Stop the job's processes; `JobFinished` follows once nothing of it runs."""

    assignment_id: str


class JobAnswered(Struct, frozen=True):
    """The server's answer to a `JobAsked`."""

    query_id: int
    known: list[str]


class DeliverSignal(Struct, frozen=True):
    """Another member's signal to a running one."""

    assignment_id: str
    sender: m.MemberRef
    payload: bytes


class Note(Struct, frozen=True):
    """A line for the worker's own log."""

    level: Level
    text: str


class Exit(Struct, frozen=True):
    code: int


Effect = (
    Connect | Disconnect | Send | ScorePage | StartJob | StopJob | JobAnswered | DeliverSignal
    | Note | Exit
)  # fmt: skip
