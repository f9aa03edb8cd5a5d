from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
import trio

from bin import session
from bin.main import main
from transport import messages as m
from transport.adapter import Context
from transport.codec import Decoder, encode
from transport.interface import ConnectionLost
from transport.zmq_sockets import ZmqRouter

Handler = Callable[[m.Message], list[m.Message]]


class FakeDealer:
    """A connection to a `FakeServer`, without a socket."""

    def __init__(self, server: FakeServer, endpoint: str) -> None:
        self.server = server
        self.endpoint = endpoint
        self.closed = False
        self.lost = False
        self._in, self._out = trio.open_memory_channel[bytes](1_000)

    def send(self, frames) -> bool:
        assert not self.closed
        if self.lost:
            return False
        if self.server.full:
            self.server.full -= 1
            return False
        for frame in frames:
            self.server.take(self, frame)
        return True

    def push(self, message: m.Message) -> None:
        self._in.send_nowait(encode(message))

    def push_raw(self, frame: bytes) -> None:
        self._in.send_nowait(frame)

    def cut(self) -> None:
        self.lost = True
        self._in.close()

    async def receive(self) -> list[list[bytes]]:
        try:
            return [[await self._out.receive()]]
        except trio.EndOfChannel:
            raise ConnectionLost(f"{self.endpoint}: connection reset by peer") from None

    def close(self) -> None:
        self.closed = True


class FakeServer:
    """Answers requests by message type; a handler returns the answers, or drops the line."""

    def __init__(self) -> None:
        self.handlers: dict[type, Handler] = {}
        self.requests: list[m.Message] = []
        self.frames: list[int] = []
        self.dealers: list[FakeDealer] = []
        self.greeting: m.Message | None = m.CmdWelcome(version=1, server="fake")
        self.down = 0
        """How many further connections fail."""
        self.full = 0
        """How many further sends find no room."""
        self._decoder = Decoder((*m.COMMAND_MESSAGES, m.Pong))

    def connect(self, endpoint: str) -> FakeDealer:
        dealer = FakeDealer(self, endpoint)
        self.dealers.append(dealer)
        if self.down:
            self.down -= 1
            dealer.cut()
        return dealer

    def on(self, kind: type, *answers: Handler | m.Message) -> None:
        """What to answer to each next request of a kind; the last one stays."""
        queue = list(answers)

        def handle(message):
            answer = queue.pop(0) if len(queue) > 1 else queue[0]
            return [answer] if isinstance(answer, m.Message) else answer(message)

        self.handlers[kind] = handle

    def take(self, dealer: FakeDealer, frame: bytes) -> None:
        message = self._decoder.decode(frame)
        self.frames.append(len(frame))
        if isinstance(message, m.CmdHello):
            if self.greeting is not None:
                dealer.push(self.greeting)
            return
        self.requests.append(message)
        handler = self.handlers.get(type(message))
        for answer in handler(message) if handler is not None else ():
            if answer is CUT:
                dealer.cut()
                return
            if hasattr(answer, "request"):
                dealer.push(msgspec.structs.replace(answer, request=message.request))
            else:
                dealer.push(answer)


CUT = object()


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def cut() -> object:
    """As an answer: the connection is lost."""
    return CUT


@pytest.fixture
def headrace(server, monkeypatch, capfd):
    """Runs a command against the fake server; gives exit code, stdout and stderr."""

    @asynccontextmanager
    async def connecting(_target):
        yield server

    monkeypatch.setattr(session, "connecting", connecting)
    monkeypatch.setenv("HEADRACE_CONNECT_TIMEOUT", "0.5")

    def run(*args: str):
        code = main(list(args))
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture
def status() -> dict:
    """A status with a bit of everything."""
    return {
        "workers": [
            {
                "id": "w-1", "name": "amber", "state": "active", "drain_reason": None,
                "capabilities": {"fetch": False, "eval": True, "build": True},
                "architectures": ["x86_64-linux", "i686-linux"],
                "system_features": ["kvm", "big-parallel"], "zone": "hall-1",
                "slots": {"build": {"used": 1, "max": 2}, "eval": {"used": 1}}, "idle": [],
                "last_seen_secs": 1.5,
                "metrics": {"cpu_usage_pct": 61.4, "ram_free_mb": 5_632},
            },
            {
                "id": "w-2", "name": None, "state": "draining", "drain_reason": "new disk",
                "architectures": ["aarch64-linux"], "system_features": [], "zone": None,
                "slots": {"build": {"used": 1, "max": 4}, "eval": {"used": 0}}, "idle": ["build"],
                "last_seen_secs": 75.0, "metrics": None,
            },
        ],
        "jobs": {"waiting": 7, "pending": 3, "running": 2, "completed": 12, "failed": 1,
                 "dependency_failed": 2, "aborted": 0},
        "running": [
            {"job_id": "j-000001", "worker": "w-1", "assignment_id": "a-1", "kind": "build",
             "name": "hello-2.12.1", "since_secs": 185.2,
             "progress": {"phase": "build", "bytes_done": 400, "bytes_total": 1000}},
            {"job_id": "j-000002", "worker": "w-2", "assignment_id": "a-2", "kind": "eval",
             "name": "nixpkgs", "since_secs": 2.0, "progress": {"derivations": 120}},
        ],
        "clusters": [{"id": "c-1", "status": "Waiting", "attempt": None, "members": [{}, {}]}],
        "server": {"version": "0.1.0", "uptime_secs": 3725, "stale_reports": 3,
                   "malformed_frames": 0, "lost_races": 0,
                   "actors": {"pager": {"restarts": 2, "queue": 0}, "feeder": {"restarts": 0}}},
    }  # fmt: skip


class WirePeer:
    """A client of a `WireServer`."""

    def __init__(self, router: ZmqRouter, peer: bytes) -> None:
        self._router = router
        self._peer = peer

    def push(self, message: m.Message) -> None:
        self._router.send(self._peer, [encode(message)])


class WireServer:
    """A `FakeServer` behind a real socket, for commands that run as processes."""

    def __init__(self, server: FakeServer, nursery: trio.Nursery) -> None:
        self._server = server
        self._nursery = nursery
        self._scope = trio.CancelScope()
        self.endpoint = "tcp://127.0.0.1:0"

    async def start(self) -> str:
        self._scope = trio.CancelScope()
        self.endpoint = await self._nursery.start(self._serve)
        return self.endpoint

    def stop(self) -> None:
        self._scope.cancel()

    async def _serve(self, *, task_status) -> None:
        with self._scope:
            async with Context() as context:
                router = ZmqRouter(context, self.endpoint)
                task_status.started(router.endpoint)
                while True:
                    for peer, frames, _ in await router.receive():
                        for frame in frames:
                            self._server.take(WirePeer(router, peer), frame)


@pytest.fixture
async def wire(server, nursery) -> WireServer:
    made = WireServer(server, nursery)
    await made.start()
    return made
