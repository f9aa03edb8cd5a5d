"""What actors know of a connection: the two ends, whatever carries them.

`zmq_sockets` implements these over ZeroMQ, `loopback` in memory on Trio's clock. A frame is one
encoded protocol message; frames that travel together arrive together and in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol

MAX_BATCH_MESSAGES = 512
MAX_BATCH_BYTES = 2**20
"""A batch ends with the message that reaches one of these."""


class Incoming(NamedTuple):
    """One message that a router received."""

    peer: bytes
    """The connection it came on: opaque, and never reused by another connection."""
    frames: list[bytes]
    """At most MAX_FRAMES, and one more when the peer sent too many; the rest is dropped."""
    user_id: str | None
    """The client's CURVE public key (Z85); none without CURVE."""


class Sent(Enum):
    OK = "ok"
    """Queued, which is not delivered: what is under way when a connection is cut is lost."""
    FULL = "full"
    """Nothing was sent: the peer does not read. Try again later."""
    GONE = "gone"
    """Nothing was sent: there is no such connection."""


class BindFailed(OSError):
    """A router cannot listen; the text is one line that names the endpoint and the cause."""


class ConnectionLost(Exception):
    """A dealer's connection is over; the text is one line that names the likely cause."""


class Router(Protocol):
    """The server's end of all its connections."""

    @property
    def endpoint(self) -> str:
        """The bound address, a port chosen by the system filled in."""
        ...

    async def receive(self) -> list[Incoming]:
        """Waits for a message, then takes all that wait, up to the limits of a batch.

        After a `send` that was FULL it may return early with an empty list, for the caller to
        try again. Atomic with respect to cancellation: what is taken is returned. For one
        task at a time. Raises `trio.ClosedResourceError` once closed.
        """
        ...

    def receive_nowait(self) -> list[Incoming]:
        """Takes what waits, up to the limits of a batch; may be empty."""
        ...

    def send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        """Sends one message of at least one frame, whole or not at all. Never blocks."""
        ...

    def close(self) -> None:
        """Ends every connection; what was sent goes out for a bounded time."""
        ...


class Dealer(Protocol):
    """A client's end of its connection. It is never reconnected: connect anew."""

    async def receive(self) -> list[list[bytes]]:
        """Waits for a message, then takes all that wait: a non-empty list of frame lists.

        Raises `ConnectionLost` when the connection is over (or was never made). What arrives in
        the same instant as the end may be lost with it: ZeroMQ drops what was not read by
        then. Otherwise as `Router.receive`.
        """
        ...

    def send(self, frames: Sequence[bytes]) -> bool:
        """Sends one message of at least one frame. Never blocks.

        False when it cannot be queued: the server does not read, or the connection is over.
        """
        ...

    def close(self) -> None:
        """Ends the connection; what was sent goes out for a bounded time."""
        ...


class Connector(Protocol):
    def connect(self, endpoint: str) -> Dealer:
        """Starts to connect and returns at once.

        `Dealer.send` queues until then, `Dealer.receive` reports a failure. Raises
        `ConnectionLost` for an endpoint that is no address.
        """
        ...
