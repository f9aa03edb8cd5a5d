"""The client's side of the commands: one connection, requests with numbers, bounded waits.

A `Client` is one connection; it asks one thing at a time. `Steady` asks what may be asked twice,
and outlives the server: when a connection is lost it makes another and asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import TypeVar

import msgspec
import trio

from bin.errors import FAILED, REFUSED, UNREACHABLE, USAGE, CommandError, ServerUnreachable
from transport.codec import Decoder, Malformed, encode
from transport.interface import ConnectionLost, Connector, Dealer
from transport.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSIONS,
    SERVER_MESSAGES,
    CmdError,
    CmdHello,
    CmdSubmit,
    CmdSubmitted,
    CmdWelcome,
    Draining,
    Error,
    Message,
    Ping,
    Pong,
    Reject,
)

ANSWER_SECS = 30.0
SUBMIT_SECS = 300.0
"""A large submission is staged and synced before it is answered."""
RETRY_SECS = 0.2
FULL_RETRY_SECS = 0.02
RECONNECT_SECS = 300.0
"""How long `Steady` looks for a server that was there before."""

M = TypeVar("M", bound=Message)


class Client:
    """One connection to a server, greeted and ready for requests.

    For one task at a time. Every wait is bounded; a server that answers nothing in time is
    `ServerUnreachable`, a refusal is a `CommandError` with the server's own exit code.
    """

    def __init__(self, dealer: Dealer, endpoint: str) -> None:
        self.endpoint = endpoint
        self._dealer = dealer
        self._decoder = Decoder(SERVER_MESSAGES)
        self._inbox: deque[Message] = deque()
        self._request = 0

    async def greet(self) -> CmdWelcome:
        """Sends `CmdHello`; raises `ConnectionLost` or `CommandError` when refused."""
        await self._send(CmdHello(PROTOCOL_VERSIONS, f"headrace {version('headrace')}"))
        while True:
            message = await self._next()
            if isinstance(message, CmdWelcome):
                return message
            if isinstance(message, CmdError):
                raise _refusal(message)

    async def ask(self, request: Message, answer: type[M], within: float = ANSWER_SECS) -> M:
        """Sends a request, its number filled in here, and returns the answer to it.

        Raises:
            CommandError: the server refused; the code is the server's.
            ServerUnreachable: no answer in that many seconds.
            ConnectionLost: the connection ended; the request may have been taken.
        """
        with _bounded(within, self.endpoint):
            await self._send(self._numbered(request))
            return await self._answer(answer)

    async def submit(self, parts: Sequence[CmdSubmit]) -> CmdSubmitted:
        """Sends the parts of one submission and returns the parts of its answer as one.

        Raises:
            CommandError: the server refused it, or one job alone is larger than a frame.
            ServerUnreachable: the connection was lost or no answer came.
        """
        number = self._request + 1
        try:
            with _bounded(SUBMIT_SECS, self.endpoint):
                for part in parts:
                    await self._send(msgspec.structs.replace(part, request=number))
                self._request = number
                return await self._submitted()
        except ConnectionLost as error:
            raise ServerUnreachable(
                f"the connection to {self.endpoint} was lost before the answer "
                f"({_cause(error, self.endpoint)}); "
                "submit the file again: builds that were taken are not queued twice"
            ) from None

    def close(self) -> None:
        """Ends the connection."""
        self._dealer.close()

    async def _submitted(self) -> CmdSubmitted:
        whole = await self._answer(CmdSubmitted)
        last = whole
        while not last.is_final:
            last = await self._answer(CmdSubmitted)
            whole.jobs.update(last.jobs)
            whole.evaluations.extend(last.evaluations)
            whole.clusters.extend(last.clusters)
        return whole

    def _numbered(self, request: M) -> M:
        self._request += 1
        return msgspec.structs.replace(request, request=self._request)

    async def _send(self, message: Message) -> None:
        frame = encode(message)
        if len(frame) > MAX_FRAME_BYTES:
            raise CommandError(_too_large(message, len(frame)))
        while not self._dealer.send([frame]):
            # Full, or over: reading tells, and takes what the server waits to get rid of.
            with trio.move_on_after(FULL_RETRY_SECS):
                await self._receive()

    async def _receive(self) -> None:
        for frames in await self._dealer.receive():
            for frame in frames:
                try:
                    self._inbox.append(self._decoder.decode(frame))
                except Malformed as error:
                    raise CommandError(
                        f"{self.endpoint} speaks no protocol known here ({error}); is it a "
                        "headrace server, and of this version?",
                        UNREACHABLE,
                    ) from None

    async def _next(self) -> Message:
        """The next message that is for us; what concerns the connection is dealt with."""
        while True:
            while not self._inbox:
                await self._receive()
            match self._inbox.popleft():
                case Ping(nonce):
                    await self._send(Pong(nonce))
                case Draining() | Pong():
                    pass
                case Reject(code, reason) if code in (401, 403):
                    raise CommandError(f"{self.endpoint} refused: {reason}", REFUSED)
                case Reject(_, reason):
                    raise ConnectionLost(f"the server ended the session: {reason}")
                case Error(_, text):
                    raise CommandError(f"{self.endpoint}: {text}", USAGE)
                case message:
                    return message

    async def _answer(self, answer: type[M]) -> M:
        while True:
            message = await self._next()
            # Answers to requests that were given up bear other numbers.
            if getattr(message, "request", None) != self._request:
                continue
            if isinstance(message, CmdError):
                raise _refusal(message)
            if isinstance(message, answer):
                return message


@contextmanager
def _bounded(seconds: float, endpoint: str) -> Iterator[None]:
    """A time limit that names the server when it is reached."""
    with trio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise ServerUnreachable(
            f"no answer from {endpoint} within {seconds:g} s; it may be overloaded, try again"
        )


def _refusal(error: CmdError) -> CommandError:
    known = error.code in (FAILED, USAGE, UNREACHABLE, REFUSED)
    return CommandError(error.message, error.code if known else FAILED)


def _too_large(message: Message, size: int) -> str:
    name = type(message).__name__
    if isinstance(message, CmdSubmit) and len(message.jobs) == 1:
        name = message.jobs[0].drv_path
    return f"{name}: {size} bytes, more than the {MAX_FRAME_BYTES} that one message may have"


# -- connections -----------------------------------------------------------------------------


async def connect(connector: Connector, endpoint: str, patience: float) -> Client:
    """Connects and greets, trying again until `patience` seconds have passed.

    Raises:
        ServerUnreachable: nobody answered; the text names the address and the last cause.
        CommandError: the server refused, or `endpoint` is no address.
    """
    reason = "no answer"
    with trio.move_on_after(patience):
        while True:
            try:
                return await _connect_once(connector, endpoint)
            except ConnectionLost as error:
                reason = _cause(error, endpoint)
            await trio.sleep(RETRY_SECS)
    raise ServerUnreachable(
        f"cannot reach a server at {endpoint}: {reason}; start one with `headrace server`, or "
        "say where it is with --server or HEADRACE_SERVER"
    )


def _cause(error: Exception, endpoint: str) -> str:
    """The cause alone, where the error opens with the address that we name ourselves."""
    return str(error).removeprefix(f"{endpoint}: ")


async def _connect_once(connector: Connector, endpoint: str) -> Client:
    client = Client(connector.connect(endpoint), endpoint)
    try:
        await client.greet()
    except BaseException:
        client.close()
        raise
    return client


@asynccontextmanager
async def connected(connector: Connector, endpoint: str, patience: float) -> AsyncIterator[Client]:
    """A connection for the length of a block."""
    client = await connect(connector, endpoint, patience)
    try:
        yield client
    except ConnectionLost as error:
        raise ServerUnreachable(
            f"the connection to {endpoint} was lost: {_cause(error, endpoint)}; try again"
        ) from None
    finally:
        client.close()


class Steady:
    """Asks what may be asked twice, across restarts of the server.

    The first connection must succeed within `patience`; a later one is looked for up to
    `RECONNECT_SECS`. `notice` gets one line when the server is lost, one when it is back.
    """

    def __init__(self, client: Client, connector: Connector, notice: Callable[[str], None]) -> None:
        self.notice = notice
        self._client = client
        self._connector = connector

    async def ask(self, request: Message, answer: type[M]) -> M:
        """As `Client.ask`, but a lost connection or a missing answer is no error by itself."""
        while True:
            try:
                return await self._client.ask(request, answer)
            except (ConnectionLost, ServerUnreachable) as error:
                reason = _cause(error, self._client.endpoint)
            endpoint = self._client.endpoint
            self.notice(f"the server is gone ({reason}); waiting for it")
            self._client.close()
            self._client = await connect(self._connector, endpoint, RECONNECT_SECS)
            self.notice(f"the server at {endpoint} is back")

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()


@asynccontextmanager
async def steady(
    connector: Connector, endpoint: str, patience: float, notice: Callable[[str], None]
) -> AsyncIterator[Steady]:
    """A `Steady` for the length of a block."""
    asker = Steady(await connect(connector, endpoint, patience), connector, notice)
    try:
        yield asker
    finally:
        asker.close()
