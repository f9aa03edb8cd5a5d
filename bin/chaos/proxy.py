"""A TCP relay whose connections can be cut, held and slowed."""

from __future__ import annotations

import socket
import struct

import trio

_READ_BYTES = 2**16
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Link:
    """The way of one worker to the server's port; run `serve`, then use `port`."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self.port = 0
        self.delay_secs = 0.0
        """That each piece of data waits on its way."""
        self._open: dict[trio.CancelScope, tuple[trio.SocketStream, trio.SocketStream]] = {}
        self._flows = trio.Event()
        self._flows.set()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Relays until cancelled; started once it listens."""
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            await nursery.start(trio.serve_listeners, self._relay, listeners)
            task_status.started()

    def cut(self, *, reset: bool) -> None:
        """Ends what is open: by a reset, or in order as a process that exits does."""
        for scope, streams in list(self._open.items()):
            if reset:
                for stream in streams:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            scope.cancel()

    def block(self) -> None:
        """Passes nothing on any more, neither data nor ends; connections stay and can be made."""
        self._flows = trio.Event()

    def unblock(self) -> None:
        self._flows.set()

    async def _relay(self, worker: trio.SocketStream) -> None:
        await self._flows.wait()
        try:
            server = await trio.open_tcp_stream("127.0.0.1", self._server_port)
        except OSError:
            return  # who serves a listener closes the connection
        async with worker, server:
            with trio.CancelScope() as scope:
                self._open[scope] = (worker, server)
                try:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(self._pump, worker, server, scope)
                        nursery.start_soon(self._pump, server, worker, scope)
                finally:
                    del self._open[scope]

    async def _pump(
        self, source: trio.SocketStream, target: trio.SocketStream, both: trio.CancelScope
    ) -> None:
        try:
            while True:
                data = await source.receive_some(_READ_BYTES)
                await trio.sleep(self.delay_secs)
                await self._flows.wait()
                if not data:
                    break
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await self._flows.wait()
        both.cancel()
