"""Routers and dealers in memory, on Trio's clock: for simulations and tests.

No sockets, threads or randomness: under a `trio.testing.MockClock` a run repeats exactly. Each
direction of a connection keeps its order; a message becomes visible when its link's delay has
passed. The network can cut connections, lose what they carry, and hold few messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

import trio

from transport.interface import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    BindFailed,
    ConnectionLost,
    Incoming,
    Sent,
)
from transport.messages import MAX_FRAMES


class Link(NamedTuple):
    """One direction of a connection."""

    connection: Connection
    is_to_router: bool


class Connection:
    """One dealer's connection, as a test sees it; `number` counts them from 1."""

    def __init__(
        self, number: int, endpoint: str, user_id: str | None, router: LoopbackRouter | None
    ) -> None:
        self.number = number
        self.endpoint = endpoint
        self.user_id = user_id
        self.peer = b"\0" + number.to_bytes(4)
        """What the router knows it by."""
        self.router = router
        """None when the connection was refused."""
        self.lost: str | None = None if router is not None else "connection refused"
        """Why it is over; none while it stands."""
        self.is_black_hole = False

    def __repr__(self) -> str:
        return f"<connection {self.number} to {self.endpoint}: {self.lost or 'up'}>"


class Network:
    """All routers and connections of one simulation.

    `delay` gives the seconds that a message sent now takes on a link, more than 0; a message
    never overtakes an earlier one. At most `router_capacity` messages of a router wait for one
    dealer, under way or unread, and `dealer_capacity` the other way: one more is refused.
    """

    def __init__(
        self,
        delay: Callable[[Link], float] = lambda _: 0.001,
        *,
        router_capacity: int = 64,
        dealer_capacity: int = 1_000,
    ) -> None:
        self.router_capacity = router_capacity
        self.dealer_capacity = dealer_capacity
        self._delay = delay
        self._routers: dict[str, LoopbackRouter] = {}
        self._dealers: dict[Connection, LoopbackDealer] = {}
        self._count = 0

    @property
    def connections(self) -> list[Connection]:
        """The connections that stand, oldest first."""
        return list(self._dealers)

    def router(self, endpoint: str) -> LoopbackRouter:
        """Listens; raises `BindFailed` while another router has the endpoint."""
        if endpoint in self._routers:
            raise BindFailed(f"cannot listen on {endpoint}: Address already in use")
        router = self._routers[endpoint] = LoopbackRouter(self, endpoint)
        return router

    def connector(self, user_id: str | None = None) -> LoopbackConnector:
        """A `Connector` whose connections carry this user id."""
        return LoopbackConnector(self, user_id)

    def cut(self, connection: Connection, cause: str = "the connection was closed") -> None:
        """Ends a connection for both sides; what is under way is lost, what arrived is not."""
        if connection.lost is None:
            dealer = self._dealers[connection]
            self._end(connection, cause)
            dealer.forget_under_way()
            if connection.router is not None:
                connection.router.forget_under_way(connection)

    def black_hole(self, connection: Connection, *, is_on: bool = True) -> None:
        """From now on the connection stands but carries nothing: sends are accepted and lost."""
        connection.is_black_hole = is_on

    # -- what the ends call ------------------------------------------------------------------

    def connect(self, endpoint: str, user_id: str | None) -> LoopbackDealer:
        self._count += 1
        connection = Connection(self._count, endpoint, user_id, self._routers.get(endpoint))
        dealer = LoopbackDealer(self, connection)
        if connection.router is not None:
            self._dealers[connection] = dealer
            connection.router.add(connection, dealer)
        return dealer

    def _end(self, connection: Connection, cause: str) -> None:
        connection.lost = cause
        dealer = self._dealers.pop(connection)
        dealer.wake()
        if connection.router is not None:
            connection.router.remove(connection)

    def close_dealer(self, connection: Connection) -> None:
        if connection.lost is None:
            self._end(connection, "closed by this side")

    def close_router(self, router: LoopbackRouter) -> None:
        del self._routers[router.endpoint]
        for connection in self.connections:
            if connection.router is router:
                self._end(connection, "the connection was closed")

    def ready_at(self, link: Link, last: float) -> float:
        """When a message sent now on a link is visible, given that of the one before it."""
        delay = self._delay(link)
        assert delay > 0, "a message takes time"
        return max(trio.current_time() + delay, last)


class _Sleeper:
    """Where the one reader of an end sleeps."""

    def __init__(self) -> None:
        self._scope: trio.CancelScope | None = None

    async def wait_until(self, deadline: float) -> None:
        if self._scope is not None:
            raise trio.BusyResourceError("another task receives here")
        with trio.CancelScope(deadline=deadline) as scope:
            self._scope = scope
            try:
                await trio.sleep_forever()
            finally:
                self._scope = None

    def wake(self) -> None:
        if self._scope is not None:
            self._scope.cancel()


class _Arriving(NamedTuple):
    """A message at a router, ordered by when it is visible, then by when it was sent."""

    ready_at: float
    order: int
    connection: Connection
    frames: list[bytes]


class LoopbackRouter:
    """A `Router` in memory; see `Network.router`."""

    def __init__(self, network: Network, endpoint: str) -> None:
        self.endpoint = endpoint
        self._network = network
        self._dealers: dict[bytes, LoopbackDealer] = {}
        self._arriving: list[_Arriving] = []
        self._waiting: dict[Connection, int] = {}
        """How many messages of a connection are among them."""
        self._last_ready: dict[Connection, float] = {}
        self._order = 0
        self._has_room = False
        self._sleeper = _Sleeper()
        self._is_closed = False

    async def receive(self) -> list[Incoming]:
        await trio.lowlevel.checkpoint()
        while True:
            if batch := self.receive_nowait():
                return batch
            if self._has_room:
                self._has_room = False
                return []
            await self._sleeper.wait_until(self._arriving[0].ready_at if self._arriving else inf)

    def receive_nowait(self) -> list[Incoming]:
        if self._is_closed:
            raise trio.ClosedResourceError("this router is closed")
        now = trio.current_time()
        batch: list[Incoming] = []
        size = 0
        while (
            self._arriving
            and self._arriving[0].ready_at <= now
            and len(batch) < MAX_BATCH_MESSAGES
            and size < MAX_BATCH_BYTES
        ):
            _, _, connection, frames = heappop(self._arriving)
            self._uncount(connection)
            size += sum(map(len, frames))
            batch.append(Incoming(connection.peer, frames, connection.user_id))
        return batch

    def send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        assert frames, "a message has frames"
        dealer = self._dealers.get(peer)
        if dealer is None:
            return Sent.GONE
        return Sent.OK if dealer.put(list(frames)) else Sent.FULL

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._network.close_router(self)
            self._arriving.clear()
            self._waiting.clear()
            self._sleeper.wake()

    # -- what the network and the dealers call -----------------------------------------------

    def add(self, connection: Connection, dealer: LoopbackDealer) -> None:
        self._dealers[connection.peer] = dealer

    def remove(self, connection: Connection) -> None:
        del self._dealers[connection.peer]
        self._last_ready.pop(connection, None)

    def put(self, connection: Connection, frames: list[bytes]) -> bool:
        """Takes a message from a dealer; false when its link is full."""
        waiting = self._waiting.get(connection, 0)
        if waiting >= self._network.dealer_capacity:
            return False
        if connection.is_black_hole:
            return True
        last = self._last_ready.get(connection, 0.0)
        ready_at = self._network.ready_at(Link(connection, is_to_router=True), last)
        self._last_ready[connection] = ready_at
        self._waiting[connection] = waiting + 1
        self._order += 1
        kept = frames[: MAX_FRAMES + 1]
        heappush(self._arriving, _Arriving(ready_at, self._order, connection, kept))
        self._sleeper.wake()
        return True

    def forget_under_way(self, connection: Connection) -> None:
        now = trio.current_time()
        kept = [a for a in self._arriving if a.connection is not connection or a.ready_at <= now]
        for _ in range(len(self._arriving) - len(kept)):
            self._uncount(connection)
        self._arriving = kept
        heapify(self._arriving)

    def room_again(self) -> None:
        """A dealer that was full has read."""
        self._has_room = True
        self._sleeper.wake()

    def _uncount(self, connection: Connection) -> None:
        self._waiting[connection] -= 1
        if not self._waiting[connection]:
            del self._waiting[connection]


class LoopbackConnector:
    """A `Connector` in memory; see `Network.connector`."""

    def __init__(self, network: Network, user_id: str | None) -> None:
        self._network = network
        self._user_id = user_id

    def connect(self, endpoint: str) -> LoopbackDealer:
        return self._network.connect(endpoint, self._user_id)


class LoopbackDealer:
    """A `Dealer` in memory; see `Network.connector`."""

    def __init__(self, network: Network, connection: Connection) -> None:
        self.connection = connection
        self._network = network
        self._arriving: deque[tuple[float, list[bytes]]] = deque()
        self._last_ready = 0.0
        self._was_full = False
        self._sleeper = _Sleeper()
        self._is_closed = False

    async def receive(self) -> list[list[bytes]]:
        await trio.lowlevel.checkpoint()
        while True:
            if self._is_closed:
                raise trio.ClosedResourceError("this dealer is closed")
            if batch := self._take():
                return batch
            if self.connection.lost is not None and not self._arriving:
                raise ConnectionLost(f"{self.connection.endpoint}: {self.connection.lost}")
            await self._sleeper.wait_until(self._arriving[0][0] if self._arriving else inf)

    def _take(self) -> list[list[bytes]]:
        now = trio.current_time()
        batch: list[list[bytes]] = []
        size = 0
        while (
            self._arriving
            and self._arriving[0][0] <= now
            and len(batch) < MAX_BATCH_MESSAGES
            and size < MAX_BATCH_BYTES
        ):
            _, frames = self._arriving.popleft()
            size += sum(map(len, frames))
            batch.append(frames)
        if batch and self._was_full:
            self._was_full = False
            if self.connection.lost is None and self.connection.router is not None:
                self.connection.router.room_again()
        return batch

    def send(self, frames: Sequence[bytes]) -> bool:
        assert frames, "a message has frames"
        if self.connection.lost is not None or self.connection.router is None:
            return False
        return self.connection.router.put(self.connection, list(frames))

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._network.close_dealer(self.connection)
            self._arriving.clear()
            self._sleeper.wake()

    # -- what the network and the router call ------------------------------------------------

    def put(self, frames: list[bytes]) -> bool:
        """Takes a message from the router; false when the link is full."""
        if len(self._arriving) >= self._network.router_capacity:
            self._was_full = True
            return False
        if not self.connection.is_black_hole:
            link = Link(self.connection, is_to_router=False)
            self._last_ready = self._network.ready_at(link, self._last_ready)
            self._arriving.append((self._last_ready, frames))
            self._sleeper.wake()
        return True

    def forget_under_way(self) -> None:
        now = trio.current_time()
        while self._arriving and self._arriving[-1][0] > now:
            self._arriving.pop()

    def wake(self) -> None:
        self._sleeper.wake()
