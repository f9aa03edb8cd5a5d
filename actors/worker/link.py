"""One connection of the worker: what waits to go out, in order and bounded."""

from __future__ import annotations

from collections import deque

import trio

from transport.codec import encode
from transport.interface import Dealer
from transport.messages import MAX_FRAMES, Message

STUCK_AFTER_SECS = 10.0
MAX_WAITING_BYTES = 64 * 2**20
_MAX_MESSAGE_BYTES = 2**20  # of several frames; a larger single frame goes alone


class Link:
    """Frames leave in the order of `put`; nothing overtakes what the server did not take."""

    def __init__(self, number: int, dealer: Dealer) -> None:
        self.number = number
        self.dealer = dealer
        self.reading = trio.CancelScope()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._stuck_since: float | None = None

    @property
    def is_full(self) -> bool:
        """Something waits for the server to read."""
        return bool(self._waiting)

    def put(self, message: Message) -> None:
        frame = encode(message)
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)

    def flush(self, now: float) -> str | None:
        """Sends what the server takes. Returns why the connection is to be given up, if so."""
        while self._waiting:
            batch = self._batch()
            if not self.dealer.send(batch):
                return self._judge(now)
            for frame in batch:
                self._waiting.popleft()
                self._waiting_bytes -= len(frame)
            self._stuck_since = None
        return None

    def close(self) -> None:
        self.reading.cancel()
        self.dealer.close()
        self._waiting.clear()

    def _batch(self) -> list[bytes]:
        batch: list[bytes] = []
        size = 0
        for frame in self._waiting:
            size += len(frame)
            if batch and (len(batch) == MAX_FRAMES or size > _MAX_MESSAGE_BYTES):
                break
            batch.append(frame)
        return batch

    def _judge(self, now: float) -> str | None:
        if self._stuck_since is None:
            self._stuck_since = now
        if now - self._stuck_since >= STUCK_AFTER_SECS:
            return f"the server read nothing for {STUCK_AFTER_SECS:.0f} s"
        if self._waiting_bytes > MAX_WAITING_BYTES:
            return f"more than {MAX_WAITING_BYTES // 2**20} MiB wait for the server to read"
        return None
