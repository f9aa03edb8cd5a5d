"""The network in memory, on a clock that jumps."""

from __future__ import annotations

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from transport.interface import (
    BindFailed,
    ConnectionLost,
    Connector,
    Dealer,
    Incoming,
    Router,
    Sent,
)
from transport.loopback import Link, LoopbackDealer, LoopbackRouter, Network
from transport.messages import MAX_FRAMES

SERVER = "loop://server"


@pytest.fixture
def network(autojump_clock: MockClock) -> Network:
    return Network(lambda link: 1.0 if link.is_to_router else 2.0)


async def meet(router: LoopbackRouter, dealer: LoopbackDealer) -> bytes:
    assert dealer.send([b"hello"])
    [message] = await router.receive()
    assert message.frames == [b"hello"]
    return message.peer


def test_the_ends_keep_the_interface() -> None:
    network = Network()
    connector: Connector = network.connector()
    router: Router = network.router(SERVER)
    dealer: Dealer = connector.connect(SERVER)
    assert router.endpoint == SERVER
    assert isinstance(dealer, LoopbackDealer)


async def test_a_message_takes_the_time_of_its_link(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector("key").connect(SERVER)
    start = trio.current_time()
    assert dealer.send([b"a", b"b"])
    assert router.receive_nowait() == []
    [message] = await router.receive()
    assert trio.current_time() - start == pytest.approx(1)
    assert message == Incoming(dealer.connection.peer, [b"a", b"b"], "key")
    assert router.send(message.peer, [b"c"]) is Sent.OK
    assert await dealer.receive() == [[b"c"]]
    assert trio.current_time() - start == pytest.approx(3)


async def test_links_keep_their_order_and_a_batch_takes_what_waits(
    autojump_clock: MockClock,
) -> None:
    delays = iter([5.0, 1.0, 3.0, 9.0])
    network = Network(lambda _: next(delays))
    router = network.router(SERVER)
    one, two = (network.connector().connect(SERVER) for _ in range(2))
    for dealer, frame in ((one, b"1a"), (one, b"1b"), (two, b"2a"), (two, b"2b")):
        assert dealer.send([frame])
    seen: list[tuple[float, list[bytes]]] = []
    start = trio.current_time()
    while len(seen) < 3:
        batch = await router.receive()
        seen.append((trio.current_time() - start, [message.frames[0] for message in batch]))
    assert [frames for _, frames in seen] == [[b"2a"], [b"1a", b"1b"], [b"2b"]]
    assert [at for at, _ in seen] == pytest.approx([3, 5, 9])


async def test_a_reader_that_sleeps_wakes_for_an_earlier_message(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    peer = await meet(router, dealer)

    async def send_later() -> None:
        await trio.sleep(10)
        router.send(peer, [b"news"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_later)
        start = trio.current_time()
        assert await dealer.receive() == [[b"news"]]
        assert trio.current_time() - start == pytest.approx(12)


async def test_a_cancelled_receive_loses_nothing(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    dealer.send([b"x"])
    with trio.move_on_after(0.5):
        await router.receive()
    await trio.sleep(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await router.receive()
    [message] = await router.receive()
    assert message.frames == [b"x"]


async def test_one_reader_an_end(network: Network, autojump_clock: MockClock) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    for end in (router, dealer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await end.receive()
            nursery.cancel_scope.cancel()


# -- faults ----------------------------------------------------------------------------------


async def test_a_cut_loses_what_is_under_way_and_keeps_what_arrived(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    other = network.connector().connect(SERVER)
    peer = await meet(router, dealer)
    router.send(peer, [b"arrives"])
    await trio.sleep(1)
    dealer.send([b"arrives"])
    await trio.sleep(1)
    dealer.send([b"lost"])
    router.send(peer, [b"lost"])
    other.send([b"mine"])
    assert network.connections == [dealer.connection, other.connection]
    network.cut(dealer.connection, "cable pulled")
    network.cut(dealer.connection)
    assert network.connections == [other.connection]
    assert router.send(peer, [b"x"]) is Sent.GONE
    assert not dealer.send([b"x"])
    assert await dealer.receive() == [[b"arrives"]]
    with pytest.raises(ConnectionLost, match="loop://server: cable pulled"):
        await dealer.receive()
    received = [m.frames[0] for m in await router.receive()]
    received += [m.frames[0] for m in await router.receive()]
    assert received == [b"arrives", b"mine"]


async def test_a_cut_wakes_the_dealer(network: Network, autojump_clock: MockClock) -> None:
    network.router(SERVER)
    dealer = network.connector().connect(SERVER)

    async def cut_later() -> None:
        await trio.sleep(3)
        network.cut(dealer.connection)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cut_later)
        with pytest.raises(ConnectionLost):
            await dealer.receive()


async def test_a_black_hole_swallows_and_stands(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    peer = await meet(router, dealer)
    network.black_hole(dealer.connection)
    assert dealer.send([b"lost"])
    assert router.send(peer, [b"lost"]) is Sent.OK
    with trio.move_on_after(100) as scope:
        await dealer.receive()
    assert scope.cancelled_caught
    network.black_hole(dealer.connection, is_on=False)
    assert dealer.send([b"back"])
    assert [message.frames for message in await router.receive()] == [[b"back"]]
    assert router.send(peer, [b"again"]) is Sent.OK
    assert await dealer.receive() == [[b"again"]]


async def test_a_full_link_refuses_and_tells_of_room(autojump_clock: MockClock) -> None:
    network = Network(router_capacity=2, dealer_capacity=3)
    router = network.router(SERVER)
    dealer, other = (network.connector().connect(SERVER) for _ in range(2))
    assert [dealer.send([b"x"]) for _ in range(4)] == [True, True, True, False]
    assert other.send([b"y"])
    batch = await router.receive()
    assert len(batch) == 4
    assert dealer.send([b"x"])
    peer, others = batch[0].peer, batch[-1].peer
    assert [router.send(peer, [b"x"]) for _ in range(3)] == [Sent.OK, Sent.OK, Sent.FULL]
    assert router.send(others, [b"x"]) is Sent.OK
    assert len(await router.receive()) == 1

    async def read() -> None:
        await trio.sleep(60)
        assert len(await dealer.receive()) == 2

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        start = trio.current_time()
        assert await router.receive() == []
        assert trio.current_time() - start == pytest.approx(60)
    assert router.send(peer, [b"x"]) is Sent.OK


async def test_too_many_frames_are_dropped_but_for_one(
    network: Network, autojump_clock: MockClock
) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    assert dealer.send([b"x"] * (MAX_FRAMES + 100))
    [message] = await router.receive()
    assert len(message.frames) == MAX_FRAMES + 1


async def test_a_batch_is_bounded(network: Network, autojump_clock: MockClock) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    for _ in range(600):
        assert dealer.send([b"x"])
    assert [len(await router.receive()), len(await router.receive())] == [512, 88]


# -- opening and closing ---------------------------------------------------------------------


async def test_a_router_that_restarts(network: Network, autojump_clock: MockClock) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    peer = await meet(router, dealer)
    with pytest.raises(BindFailed, match="cannot listen on loop://server"):
        network.router(SERVER)
    router.send(peer, [b"draining"])
    router.close()
    router.close()
    assert router.send(peer, [b"x"]) is Sent.GONE
    with pytest.raises(trio.ClosedResourceError):
        await router.receive()
    # What it sent before it closed still arrives.
    assert await dealer.receive() == [[b"draining"]]
    with pytest.raises(ConnectionLost):
        await dealer.receive()
    refused = network.connector().connect(SERVER)
    assert not refused.send([b"x"])
    with pytest.raises(ConnectionLost, match="connection refused"):
        await refused.receive()
    again = network.router(SERVER)
    new_peer = await meet(again, network.connector().connect(SERVER))
    assert new_peer != peer
    assert again.send(peer, [b"x"]) is Sent.GONE


async def test_a_dealer_that_leaves(network: Network, autojump_clock: MockClock) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    peer = await meet(router, dealer)
    dealer.send([b"goodbye"])
    dealer.close()
    dealer.close()
    assert router.send(peer, [b"x"]) is Sent.GONE
    assert [message.frames for message in await router.receive()] == [[b"goodbye"]]
    assert not dealer.send([b"x"])
    with pytest.raises(trio.ClosedResourceError):
        await dealer.receive()


async def test_closing_wakes_the_reader(network: Network, autojump_clock: MockClock) -> None:
    router = network.router(SERVER)
    dealer = network.connector().connect(SERVER)
    ended: list[object] = []

    async def read(end: LoopbackRouter | LoopbackDealer) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await end.receive()
        ended.append(end)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, dealer)
        nursery.start_soon(read, router)
        await trio.testing.wait_all_tasks_blocked()
        dealer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == [dealer]
        router.close()
    assert ended == [dealer, router]


async def test_delays_may_differ_by_connection(autojump_clock: MockClock) -> None:
    def delay(link: Link) -> float:
        return float(link.connection.number)

    network = Network(delay)
    router = network.router(SERVER)
    for _ in range(3):
        network.connector().connect(SERVER).send([b"x"])
    numbers = []
    for _ in range(3):
        [message] = await router.receive()
        numbers.append(int.from_bytes(message.peer))
    assert numbers == [1, 2, 3]
