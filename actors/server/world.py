"""What outlives every actor of a server; the supervisor's side owns it and lends it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from actors.ledger.port import LedgerPort, Offload
from actors.server.authorization import Registration
from actors.server.config import ServerConfig
from actors.server.effects import HealthRequest, PagerEvent
from actors.server.farm import DispatchEvent
from actors.server.ids import Ids
from actors.server.logbook import Logbook
from actors.server.outbox import Outbox
from actors.server.scoring import Policy
from actors.server.sessions import SessionTable
from transport.interface import Router

INBOX_EVENTS = 16_384
"""More than the ledger can have outstanding, so that its answers always find room."""
PAGER_BATCHES = 1_024


@dataclass(slots=True)
class World:
    """Sockets, tables, inboxes and the ledger's port."""

    config: ServerConfig
    server: str
    ids: Ids
    policy: Policy
    router: Router
    outbox: Outbox
    sessions: SessionTable
    port: LedgerPort
    logbook: Logbook
    inbox: trio.MemorySendChannel[DispatchEvent]
    events: trio.MemoryReceiveChannel[DispatchEvent]
    to_pager: trio.MemorySendChannel[list[PagerEvent]]
    pager_events: trio.MemoryReceiveChannel[list[PagerEvent]]
    offload: Offload
    load_registrations: Callable[[], dict[str, Registration] | None]
    others_alive: Callable[[], frozenset[str]]
    """Ids of other servers on this ledger that live."""
    kill: Callable[[str], bool]
    """Ends an actor, to be restarted; false if it is not there to be ended."""
    check_health: Callable[[HealthRequest], object]
    """Looks whether everybody lives, and answers."""
    server_status: Callable[[float], dict[str, Any]]
    """The `server` part of the status object."""
    batches: int = 0
    """Number of the newest batch that dispatch made."""
    is_stopping: bool = False
    """The server was told to stop; a dispatch that is restarted meanwhile must know."""

    def post(self, event: DispatchEvent) -> bool:
        """Tells dispatch; False when its inbox is full (what repeats itself may be dropped)."""
        try:
            self.inbox.send_nowait(event)
        except trio.WouldBlock:
            return False
        return True
