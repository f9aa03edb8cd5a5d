"""ZeroMQ on Trio: the context that owns every socket, and how a task waits for one.

Facts this file rests on:

- The descriptor of a socket (`zmq.FD`) only ever becomes readable, and means 'look at the
  socket': a receive that ends in `Again` makes it safe to sleep on it, nothing else does.
- Any other call on the socket, a `send` above all, may take the event that a sleeping reader
  waits for. So after each such call the reader is woken if there is something to receive.
- A descriptor that is closed under a sleeper leaves it asleep for ever, and its number is
  reused: Trio is told before.
"""

from __future__ import annotations

import select
from types import TracebackType
from typing import Protocol, Self

import trio
import zmq

# pyzmq's enums cost about a microsecond a use; on the hot path they are plain integers.
NOBLOCK = int(zmq.NOBLOCK)
SEND_MORE = int(zmq.SNDMORE | zmq.NOBLOCK)
EVENTS = int(zmq.EVENTS)
POLLIN = int(zmq.POLLIN)

_LINGER_MS = 1_000
_TERM_SECS = 3.0


class Doorbell:
    """Lets the one reader of a socket sleep until there may be something to receive."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes] | None = None) -> None:
        self._socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._both: select.epoll | None = None
        """Readable when the socket's or the monitor's descriptor is: one wait for both, not
        a nursery with a task for each: a worker of short builds takes a fifth less CPU."""
        if monitor is not None:
            self._both = select.epoll()
            self._both.register(self._fd, select.EPOLLIN)
            self._both.register(int(monitor.getsockopt(zmq.FD)), select.EPOLLIN)
            self._fd = self._both.fileno()
        self._sleeper: trio.CancelScope | None = None

    async def wait(self) -> None:
        """Sleeps until the socket or its monitor may have something; may return without cause.

        Both must have answered `Again` since the last await. Raises `trio.BusyResourceError`
        for a second reader.
        """
        if self._sleeper is not None:
            raise trio.BusyResourceError("another task receives from this socket")
        with trio.CancelScope() as scope:
            self._sleeper = scope
            try:
                await trio.lowlevel.wait_readable(self._fd)
            finally:
                self._sleeper = None

    def ring(self) -> None:
        """Wakes the reader, if it sleeps."""
        if self._sleeper is not None:
            self._sleeper.cancel()

    def after_call(self) -> None:
        """To be called after every call on the socket other than the reader's own."""
        if self._sleeper is not None and int(self._socket.getsockopt(EVENTS)) & POLLIN:
            self._sleeper.cancel()

    def notify_closing(self) -> None:
        """To be called before the socket is closed: wakes the reader for good."""
        self.ring()
        trio.lowlevel.notify_closing(self._fd)
        if self._both is not None:
            self._both.close()


class Closeable(Protocol):
    def close(self) -> None: ...


class Context:
    """Owner of a ZeroMQ context and of what is open in it: `async with Context() as context`.

    On exit everything still open is closed, and what was sent before has a second to go out.
    """

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # A socket takes the value at its birth; set later it would be too late to help.
        self._context.linger = _LINGER_MS
        self._open: dict[Closeable, None] = {}

    def socket(self, kind: int) -> zmq.Socket[bytes]:
        """A bare socket, whose owner is to be known by `opened` until it has closed it."""
        return self._context.socket(kind)

    @property
    def raw(self) -> zmq.Context[zmq.Socket[bytes]]:
        return self._context

    def opened(self, owner: Closeable) -> None:
        self._open[owner] = None

    def closed(self, owner: Closeable) -> None:
        self._open.pop(owner, None)

    async def aclose(self) -> None:
        """Closes everything and waits for what still goes out, 3 s at most."""
        for owner in reversed(list(self._open)):
            owner.close()
        with trio.move_on_after(_TERM_SECS, shield=True):
            # Blocks until the last socket has lingered. A thread given up ends with the linger.
            await trio.to_thread.run_sync(self._context.term, abandon_on_cancel=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()
