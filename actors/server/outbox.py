"""What is on its way to each peer: the bounded queue before ZeroMQ's own.

The supervisor owns it beside the socket; dispatch and pager send through it. Nothing here
waits: a full peer keeps its place in a queue, a peer that is gone is reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from transport.interface import Router, Sent
from transport.messages import MAX_FRAMES

MAX_QUEUED = 1_000
MAX_QUEUED_BYTES = 8 * 2**20


@dataclass(slots=True)
class _Queue:
    since: float
    """When the peer last took something."""
    messages: deque[list[bytes]] = field(default_factory=deque)
    size: int = 0


class Outbox:
    """Sends to peers in order; keeps what a full peer does not take yet."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._queues: dict[bytes, _Queue] = {}
        self.undeliverable = 0
        """Messages that found their peer gone or its queue full."""

    def __len__(self) -> int:
        return len(self._queues)

    def send(self, peer: bytes, frames: Sequence[bytes], now: float) -> Sent:
        """Sends frames as few messages as allowed. FULL means queued here; GONE that the peer
        is unreachable, or that its queue is over 1 000 messages or 8 MiB."""
        for start in range(0, len(frames), MAX_FRAMES):
            message = list(frames[start : start + MAX_FRAMES])
            sent = self._send_one(peer, message, now)
            if sent is Sent.GONE:
                self.undeliverable += 1
                return sent
        return Sent.FULL if peer in self._queues else Sent.OK

    def send_page(self, peer: bytes, frame: bytes) -> Sent:
        """Sends a page unless the peer is full; the caller keeps it then."""
        if peer in self._queues:
            return Sent.FULL
        return self._router.send(peer, [frame])

    def _send_one(self, peer: bytes, message: list[bytes], now: float) -> Sent:
        queue = self._queues.get(peer)
        if queue is None:
            sent = self._router.send(peer, message)
            if sent is not Sent.FULL:
                return sent
            queue = self._queues[peer] = _Queue(now)
        size = sum(map(len, message))
        if len(queue.messages) >= MAX_QUEUED or queue.size + size > MAX_QUEUED_BYTES:
            self.drop(peer)
            return Sent.GONE
        queue.messages.append(message)
        queue.size += size
        return Sent.FULL

    def flush(self, now: float) -> list[bytes]:
        """Tries the queues again; returns the peers that turned out to be gone."""
        gone = []
        for peer, queue in list(self._queues.items()):
            while queue.messages:
                sent = self._router.send(peer, queue.messages[0])
                if sent is not Sent.OK:
                    break
                queue.size -= sum(map(len, queue.messages.popleft()))
                queue.since = now
            if not queue.messages:
                del self._queues[peer]
            elif sent is Sent.GONE:
                self.drop(peer)
                gone.append(peer)
        return gone

    def stuck(self, before: float) -> list[bytes]:
        """Peers that something waits for and that took nothing since before a time."""
        return [peer for peer, queue in self._queues.items() if queue.since < before]

    def drop(self, peer: bytes) -> None:
        """Forgets what waits for a peer whose session is over."""
        self._queues.pop(peer, None)
