"""What dispatch's cores have for its shell: frames to send, and what other actors are asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.ledger.port import AdmissionRequest, Query
from actors.server.claims import Claim
from actors.server.effects import DropLogs, HealthRequest, Log, PagerEvent, ReadLog
from transport import messages as m
from transport.codec import encode


@dataclass(slots=True)
class Outgoing:
    """Lists that the cores fill and the shell empties."""

    frames: list[tuple[bytes, bytes, Claim | None]] = field(default_factory=list)
    """(Peer, frame, claim) in order; an `AssignJob` has its claim."""
    pager: list[PagerEvent] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    admissions: list[AdmissionRequest] = field(default_factory=list)
    logs: list[Log | ReadLog | DropLogs] = field(default_factory=list)
    shell_requests: list[tuple[bytes, m.CmdStatus | m.CmdKillActor]] = field(default_factory=list)
    health_requests: list[HealthRequest] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What is to be logged, once each."""

    def tell(self, peer: bytes, message: m.Message) -> None:
        """A message to be sent."""
        self.frames.append((peer, encode(message), None))
