"""What the cores of the dispatch task tell each other and their shell: plain values.

Cores do not import each other; farm.py introduces them, routes.py does these.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from actors.ledger.port import AdmissionRequest, Query
from actors.ledger.records import ClusterRecord, Write
from actors.server.authorization import Registration
from actors.server.claims import Claim
from actors.server.clusters.model import Opening, Starting
from actors.server.model import PoolEntry, WorkerView
from actors.server.sessions import Session
from transport import messages as m


class Tell(Struct, frozen=True):
    """Send a message to a connection."""

    peer: bytes
    message: m.Message


class Opened(Struct, frozen=True):
    """A session begins; `InitAck` follows once its running claims are sorted out."""

    session: Session
    running: tuple[m.ClaimRef, ...]
    version: int
    failed: tuple[m.FailedPeer, ...]


class Changed(Struct, frozen=True):
    """A session's capabilities, rights or draining are other than before."""

    session: Session


class Revoked(Struct, frozen=True):
    """A session lost rights that running jobs may depend on."""

    session: Session


Cause = Literal["lost", "silent", "goodbye", "revoked"]


class Closed(Struct, frozen=True):
    """A session is over."""

    session: Session
    cause: Cause


class Record(Struct, frozen=True):
    """Write this to the ledger, in order."""

    write: Write


class Enter(Struct, frozen=True):
    """A job can start: it enters the pool and is offered."""

    entry: PoolEntry


class Leave(Struct, frozen=True):
    """A pending job leaves the pool without having been claimed."""

    job_id: str


class Abort(Struct, frozen=True):
    """A running job is not wanted any more: its worker is told to stop it."""

    job_id: str
    reason: str


class TellDurable(Struct, frozen=True):
    """Send a message once everything recorded before it survives a power loss."""

    peer: bytes
    message: m.Message


class Ask(Struct, frozen=True):
    """Read the ledger."""

    query: Query


class Admit(Struct, frozen=True):
    """Take jobs into the ledger."""

    request: AdmissionRequest


class Log(Struct, frozen=True):
    """Append to the log of an assignment."""

    job_id: str
    assignment_id: str
    data: bytes


class DropLogs(Struct, frozen=True):
    """The logs of these jobs are not wanted any more."""

    job_ids: tuple[str, ...]


class ReadLog(Struct, frozen=True):
    """Answer a client with a part of a job's log."""

    peer: bytes
    request: int
    job_id: str
    offset: int
    has_ended: bool


class HealthRequest(Struct, frozen=True):
    """A client asks whether all is well; what the ledger says of itself is known by now."""

    peer: bytes
    request: int
    ledger: str | None
    """Why it takes no writes, none if it does."""


class ClustersAdded(Struct, frozen=True):
    """Clusters that were admitted; their members' jobs follow."""

    clusters: tuple[ClusterRecord, ...]


class ClusterUnwanted(Struct, frozen=True):
    """A cluster, or one of its members, was cancelled."""

    cluster_id: str
    reason: str


class Await(Struct, frozen=True):
    """Write this to the ledger, in order, and tell the coordinator when it is committed."""

    write: Write
    awaited: Opening | Starting


class Push(Struct, frozen=True):
    """Send a cluster member's `AssignJob`; its row is committed."""

    claim: Claim
    seat: m.ClusterSeat


class Released(Struct, frozen=True):
    """A claim of this worker is over."""

    worker: str


Effect = (
    Tell | Opened | Changed | Revoked | Closed | Record | Enter | Leave | Abort | TellDurable
    | Ask | Admit | Log | ReadLog | Released | HealthRequest | ClustersAdded | ClusterUnwanted
    | Await | Push
)  # fmt: skip


# -- dispatch to pager ---------------------------------------------------------------------


class Present(Struct, frozen=True):
    """A session is there, or is other than before."""

    session: str
    peer: bytes
    view: WorkerView


class Gone(Struct, frozen=True):
    """A session is over."""

    session: str


class ListRequested(Struct, frozen=True):
    """The session asked for the full list."""

    session: str


class Reset(Struct, frozen=True):
    """Everything, for a pager or after a dispatch that starts anew."""

    entries: tuple[PoolEntry, ...]
    sessions: tuple[Present, ...]
    listed: frozenset[str]
    """Sessions that had asked for a list: they are offered everything again."""


PagerEvent = Enter | Leave | Present | Gone | ListRequested | Reset


# -- into dispatch, from the other actors --------------------------------------------------


class PingDue(Struct, frozen=True):
    """The reaper: a session that holds claims was silent for a while."""

    session: str


class Silent(Struct, frozen=True):
    """The reaper: nothing came from the session since `last_seen`, longer than allowed."""

    session: str
    last_seen: float


class PeerGone(Struct, frozen=True):
    """A send found the connection gone, or it took nothing for too long."""

    peer: bytes


class PagerStarted(Struct, frozen=True):
    """The pager starts anew and waits for a `Reset`."""


class RegistryFileChanged(Struct, frozen=True):
    """The registry file was read again."""

    registrations: dict[str, Registration]


class Neighbours(Struct, frozen=True):
    """Other servers share the ledger, or did: what they wrote is to be looked at."""

    dead: frozenset[str]
    """Those whose claims nobody has taken over yet."""
    wall_time: float
    wall_offset: float


class StopRequested(Struct, frozen=True):
    """SIGTERM: tell everybody, assign nothing more."""
