"""How the process of a cluster member talks to the other members.

It finds `HEADRACE_CLUSTER` (JSON: who it is and who the others are) and `HEADRACE_SIGNAL_SOCKET`, a
Unix stream socket, in its environment. On the socket each line is one JSON object:

    {"to": {"role": "client", "index": 0}, "payload": "text"}      sent; without `to` to all others
    {"from": {"role": "server", "index": 0}, "payload": "text"}    received
    {"error": "..."}                                               a line that was not sent, and why

Bytes that are no UTF-8 travel as `payload_base64`. Signals are kept until the process connects, at
most `MAX_KEPT` of them; what comes then is dropped. Several connections each get every signal that
comes while they are open; the first one gets what was kept.
"""

from __future__ import annotations

import base64
import binascii
import logging
import os
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import trio
from msgspec import Struct

from transport import messages as m

log = logging.getLogger("headrace.worker")

CLUSTER, SOCKET = "HEADRACE_CLUSTER", "HEADRACE_SIGNAL_SOCKET"
MAX_LINE_BYTES = 2 * m.MAX_SIGNAL_BYTES
MAX_KEPT = 256
MAX_CONNECTIONS = 16
_READ_BYTES = 2**16


class BadSignal(ValueError):
    """A line that cannot be sent; the text says why."""


class Signal(Struct, frozen=True):
    """From or to a member; `peer` is none for all others."""

    peer: m.MemberRef | None
    payload: bytes


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    to: m.MemberRef | None = None
    payload: str | None = None
    payload_base64: str | None = None


def read_line(line: bytes) -> Signal:
    """A line of the process. Raises `BadSignal`."""
    try:
        told = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSignal(f"not a signal: {error}") from None
    if (told.payload is None) == (told.payload_base64 is None):
        raise BadSignal("give either payload or payload_base64")
    try:
        payload = (
            base64.b64decode(told.payload_base64, validate=True)
            if told.payload_base64 is not None
            else (told.payload or "").encode()
        )
    except binascii.Error:
        raise BadSignal("payload_base64 is not base64") from None
    if len(payload) > m.MAX_SIGNAL_BYTES:
        raise BadSignal(f"the payload of {len(payload)} bytes exceeds {m.MAX_SIGNAL_BYTES}")
    return Signal(told.to, payload)


def write_line(signal: Signal) -> bytes:
    """A line for the process."""
    try:
        payload = {"payload": signal.payload.decode()}
    except UnicodeDecodeError:
        payload = {"payload_base64": base64.b64encode(signal.payload).decode()}
    return msgspec.json.encode({"from": signal.peer, **payload}) + b"\n"


def error_line(text: str) -> bytes:
    return msgspec.json.encode({"error": text}) + b"\n"


class Member:
    """One running member: its seat, who else is there, and its signals both ways."""

    def __init__(
        self,
        seat: m.ClusterSeat,
        roster: Sequence[m.RosterEntry],
        send: Callable[[Signal], Awaitable[None]],
    ) -> None:
        self._seat = seat
        self._roster = list(roster)
        self._send = send
        self._kept: deque[Signal] = deque()
        self._readers: list[trio.MemorySendChannel[Signal]] = []
        self.dropped = 0
        """Signals that nobody read in time."""

    @property
    def description(self) -> str:
        """The value of `HEADRACE_CLUSTER`."""
        seat = self._seat
        own = (seat.role, seat.index)
        told: dict[str, Any] = {
            "attempt": seat.attempt,
            "role": seat.role,
            "index": seat.index,
            "primary": any(e.primary for e in self._roster if (e.role, e.index) == own),
            "roster": msgspec.to_builtins(self._roster),
        }
        return msgspec.json.encode(told).decode()

    def deliver(self, signal: Signal) -> None:
        """A signal of another member."""
        if not self._readers:
            if len(self._kept) < MAX_KEPT:
                self._kept.append(signal)
            else:
                self.dropped += 1
            return
        for reader in self._readers:
            try:
                reader.send_nowait(signal)
            except (trio.WouldBlock, trio.BrokenResourceError):
                self.dropped += 1

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection of the process, until it ends."""
        if len(self._readers) >= MAX_CONNECTIONS:
            await _write(stream, error_line(f"more than {MAX_CONNECTIONS} connections"))
            return
        to_reader, signals = trio.open_memory_channel[Signal](2 * MAX_KEPT)
        while self._kept:
            to_reader.send_nowait(self._kept.popleft())
        self._readers.append(to_reader)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass_on, stream, signals)
                await self._read(stream)
                nursery.cancel_scope.cancel()
        finally:
            self._readers.remove(to_reader)

    async def _pass_on(
        self, stream: trio.SocketStream, signals: trio.MemoryReceiveChannel[Signal]
    ) -> None:
        async for signal in signals:
            await _write(stream, write_line(signal))

    async def _read(self, stream: trio.SocketStream) -> None:
        buffer = bytearray()
        try:
            async for data in stream:
                buffer += data
                while (end := buffer.find(b"\n")) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    if line.strip():
                        await self._take(stream, line)
                if len(buffer) > MAX_LINE_BYTES:
                    await _write(stream, error_line(f"a line exceeds {MAX_LINE_BYTES} bytes"))
                    return
        except trio.BrokenResourceError:
            return

    async def _take(self, stream: trio.SocketStream, line: bytes) -> None:
        try:
            signal = read_line(line)
        except BadSignal as error:
            await _write(stream, error_line(str(error)))
            return
        to = signal.peer
        if to is None or any((e.role, e.index) == (to.role, to.index) for e in self._roster):
            await self._send(signal)
        else:
            await _write(stream, error_line(f"there is no member {to.role} {to.index}"))


async def _write(stream: trio.SocketStream, line: bytes) -> None:
    try:
        await stream.send_all(line)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the process is gone, or reads no more


@asynccontextmanager
async def offered(member: Member | None) -> AsyncIterator[dict[str, str]]:
    """The environment that a member's process gets; its socket lives as long as the block."""
    if member is None:
        yield {}
        return
    # Not below the state directory: the address of a Unix socket has 107 bytes at most.
    directory = Path(tempfile.mkdtemp(prefix="headrace-"))
    path = directory / "signals"
    try:
        with trio.socket.socket(trio.socket.AF_UNIX, trio.socket.SOCK_STREAM) as listening:
            await listening.bind(os.fspath(path))
            path.chmod(0o600)
            listening.listen(MAX_CONNECTIONS)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    trio.serve_listeners, member.serve, [trio.SocketListener(listening)]
                )
                yield {CLUSTER: member.description, SOCKET: os.fspath(path)}
                nursery.cancel_scope.cancel()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if member.dropped:
            log.warning("%d signals to a cluster member were not read and dropped", member.dropped)
