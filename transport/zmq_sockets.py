"""The two ends of a connection over ZeroMQ: a ROUTER that binds, a DEALER that connects once."""

from __future__ import annotations

import socket as unix
from collections.abc import Sequence
from math import inf

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.adapter import EVENTS, NOBLOCK, POLLIN, SEND_MORE, Context, Doorbell
from transport.curve import ZAP_DOMAIN, KeyPair, ephemeral
from transport.interface import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    BindFailed,
    ConnectionLost,
    Incoming,
    Sent,
)
from transport.messages import MAX_FRAME_BYTES, MAX_FRAMES

_ZERO_COPY_BYTES = 64 * 2**10
"""From here on a frame is handed to ZeroMQ as it is; below, a copy is cheaper."""

# Messages that wait per peer. A router's may be pages of 2 MiB, and what its gateway holds back
# for a peer can still be dropped or merged, what lies here cannot.
_ROUTER_SEND_LIMIT = 4
_ROUTER_RECEIVE_LIMIT = 256
_DEALER_SEND_LIMIT = 1_000
_DEALER_RECEIVE_LIMIT = 64

_RETRY_SECS = 0.05
"""How often a router's reader wakes while a peer is full: a `send` may have taken the event
that said that there is room."""
_CONNECT_SECS = 5.0
_DEAD_PEER_SECS = 15
"""After which a peer's silent host ends its connection."""
_PROBE_SECS = 5


def _set_common_options(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.maxmsgsize = MAX_FRAME_BYTES
    # Dead hosts are found by TCP itself and not by ZMTP heartbeats: up to libzmq 4.3.5 a heartbeat
    # that is due on a connection which broke while its reader was behind (it was suspended, say, or
    # a peer sent much and reset) ends the whole process: "Assertion failed: !_io_error".
    socket.heartbeat_ivl = 0
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = _PROBE_SECS
    socket.tcp_keepalive_cnt = _DEAD_PEER_SECS // _PROBE_SECS - 1
    socket.setsockopt(zmq.TCP_MAXRT, _DEAD_PEER_SECS * 1_000)
    socket.handshake_ivl = int(_CONNECT_SECS * 1_000)
    socket.ipv6 = "[" in endpoint


def _set_key(socket: zmq.Socket[bytes], pair: KeyPair) -> None:
    socket.curve_publickey = pair.public.encode("ascii")
    socket.curve_secretkey = pair.secret.encode("ascii")


def _reason(error: zmq.ZMQError) -> str:
    return zmq.strerror(error.errno or 0)


def _send_frames(socket: zmq.Socket[bytes], frames: Sequence[bytes]) -> None:
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        flags = SEND_MORE if index < last else NOBLOCK
        socket.send(frame, flags, copy=len(frame) < _ZERO_COPY_BYTES)


# -- router ------------------------------------------------------------------------------------


class ZmqRouter:
    """A `Router` over ZeroMQ.

    With `keys` (the server's) only CURVE clients connect, those that the context's
    `Authenticator` lets in; it must exist already. Raises `BindFailed`.
    """

    def __init__(self, context: Context, endpoint: str, keys: KeyPair | None = None) -> None:
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._is_closed = False
        self._has_user_ids = keys is not None
        self._was_full = False
        try:
            self._configure(endpoint, keys)
            self._bind(endpoint)
        except BaseException:
            self._socket.close()
            raise
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._bell = Doorbell(self._socket)
        context.opened(self)

    def _configure(self, endpoint: str, keys: KeyPair | None) -> None:
        socket = self._socket
        _set_common_options(socket, endpoint)
        socket.router_mandatory = 1
        socket.sndhwm = _ROUTER_SEND_LIMIT
        socket.rcvhwm = _ROUTER_RECEIVE_LIMIT
        socket.backlog = 1_024  # a whole fleet reconnects at once after a restart
        if keys is not None:
            socket.curve_server = 1
            _set_key(socket, keys)
            socket.zap_domain = ZAP_DOMAIN.encode("ascii")
            # Without it a missing authenticator would let everybody in.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _bind(self, endpoint: str) -> None:
        # ZeroMQ would take a living server's ipc address away from it.
        if endpoint.startswith("ipc://") and _is_ipc_served(endpoint.removeprefix("ipc://")):
            raise BindFailed(f"cannot listen on {endpoint}: another process listens there")
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise BindFailed(f"cannot listen on {endpoint}: {_reason(error)}") from None

    async def receive(self) -> list[Incoming]:
        # Where it will sleep anyway, it need not let others run before.
        if self._has_some():
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            if batch := self.receive_nowait():
                return batch
            if self._was_full:
                self._was_full = False
                with trio.move_on_after(_RETRY_SECS):
                    await self._bell.wait()
                return self.receive_nowait()
            await self._bell.wait()

    def receive_nowait(self) -> list[Incoming]:
        if self._is_closed:
            raise trio.ClosedResourceError("this router is closed")
        batch: list[Incoming] = []
        size = 0
        receive = self._socket.recv
        while len(batch) < MAX_BATCH_MESSAGES and size < MAX_BATCH_BYTES:
            try:
                part = receive(NOBLOCK, copy=False)
            except zmq.Again:
                break
            peer = part.bytes
            frames: list[bytes] = []
            while part.more:
                part = receive(NOBLOCK, copy=False)
                if len(frames) <= MAX_FRAMES:
                    frames.append(part.bytes)
                    size += len(frames[-1])
            user_id = str(part.get("User-Id")) if self._has_user_ids else None
            batch.append(Incoming(peer, frames, user_id))
        return batch

    def _has_some(self) -> bool:
        # To ask is of use even to those who know: while there is something to receive, ZeroMQ by
        # itself looks only every 100 parts for peers that were silent.
        return not self._is_closed and bool(int(self._socket.getsockopt(EVENTS)) & POLLIN)

    def send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        if self._is_closed:
            return Sent.GONE
        # Only the first part, which names the peer, can be refused: ZeroMQ takes whole messages.
        try:
            self._socket.send(peer, SEND_MORE)
            _send_frames(self._socket, frames)
        except zmq.Again:
            self._was_full = True
            sent = Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            sent = Sent.GONE
        else:
            sent = Sent.OK
        self._bell.after_call()
        return sent

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._context.closed(self)
            self._bell.notify_closing()
            self._socket.close()


def _is_ipc_served(path: str) -> bool:
    if path.startswith(("*", "@")):
        return False
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM) as client:
        client.setblocking(False)
        try:
            client.connect(path)
        except BlockingIOError:
            return True  # its queue of new connections is full
        except OSError:
            return False
    return True


# -- dealer ------------------------------------------------------------------------------------


class ZmqConnector:
    """A `Connector` over ZeroMQ.

    With `server_key` (Z85) connections are CURVE: to that server and no other, with the
    client's own `keys` or else with a pair made up for this connector.
    """

    def __init__(
        self, context: Context, server_key: str | None = None, keys: KeyPair | None = None
    ) -> None:
        self._context = context
        self._server_key = server_key
        self._keys = keys or ephemeral()

    def connect(self, endpoint: str) -> ZmqDealer:
        return ZmqDealer(self._context, endpoint, self._server_key, self._keys)


_CONNECTED = int(zmq.EVENT_CONNECTED)
_DELAYED = int(zmq.EVENT_CONNECT_DELAYED)
_HANDSHAKEN = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_CLOSED = int(zmq.EVENT_CLOSED)
_DISCONNECTED = int(zmq.EVENT_DISCONNECTED)
_BAD_PROTOCOL = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_BAD_AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_BAD_OTHER = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_WATCHED = (
    _CONNECTED | _DELAYED | _HANDSHAKEN | _CLOSED | _DISCONNECTED
    | _BAD_PROTOCOL | _BAD_AUTH | _BAD_OTHER
)  # fmt: skip


class _Fate:
    """What a dealer's monitor told of its one connection, and the likely cause of its end."""

    def __init__(self, endpoint: str, *, has_curve: bool, deadline: float) -> None:
        self._endpoint = endpoint
        self._has_curve = has_curve
        self._last = 0
        self.deadline = deadline
        """When the handshake must be over; inf once it is."""
        self.lost: str | None = None

    def on_event(self, event: int) -> None:
        if self.lost is not None:
            return
        if event == _HANDSHAKEN:
            self.deadline = inf
        elif event == _CLOSED:
            # Reconnecting is off: an attempt that is closed was the only one.
            self._lose("connection refused, or nobody listens there")
        elif event == _BAD_PROTOCOL:
            other = "no CURVE" if self._has_curve else "CURVE"
            self._lose(f"the server uses {other}, this side does not agree")
        elif event == _BAD_AUTH:
            self._lose("the server does not accept this client's key")
        elif event == _BAD_OTHER:
            self._lose(
                "the handshake failed; is the server's public key the right one?"
                if self._has_curve
                else "the handshake failed; is this a headrace server?"
            )
        elif event == _DISCONNECTED:
            self._lose("the connection was closed")
        self._last = event

    def on_deadline(self) -> None:
        if self._last == _CONNECTED:
            self._lose("it answers, but not as a headrace server")
        elif self._last == _DELAYED:
            self._lose("no answer")
        else:
            self._lose("no connection; is the host name right?")

    def _lose(self, cause: str) -> None:
        self.lost = f"{self._endpoint}: {cause}"


class ZmqDealer:
    """A `Dealer` over ZeroMQ; see `ZmqConnector`."""

    def __init__(
        self, context: Context, endpoint: str, server_key: str | None, keys: KeyPair
    ) -> None:
        self._context = context
        self._is_closed = False
        self._fate = _Fate(
            endpoint,
            has_curve=server_key is not None,
            deadline=trio.current_time() + _CONNECT_SECS,
        )
        self._socket = context.socket(zmq.DEALER)
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        try:
            self._configure(endpoint, server_key, keys)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConnectionLost(f"cannot connect to {endpoint}: {_reason(error)}") from None
        self._bell = Doorbell(self._socket, self._monitor)
        context.opened(self)

    def _configure(self, endpoint: str, server_key: str | None, keys: KeyPair) -> None:
        socket = self._socket
        _set_common_options(socket, endpoint)
        socket.reconnect_ivl = -1  # one socket, one connection, one session
        socket.connect_timeout = int(_CONNECT_SECS * 1_000)
        socket.sndhwm = _DEALER_SEND_LIMIT
        socket.rcvhwm = _DEALER_RECEIVE_LIMIT
        if server_key is not None:
            socket.curve_serverkey = server_key.encode("ascii")
            _set_key(socket, keys)

    async def receive(self) -> list[list[bytes]]:
        await trio.lowlevel.checkpoint()
        while True:
            if batch := self._take():
                return batch
            self._read_monitor()
            if self._fate.lost is not None:
                # What came in before the end may be there still.
                if batch := self._take():
                    return batch
                raise ConnectionLost(self._fate.lost)
            with trio.move_on_at(self._fate.deadline):
                await self._bell.wait()

    def _take(self) -> list[list[bytes]]:
        if self._is_closed:
            raise trio.ClosedResourceError("this dealer is closed")
        batch: list[list[bytes]] = []
        size = 0
        receive = self._socket.recv
        while len(batch) < MAX_BATCH_MESSAGES and size < MAX_BATCH_BYTES:
            try:
                part = receive(NOBLOCK, copy=False)
            except zmq.Again:
                break
            frames = [part.bytes]
            while part.more:
                part = receive(NOBLOCK, copy=False)
                frames.append(part.bytes)
            size += sum(map(len, frames))
            batch.append(frames)
        return batch

    def _read_monitor(self) -> None:
        while True:
            try:
                event = self._monitor.recv_multipart(NOBLOCK)
            except zmq.Again:
                break
            self._fate.on_event(int(parse_monitor_message(event)["event"]))
        if trio.current_time() >= self._fate.deadline and self._fate.lost is None:
            self._fate.on_deadline()

    def send(self, frames: Sequence[bytes]) -> bool:
        if self._is_closed or self._fate.lost is not None:
            return False
        try:
            _send_frames(self._socket, frames)
        except zmq.Again:
            is_sent = False
        else:
            is_sent = True
        self._bell.after_call()
        return is_sent

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._context.closed(self)
            self._read_monitor()
            if self._fate.lost is not None:
                self._socket.linger = 0  # there is nobody to wait for
            self._bell.notify_closing()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
