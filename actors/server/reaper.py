"""The reaper core: who has been silent for too long.

It only ever accuses. Dispatch reads what waits on the socket before it judges, and drops a
session only if nothing came from it since `last_seen`.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.server.effects import PeerGone, PingDue, Silent
from actors.server.sessions import Session

PING_AFTER_SECS = 2.0
FULL_SECS = 10.0
SWEEP_SECS = 0.5
STALL_SECS = 2.0
"""A sweep that comes this much late means that the server itself did not run."""
STALL_GRACE_SECS = 5.0

Accusation = PingDue | Silent | PeerGone


class Reaper:
    """Sweeps the sessions every `SWEEP_SECS`."""

    def __init__(self, heartbeat_timeout: float, now: float) -> None:
        self._timeout = heartbeat_timeout
        self._swept_at = now
        # Nobody is judged by what was before this reaper looked.
        self._amnesty = now + STALL_GRACE_SECS

    def sweep(
        self, sessions: Iterable[Session], stuck: Iterable[bytes], now: float
    ) -> list[Accusation]:
        """`stuck` are the peers that took nothing for `FULL_SECS`."""
        if now - self._swept_at > SWEEP_SECS + STALL_SECS:
            self._amnesty = now + STALL_GRACE_SECS
        self._swept_at = now
        accused: list[Accusation] = [PeerGone(peer) for peer in stuck]
        for session in sessions:
            silence = now - session.last_seen
            if self._timeout and silence > self._timeout and now >= self._amnesty:
                accused.append(Silent(session.id, session.last_seen))
            elif session.holds_claims and min(silence, now - session.pinged_at) >= PING_AFTER_SECS:
                accused.append(PingDue(session.id))
        return accused
