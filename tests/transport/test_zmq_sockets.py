"""The two ends over real sockets: wake-ups, cancellation, full, gone and hostile peers."""

from __future__ import annotations

import select
import socket as plain
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing
import zmq

from transport import zmq_sockets
from transport.adapter import Context
from transport.interface import BindFailed, ConnectionLost, Incoming, Sent
from transport.messages import MAX_FRAME_BYTES, MAX_FRAMES
from transport.zmq_sockets import ZmqConnector, ZmqDealer, ZmqRouter, _Fate

LOCAL = "tcp://127.0.0.1:0"


@pytest.fixture
def router(context: Context) -> ZmqRouter:
    return ZmqRouter(context, LOCAL)


@pytest.fixture
def connector(context: Context) -> ZmqConnector:
    return ZmqConnector(context)


def spin_until(condition: Callable[[], bool]) -> None:
    """Waits with the event loop stopped, so that nothing but the test runs."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def poll_until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.005)


def is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(select.select([socket.getsockopt(zmq.FD)], [], [], 0)[0])


async def meet(router: ZmqRouter, dealer: ZmqDealer) -> bytes:
    """Exchanges a message both ways; returns the peer as the router knows it."""
    assert dealer.send([b"hello"])
    [(peer, frames, _)] = await router.receive()
    assert frames == [b"hello"]
    assert router.send(peer, [b"welcome"]) is Sent.OK
    assert await dealer.receive() == [[b"welcome"]]
    return peer


async def test_messages_keep_frames_and_order(router: ZmqRouter, connector: ZmqConnector) -> None:
    dealer = connector.connect(router.endpoint)
    peer = await meet(router, dealer)
    sent = [[b"%d" % number, b"x" * number, b""] for number in range(300)]
    for frames in sent:
        assert dealer.send(frames)
    received: list[Incoming] = []
    while len(received) < len(sent):
        received += await router.receive()
    assert received == [Incoming(peer, frames, None) for frames in sent]


@pytest.mark.parametrize("size", [65_535, 65_536, 2**20])
async def test_large_frames_arrive_whole(
    router: ZmqRouter, connector: ZmqConnector, size: int
) -> None:
    dealer = connector.connect(router.endpoint)
    peer = await meet(router, dealer)
    page = bytes(range(256)) * (size // 256 + 1)
    assert router.send(peer, [page, b"tail"]) is Sent.OK
    assert await dealer.receive() == [[page, b"tail"]]
    assert dealer.send([b"head", page])
    assert await router.receive() == [Incoming(peer, [b"head", page], None)]


async def test_a_batch_is_bounded(router: ZmqRouter, connector: ZmqConnector) -> None:
    dealer = connector.connect(router.endpoint)
    await meet(router, dealer)
    received = 0
    for number in range(1_000):
        if not dealer.send([b"%d" % number]):
            break
    while received < number:
        batch = await router.receive()
        assert 1 <= len(batch) <= 512
        received += len(batch)


async def test_a_peer_that_was_silent_is_heard_amid_a_flood(
    router: ZmqRouter, connector: ZmqConnector, monkeypatch: pytest.MonkeyPatch
) -> None:
    loud, silent = connector.connect(router.endpoint), connector.connect(router.endpoint)
    await meet(router, loud)
    peer = await meet(router, silent)
    monkeypatch.setattr(zmq_sockets, "MAX_BATCH_MESSAGES", 1)
    for _ in range(200):
        assert loud.send([b"noise"])
    assert (await router.receive())[0].frames == [b"noise"]
    assert silent.send([b"hear me"])
    for _ in range(20):  # by itself ZeroMQ would look for it after some 50 more
        await trio.sleep(0.005)
        if await router.receive() == [Incoming(peer, [b"hear me"], None)]:
            return
    pytest.fail("not heard")


async def test_too_many_frames_are_dropped_but_for_one(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    dealer = connector.connect(router.endpoint)
    assert dealer.send([b"x"] * MAX_FRAMES)
    assert dealer.send([b"x"] * (MAX_FRAMES + 100))
    counts: list[int] = []
    while len(counts) < 2:
        counts += [len(message.frames) for message in await router.receive()]
    assert counts == [MAX_FRAMES, MAX_FRAMES + 1]


# -- wake-ups --------------------------------------------------------------------------------


async def test_a_send_that_eats_the_event_wakes_the_router(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    dealer = connector.connect(router.endpoint)
    await meet(router, dealer)
    batches: list[list[Incoming]] = []

    async def read() -> None:
        batches.append(await router.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        # From here to the next await the reader cannot run: it sleeps on the descriptor.
        dealer.send([b"news"])
        spin_until(lambda: is_readable(router._socket))
        assert router.send(b"nobody", [b"x"]) is Sent.GONE
        assert not is_readable(router._socket), "the send was to eat the event"
        with trio.fail_after(2):
            await poll_until(lambda: bool(batches))
    assert [message.frames for message in batches[0]] == [[b"news"]]


async def test_a_send_that_eats_the_event_wakes_the_dealer(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    dealer = connector.connect(router.endpoint)
    peer = await meet(router, dealer)
    batches: list[list[list[bytes]]] = []

    async def read() -> None:
        batches.append(await dealer.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        router.send(peer, [b"news"])
        spin_until(lambda: is_readable(dealer._socket))
        dealer.send([b"x"])
        assert not is_readable(dealer._socket), "the send was to eat the event"
        with trio.fail_after(2):
            await poll_until(lambda: bool(batches))
    assert batches == [[[b"news"]]]


async def test_one_reader_a_socket(router: ZmqRouter, connector: ZmqConnector) -> None:
    dealer = connector.connect(router.endpoint)
    for end in (router, dealer):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await end.receive()
            nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_nothing(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    dealer = connector.connect(router.endpoint)
    peer = await meet(router, dealer)
    inbound: list[bytes] = []
    outbound: list[bytes] = []

    async def read_router() -> None:
        while True:
            inbound.extend(message.frames[0] for message in await router.receive())

    async def read_dealer() -> None:
        while True:
            outbound.extend(frames[0] for frames in await dealer.receive())

    count = 0
    for round_ in range(200):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_router)
            nursery.start_soon(read_dealer)
            for _ in range(round_ % 4):
                assert dealer.send([b"%d" % count])
                while router.send(peer, [b"%d" % count]) is Sent.FULL:
                    await trio.lowlevel.checkpoint()
                count += 1
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_router)
        nursery.start_soon(read_dealer)
        await poll_until(lambda: len(inbound) == count and len(outbound) == count)
        nursery.cancel_scope.cancel()
    numbers = [b"%d" % number for number in range(count)]
    assert inbound == numbers
    assert outbound == numbers


async def test_a_cancelled_caller_takes_nothing(router: ZmqRouter, connector: ZmqConnector) -> None:
    dealer = connector.connect(router.endpoint)
    await meet(router, dealer)
    dealer.send([b"news"])
    spin_until(lambda: is_readable(router._socket))
    with trio.CancelScope() as scope:
        scope.cancel()
        await router.receive()
    assert scope.cancelled_caught
    [message] = await router.receive()
    assert message.frames == [b"news"]


# -- ends ------------------------------------------------------------------------------------


async def test_a_closed_dealer_is_gone_and_others_are_not(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    leaver, stayer = (connector.connect(router.endpoint) for _ in range(2))
    gone = await meet(router, leaver)
    here = await meet(router, stayer)
    assert leaver.send([b"goodbye"])
    leaver.close()
    [message] = await router.receive()
    assert message == Incoming(gone, [b"goodbye"], None)
    await poll_until(lambda: router.send(gone, [b"x"]) is Sent.GONE)
    assert router.send(here, [b"x"]) is Sent.OK
    assert await stayer.receive() == [[b"x"]]
    assert router.send(b"never was", [b"x"]) is Sent.GONE


async def test_closing_wakes_the_reader_of_that_socket_alone(
    context: Context, router: ZmqRouter, connector: ZmqConnector
) -> None:
    other = ZmqRouter(context, LOCAL)
    dealer = connector.connect(router.endpoint)
    other_dealer = connector.connect(other.endpoint)
    await meet(router, dealer)
    await meet(other, other_dealer)
    ended: list[str] = []

    async def read(name: str, end: ZmqRouter | ZmqDealer) -> None:
        try:
            await end.receive()
        except trio.ClosedResourceError:
            ended.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, "router", router)
        nursery.start_soon(read, "other", other)
        nursery.start_soon(read, "other dealer", other_dealer)
        await trio.testing.wait_all_tasks_blocked()
        dealer.close()
        router.close()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["router"]
        # Descriptors are numbered anew: the sleepers must not wake for these.
        more = [connector.connect(other.endpoint) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["router"]
        other_dealer.close()
        await trio.testing.wait_all_tasks_blocked()
        assert ended == ["router", "other dealer"]
        nursery.cancel_scope.cancel()
    for end in (router, dealer, *more):
        end.close()
        end.close()
    assert router.send(b"x", [b"x"]) is Sent.GONE
    assert not dealer.send([b"x"])
    with pytest.raises(trio.ClosedResourceError):
        router.receive_nowait()


@pytest.mark.parametrize("steps", range(4))
async def test_closing_at_the_moment_that_the_reader_falls_asleep(
    router: ZmqRouter, connector: ZmqConnector, steps: int
) -> None:  # chaos, seed 5
    async def read(dealer: ZmqDealer) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await dealer.receive()

    # Trio runs in any order the tasks that are due in one step.
    for _ in range(15):
        dealer = connector.connect(router.endpoint)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, dealer)
            for _ in range(steps):
                await trio.lowlevel.checkpoint()
            dealer.close()


async def test_dead_hosts_are_found_without_zmtp_heartbeats(
    router: ZmqRouter, connector: ZmqConnector
) -> None:  # chaos, seed 105: they can end the process
    for end in (router, connector.connect(router.endpoint)):
        options = {name: end._socket.getsockopt(getattr(zmq, name)) for name in (
            "HEARTBEAT_IVL", "TCP_KEEPALIVE", "TCP_KEEPALIVE_IDLE", "TCP_KEEPALIVE_INTVL",
            "TCP_KEEPALIVE_CNT", "TCP_MAXRT",
        )}  # fmt: skip
        assert list(options.values()) == [0, 1, 5, 5, 2, 15_000]


async def test_the_context_ends_with_sockets_open_and_messages_unsent() -> None:
    with trio.fail_after(10):
        async with Context() as context:
            router = ZmqRouter(context, LOCAL)
            dealer = ZmqConnector(context).connect("tcp://127.0.0.1:1")
            for _ in range(100):
                dealer.send([b"into the void" * 1_000])
    with pytest.raises(trio.ClosedResourceError):
        await router.receive()


# -- full and hostile peers ------------------------------------------------------------------


async def test_a_peer_that_does_not_read_is_full_and_disturbs_nobody(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    sleeper, reader = (connector.connect(router.endpoint) for _ in range(2))
    stuck = await meet(router, sleeper)
    good = await meet(router, reader)
    page = b"x" * 2**19
    sent = 0
    idle = 0
    # Full for good once the buffers of the system are, too.
    while idle < 20:
        if router.send(stuck, [page]) is Sent.OK:
            sent += 1
            idle = 0
            assert sent < 500
        else:
            idle += 1
            await trio.sleep(0.005)
    assert router.send(good, [b"for you"]) is Sent.OK
    assert await reader.receive() == [[b"for you"]]
    assert reader.send([b"thanks"])
    [message] = await router.receive()
    assert message == Incoming(good, [b"thanks"], None)

    async def drain() -> None:
        received = 0
        while received < sent + 1:
            received += len(await sleeper.receive())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(drain)
        # The reader returns with nothing now and then, for the sender to try again.
        while router.send(stuck, [b"last"]) is not Sent.OK:
            assert await router.receive() == []


async def test_an_oversize_frame_cuts_its_sender_alone(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    bad, good = (connector.connect(router.endpoint) for _ in range(2))
    bad_peer = await meet(router, bad)
    good_peer = await meet(router, good)
    assert good.send([b"x" * MAX_FRAME_BYTES])
    assert bad.send([b"x" * (MAX_FRAME_BYTES + 1)])
    [message] = await router.receive()
    assert message.peer == good_peer
    assert len(message.frames[0]) == MAX_FRAME_BYTES
    with pytest.raises(ConnectionLost, match="the connection was closed"):
        await bad.receive()
    await poll_until(lambda: router.send(bad_peer, [b"x"]) is Sent.GONE)
    assert router.send(good_peer, [b"x"]) is Sent.OK
    assert await good.receive() == [[b"x"]]


async def test_a_server_that_sends_too_much_loses_the_dealer(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    dealer = connector.connect(router.endpoint)
    peer = await meet(router, dealer)
    assert router.send(peer, [b"x" * (MAX_FRAME_BYTES + 1)]) is Sent.OK
    with pytest.raises(ConnectionLost):
        await dealer.receive()


async def test_noise_on_the_port_disturbs_nobody(
    router: ZmqRouter, connector: ZmqConnector
) -> None:
    port = int(router.endpoint.rpartition(":")[2])
    with plain.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        await meet(router, connector.connect(router.endpoint))


# -- connecting and listening ----------------------------------------------------------------


async def test_a_refused_connection_is_lost(connector: ZmqConnector) -> None:
    with plain.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        dealer = connector.connect(f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConnectionLost) as caught:
            await dealer.receive()
    text = f"tcp://127.0.0.1:{port}: connection refused, or nobody listens there"
    assert str(caught.value) == text


async def test_something_that_is_no_server_is_lost(connector: ZmqConnector) -> None:
    with plain.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        dealer = connector.connect(f"tcp://127.0.0.1:{listener.getsockname()[1]}")
        other, _ = listener.accept()
        other.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
        other.close()
        with pytest.raises(ConnectionLost, match="is this a headrace server"):
            await dealer.receive()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "http://x:1", "", "nonsense"])
async def test_what_is_no_address_is_said_at_once(
    context: Context, connector: ZmqConnector, endpoint: str
) -> None:
    with pytest.raises(ConnectionLost, match=f"cannot connect to {endpoint}: "):
        connector.connect(endpoint)
    with pytest.raises(BindFailed, match=f"cannot listen on {endpoint}: "):
        ZmqRouter(context, endpoint)


def test_a_connection_that_never_comes_names_how_far_it_got() -> None:
    def fate(*events: int) -> str | None:
        fate = _Fate("tcp://far:1", has_curve=False, deadline=5.0)
        for event in events:
            fate.on_event(event)
        fate.on_deadline()
        return fate.lost

    assert fate() == "tcp://far:1: no connection; is the host name right?"
    assert fate(zmq.EVENT_CONNECT_DELAYED) == "tcp://far:1: no answer"
    assert (
        fate(zmq.EVENT_CONNECT_DELAYED, zmq.EVENT_CONNECTED)
        == "tcp://far:1: it answers, but not as a headrace server"
    )


async def test_an_address_in_use_is_said_in_one_line(context: Context, router: ZmqRouter) -> None:
    with pytest.raises(BindFailed) as caught:
        ZmqRouter(context, router.endpoint)
    assert str(caught.value) == f"cannot listen on {router.endpoint}: Address already in use"


async def test_a_socket_file_is_taken_over_only_from_the_dead(
    context: Context, connector: ZmqConnector, tmp_path: Path
) -> None:
    endpoint = f"ipc://{tmp_path}/s"
    router = ZmqRouter(context, endpoint)
    assert router.endpoint == endpoint
    with pytest.raises(BindFailed, match="another process listens there"):
        ZmqRouter(context, endpoint)
    await meet(router, connector.connect(endpoint))
    with plain.socket(plain.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/stale")
    ZmqRouter(context, f"ipc://{tmp_path}/stale")


async def test_ipv6(context: Context, connector: ZmqConnector) -> None:
    try:
        with plain.socket(plain.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")
    router = ZmqRouter(context, "tcp://[::1]:0")
    assert router.endpoint.startswith("tcp://[::1]:")
    await meet(router, connector.connect(router.endpoint))
