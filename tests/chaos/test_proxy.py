"""The relay between worker and server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from bin.chaos.proxy import Link

LIMIT_SECS = 20


class Ends:
    """A relay with a server behind it that keeps its connections."""

    def __init__(self, link: Link, accepted: trio.MemoryReceiveChannel[trio.SocketStream]) -> None:
        self.link = link
        self.accepted = accepted
        self.streams: list[trio.SocketStream] = []

    async def worker(self) -> trio.SocketStream:
        self.streams.append(await trio.open_tcp_stream("127.0.0.1", self.link.port))
        return self.streams[-1]

    async def connect(self) -> tuple[trio.SocketStream, trio.SocketStream]:
        worker = await self.worker()
        return worker, await self.accepted.receive()


@pytest.fixture
async def ends(nursery) -> AsyncIterator[Ends]:
    arrived, accepted = trio.open_memory_channel[trio.SocketStream](10)

    async def keep(stream: trio.SocketStream) -> None:
        await arrived.send(stream)
        await trio.sleep_forever()

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, keep, listeners)
    link = Link(listeners[0].socket.getsockname()[1])
    await nursery.start(link.serve)
    with trio.fail_after(LIMIT_SECS):
        ends = Ends(link, accepted)
        yield ends
        for stream in ends.streams:
            await stream.aclose()


async def test_it_relays_both_ways_and_passes_an_end_on(ends):
    worker, server = await ends.connect()
    await worker.send_all(b"ask")
    assert await server.receive_some() == b"ask"
    await server.send_all(b"answer")
    assert await worker.receive_some() == b"answer"
    await server.aclose()
    assert await worker.receive_some() == b""


@pytest.mark.parametrize("reset", [True, False])
async def test_a_cut_ends_what_is_open_and_nothing_later(ends, reset):
    worker, server = await ends.connect()
    await worker.send_all(b"x")
    assert await server.receive_some() == b"x"
    ends.link.cut(reset=reset)
    for end in (worker, server):
        if reset:
            with pytest.raises(trio.BrokenResourceError):
                await end.receive_some()
        else:
            assert await end.receive_some() == b""
    worker, server = await ends.connect()
    await worker.send_all(b"y")
    assert await server.receive_some() == b"y"


async def test_a_blocked_link_keeps_everything_and_tells_nothing(ends):
    worker, server = await ends.connect()
    ends.link.block()
    await worker.send_all(b"held")
    await server.send_all(b"held too")
    await server.aclose()
    late = await ends.worker()
    for end in (worker, late):
        with trio.move_on_after(0.2) as waiting:
            await end.receive_some()
        assert waiting.cancelled_caught
    ends.link.unblock()
    assert await worker.receive_some() == b"held too"
    assert await worker.receive_some() == b""
    assert await ends.accepted.receive()


async def test_nobody_behind_it_is_a_lost_connection(nursery):
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listeners[0].socket.getsockname()[1]
    await listeners[0].aclose()
    link = Link(port)
    await nursery.start(link.serve)
    with trio.fail_after(LIMIT_SECS):
        async with await trio.open_tcp_stream("127.0.0.1", link.port) as worker:
            assert await worker.receive_some() == b""
