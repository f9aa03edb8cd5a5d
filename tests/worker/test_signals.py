"""Signals between a cluster member's process and its worker."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from actors.worker.signals import (
    CLUSTER,
    MAX_CONNECTIONS,
    MAX_KEPT,
    MAX_LINE_BYTES,
    SOCKET,
    BadSignal,
    Member,
    Signal,
    offered,
    read_line,
    write_line,
)
from transport import messages as m

LEAD, HELPER = m.MemberRef("lead", 0), m.MemberRef("helper", 0)
ROSTER = [
    m.RosterEntry("lead", 0, "w1", primary=True, endpoint="h1"),
    m.RosterEntry("helper", 0, "w2", primary=False),
]


def test_lines_are_read() -> None:
    assert read_line(b'{"payload": "hi"}') == Signal(None, b"hi")
    line = b'{"to": {"role": "lead", "index": 0}, "payload_base64": "/w=="}'
    assert read_line(line) == Signal(LEAD, b"\xff")
    assert read_line(b'{"payload": ""}') == Signal(None, b"")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"nonsense", "not a signal"),
        (b"[]", "not a signal"),
        (b'{"payload": "\xff"}', "not a signal"),
        (b"{}", "either payload or payload_base64"),
        (b'{"payload": "a", "payload_base64": "YQ=="}', "either payload or payload_base64"),
        (b'{"payload_base64": "!"}', "not base64"),
        (b'{"payload": "a", "too": 1}', "not a signal"),
        (b'{"payload": "a", "to": {"role": "x", "index": -1}}', "not a signal"),
        (b'{"payload": "' + b"x" * (m.MAX_SIGNAL_BYTES + 1) + b'"}', "exceeds"),
    ],
)
def test_what_is_no_signal_is_said(line: bytes, why: str) -> None:
    with pytest.raises(BadSignal, match=why):
        read_line(line)


@given(st.binary(max_size=200))
def test_any_bytes_go_through(payload: bytes) -> None:
    line = write_line(Signal(LEAD, payload))
    assert line.count(b"\n") == 1
    told = json.loads(line)
    assert told["from"] == {"role": "lead", "index": 0}
    back = read_line(msgspec.json.encode({k: v for k, v in told.items() if k != "from"}))
    assert back == Signal(None, payload)


class Cluster:
    """A member, and what it sent."""

    def __init__(self) -> None:
        self.sent: list[Signal] = []
        self.member = Member(m.ClusterSeat("t1", "helper", 0, 30.0), ROSTER, self._send)

    async def _send(self, signal: Signal) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(signal)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


async def connect(env: dict[str, str]) -> trio.SocketStream:
    return await trio.open_unix_socket(env[SOCKET])


class Lines:
    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream, self._buffer = stream, b""

    async def next(self) -> dict:
        while b"\n" not in self._buffer:
            data = await self._stream.receive_some()
            assert data, "the connection ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


def mode(path: str) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


async def until(check) -> None:
    with trio.fail_after(10):
        while not check():
            await trio.sleep(0.01)


async def test_the_process_knows_who_it_is(cluster: Cluster) -> None:
    async with offered(cluster.member) as env:
        told = json.loads(env[CLUSTER])
        assert (told["attempt"], told["role"], told["index"]) == ("t1", "helper", 0)
        assert told["primary"] is False
        assert [entry["worker_id"] for entry in told["roster"]] == ["w1", "w2"]
        assert told["roster"][0]["endpoint"] == "h1"
        assert mode(env[SOCKET]) == 0o600
        assert len(env[SOCKET]) < 100
    assert not Path(env[SOCKET]).parent.exists()


async def test_who_is_no_member_gets_nothing() -> None:
    async with offered(None) as env:
        assert env == {}


async def test_signals_go_both_ways_in_order(cluster: Cluster) -> None:
    async with offered(cluster.member) as env:
        for number in range(3):  # before it has connected
            cluster.member.deliver(Signal(LEAD, str(number).encode()))
        async with await connect(env) as stream:
            lines = Lines(stream)
            for number in range(3):
                assert await lines.next() == {
                    "from": {"role": "lead", "index": 0}, "payload": str(number)
                }  # fmt: skip
            cluster.member.deliver(Signal(LEAD, b"\xff"))
            assert (await lines.next())["payload_base64"] == base64.b64encode(b"\xff").decode()
            await stream.send_all(b'{"payload": "a"}\n{"to": {"role": "lead", "ind')
            await stream.send_all(b'ex": 0}, "payload": "b"}\n\n')
            await until(lambda: len(cluster.sent) == 2)
    assert cluster.sent == [Signal(None, b"a"), Signal(LEAD, b"b")]


async def test_a_bad_line_is_answered_and_the_connection_goes_on(cluster: Cluster) -> None:
    async with offered(cluster.member) as env, await connect(env) as stream:
        lines = Lines(stream)
        await stream.send_all(b'nonsense\n{"to": {"role": "x", "index": 0}, "payload": "a"}\n')
        assert "not a signal" in (await lines.next())["error"]
        assert (await lines.next())["error"] == "there is no member x 0"
        await stream.send_all(b'{"payload": "fine"}\n')
        await until(lambda: cluster.sent)
        await stream.send_all(b"x" * (MAX_LINE_BYTES + 1))
        assert "exceeds" in (await lines.next())["error"]
        with trio.fail_after(10):
            assert await stream.receive_some() == b""
        async with await connect(env) as again:
            await again.send_all(b'{"payload": "again"}\n')
            await until(lambda: len(cluster.sent) == 2)


async def test_what_nobody_reads_is_dropped_and_counted(cluster: Cluster) -> None:
    for number in range(MAX_KEPT + 5):
        cluster.member.deliver(Signal(LEAD, str(number).encode()))
    assert cluster.member.dropped == 5
    async with offered(cluster.member) as env, await connect(env) as stream:
        lines = Lines(stream)
        got = [(await lines.next())["payload"] for _ in range(MAX_KEPT)]
    assert got == [str(number) for number in range(MAX_KEPT)]


async def test_connections_are_bounded_and_each_hears_what_comes(cluster: Cluster) -> None:
    async with offered(cluster.member) as env, trio.open_nursery() as nursery:
        streams = [await connect(env) for _ in range(MAX_CONNECTIONS)]
        for stream in streams:  # each is served
            await stream.send_all(b'{"payload": "here"}\n')
        await until(lambda: len(cluster.sent) == MAX_CONNECTIONS)
        async with await connect(env) as refused:
            assert "connections" in (await Lines(refused).next())["error"]
        cluster.member.deliver(Signal(LEAD, b"to all"))
        for stream in streams:
            assert (await Lines(stream).next())["payload"] == "to all"
            await stream.aclose()
        nursery.cancel_scope.cancel()
