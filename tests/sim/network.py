"""Simulated connections: ordered both ways, delayed, and lost as a whole."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.sim.clock import Clock
from tests.sim.faults import Faults


class Connection:
    """One client's connection to the server that was up when it was made."""

    def __init__(self, network: Network, peer: bytes, on_frames: Callable[[list[bytes]], None],
                 on_lost: Callable[[str], None]) -> None:  # fmt: skip
        self.network = network
        self.peer = peer
        self.is_up = True
        self.full_until = 0.0
        self._on_frames = on_frames
        self._on_lost = on_lost
        self._ready = {"up": 0.0, "down": 0.0}

    def to_server(self, frames: list[bytes]) -> None:
        self._travel("up", lambda: self.network.server.receive(self.peer, frames))

    def to_client(self, frames: list[bytes], not_before: float = 0.0) -> None:
        self._ready["down"] = max(self._ready["down"], not_before)
        self._travel("down", lambda: self._on_frames(frames))

    def cut(self, reason: str) -> None:
        """What is under way is lost; the client learns of it, the server by sending."""
        if not self.is_up:
            return
        self.is_up = False
        self.network.connections.pop(self.peer, None)
        self.network.clock.after(self.network.delay(), lambda: self._on_lost(reason))

    def _travel(self, way: str, arrive: Callable[[], None]) -> None:
        clock = self.network.clock
        self._ready[way] = max(self._ready[way], clock.now + self.network.delay())

        def deliver() -> None:
            if self.is_up:
                arrive()

        clock.at(self._ready[way], deliver)


class Network:
    """All connections to one server address."""

    def __init__(self, clock: Clock, random: Random, faults: Faults) -> None:
        self.clock = clock
        self.random = random
        self.faults = faults
        self.connections: dict[bytes, Connection] = {}
        self.server: Any = None
        self._made = 0

    def delay(self) -> float:
        low, high = self.faults.delay
        return self.random.uniform(low, high)

    def connect(
        self, on_frames: Callable[[list[bytes]], None], on_lost: Callable[[str], None]
    ) -> Connection:
        self._made += 1
        connection = Connection(self, b"peer-%d" % self._made, on_frames, on_lost)
        if self.server is None:
            connection.cut("refused")
        else:
            self.connections[connection.peer] = connection
        return connection

    def cut_all(self, reason: str) -> None:
        for connection in list(self.connections.values()):
            connection.cut(reason)
