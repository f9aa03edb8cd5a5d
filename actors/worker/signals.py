"""How the process of a cluster member talks to the other members.

It finds `HEADRACE_CLUSTER` (JSON: who it is and who the others are) and `HEADRACE_SIGNAL_SOCKET`, a
Unix stream socket for the lines of `signal_lines`, in its environment.

Theory of operation. A signal for the process waits in a mailbox, in order and bounded. The
process's connection empties it; between two connections it waits for the next. While several are
open each has a mailbox of its own, so that all hear everything.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from actors.worker.signal_lines import (
    MAX_LINE_BYTES,
    BadSignal,
    LineSplitter,
    Signal,
    error_line,
    read_line,
    write_line,
)
from transport import messages as m

log = logging.getLogger("headrace.worker")

CLUSTER, SOCKET = "HEADRACE_CLUSTER", "HEADRACE_SIGNAL_SOCKET"
MAX_WAITING = 256
MAX_WAITING_BYTES = 8 * 2**20
MAX_CONNECTIONS = 16
_LAST_READ_SECS = 2.0
# The address of a Unix socket has 103 bytes at least on all systems; our own names need 39.
_MAX_PLACE_BYTES = 60

Write = Callable[[bytes], Awaitable[None]]
T = TypeVar("T")


class CannotListen(Exception):
    """There can be no socket for the member; the text is one line."""


class Mailbox:
    """Lines on their way to the process. What comes while it is full is counted in their midst."""

    def __init__(self) -> None:
        self._waiting: deque[bytes | int] = deque()
        """Lines, and numbers of those that were dropped there."""
        self._bytes = 0
        self._filled = trio.Event()

    def put(self, line: bytes) -> bool:
        """Whether there was room."""
        fits = len(self._waiting) < MAX_WAITING and self._bytes + len(line) <= MAX_WAITING_BYTES
        if fits:
            self._waiting.append(line)
            self._bytes += len(line)
        elif isinstance(last := self._waiting[-1], int):
            self._waiting[-1] = last + 1
        else:
            self._waiting.append(1)
        self._filled.set()
        return fits

    async def empty(self, write: Write) -> None:
        """Writes until cancelled. What was not written to its end stays."""
        while True:
            await self._filled.wait()
            while self._waiting:
                line = self._waiting[0]
                if isinstance(line, int):
                    self._waiting.popleft()
                    await write(error_line(f"{line} signals were dropped: they were not read"))
                else:
                    await write(line)
                    self._waiting.popleft()
                    self._bytes -= len(line)
            self._filled = trio.Event()


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
        own = m.MemberRef(seat.role, seat.index)
        members = [m.MemberRef(entry.role, entry.index) for entry in roster]
        self._others = [member for member in members if member != own]
        self._is_primary = any(
            entry.primary for entry, member in zip(roster, members, strict=True) if member == own
        )
        self._mailbox = Mailbox()
        """Of the next connection, while none is open."""
        self._open: list[Mailbox] = []
        self.dropped = 0
        """Signals that nobody read in time."""

    @property
    def description(self) -> str:
        """The value of `HEADRACE_CLUSTER`."""
        seat = self._seat
        told: dict[str, Any] = {
            "attempt": seat.attempt,
            "role": seat.role,
            "index": seat.index,
            "primary": self._is_primary,
            "roster": msgspec.to_builtins(self._roster),
        }
        return msgspec.json.encode(told).decode()

    def deliver(self, signal: Signal) -> None:
        """A signal of another member."""
        line = write_line(signal)
        for mailbox in self._open or [self._mailbox]:
            self.dropped += not mailbox.put(line)

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection of the process, until it ends."""
        # Two tasks write to it: signals, and answers to bad lines.
        writing = trio.Lock()

        async def write(line: bytes) -> None:
            async with writing:
                await stream.send_all(line)

        async with stream:
            if len(self._open) >= MAX_CONNECTIONS:
                text = f"more than {MAX_CONNECTIONS} connections; close one of them"
                await _if_connected(write, error_line(text))
                return
            mailbox = Mailbox() if self._open else self._mailbox
            self._open.append(mailbox)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_if_connected, mailbox.empty, write)
                    await self._read(stream, write)
                    nursery.cancel_scope.cancel()
            finally:
                self._open.remove(mailbox)
                if not self._open:
                    self._mailbox = mailbox

    async def _read(self, stream: trio.SocketStream, write: Write) -> None:
        splitter = LineSplitter()
        try:
            async for data in stream:
                for line in splitter.feed(bytes(data)):
                    await self._take(line, write)
        except trio.BrokenResourceError:
            pass  # what it had sent before has arrived
        for line in splitter.feed(b"\n"):
            await self._take(line, write)

    async def _take(self, line: bytes | None, write: Write) -> None:
        """A line of the process; none: it is too long."""
        if line is not None and not line.strip():
            return
        try:
            signal = self._signal_of(line)
        except BadSignal as error:
            await _if_connected(write, error_line(str(error)))
        else:
            await self._send(signal)

    def _signal_of(self, line: bytes | None) -> Signal:
        if line is None:
            raise BadSignal(f"a line exceeds {MAX_LINE_BYTES} bytes")
        signal = read_line(line)
        to = signal.peer
        if to is not None and to not in self._others:
            raise BadSignal(f"there is no other member {to.role} {to.index}")
        return signal


async def _if_connected(work: Callable[[T], Awaitable[None]], argument: T) -> None:
    try:
        await work(argument)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the process is gone, or reads no more


@asynccontextmanager
async def offered(member: Member | None, owner: Path) -> AsyncIterator[dict[str, str]]:
    """The environment that a member's process gets; its socket lives as long as the block.

    When the block ends in order, the process has ended: what it had sent by then is passed on.

    Args:
        member: none for a job that is no member; its environment is empty.
        owner: a directory of this worker alone, see `remove_leftovers`.

    Raises:
        CannotListen: before the block.
    """
    if member is None:
        yield {}
        return
    directory, listening = _listen(owner)
    try:
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
        accepting = trio.CancelScope()
        async with trio.open_nursery() as connections:
            connections.start_soon(_accept, listener, member, connections, accepting)
            yield {CLUSTER: member.description, SOCKET: listening.getsockname()}
            accepting.cancel()
            for stream in _not_yet_accepted(listening):
                connections.start_soon(member.serve, stream)
            # The member is done, whoever wants it stopped from here on. But something that left the
            # builder's session may hold a connection for ever.
            connections.cancel_scope.shield = True
            connections.cancel_scope.deadline = trio.current_time() + _LAST_READ_SECS
    finally:
        listening.close()
        shutil.rmtree(directory, ignore_errors=True)
        if member.dropped:
            log.warning("%d signals to a cluster member were not read and dropped", member.dropped)


async def _accept(
    listener: trio.SocketListener,
    member: Member,
    connections: trio.Nursery,
    accepting: trio.CancelScope,
) -> None:
    with accepting:
        await trio.serve_listeners(member.serve, [listener], handler_nursery=connections)


def _not_yet_accepted(listening: socket.socket) -> Iterator[trio.SocketStream]:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return  # no more wait
        yield trio.SocketStream(trio.socket.from_stdlib_socket(connection))


def _listen(owner: Path) -> tuple[Path, socket.socket]:
    """A socket in a directory of its own. Raises `CannotListen`."""
    directory = None
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        directory = Path(tempfile.mkdtemp(prefix=_prefix(owner), dir=_place()))
        path = directory / "signals"
        listening.bind(os.fspath(path))
        path.chmod(0o600)
        listening.listen(MAX_CONNECTIONS)
    except OSError as error:
        listening.close()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        raise CannotListen(f"no socket for the cluster's signals: {error}") from None
    return directory, listening


def remove_leftovers(owner: Path) -> None:
    """Removes the sockets of a worker that was killed."""
    for left in _place().glob(f"{_prefix(owner)}*"):
        shutil.rmtree(left, ignore_errors=True)


def _prefix(owner: Path) -> str:
    return f"headrace-{hashlib.sha256(os.fsencode(owner)).hexdigest()[:12]}-"


def _place() -> Path:
    """Where sockets are: not in the state directory, whose path may be too long for an address."""
    place = tempfile.gettempdir()
    return Path(place if len(os.fsencode(place)) <= _MAX_PLACE_BYTES else "/tmp")  # noqa: S108 - the directories in it have random names and are private
