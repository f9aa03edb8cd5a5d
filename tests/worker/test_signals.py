"""Signals between a cluster member's process and its worker."""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from actors.worker import signals
from actors.worker.signal_lines import (
    MAX_LINE_BYTES,
    BadSignal,
    LineSplitter,
    Signal,
    read_line,
    write_line,
)
from actors.worker.signals import (
    CLUSTER,
    MAX_CONNECTIONS,
    MAX_WAITING,
    MAX_WAITING_BYTES,
    SOCKET,
    CannotListen,
    Mailbox,
    Member,
    offered,
    remove_leftovers,
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
        ('{"payload_base64": "é"}'.encode(), "not base64"),
        (b'{"payload": "\\ud800"}', "not a signal"),
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


TEXTS = st.text(st.characters(exclude_categories=[]), max_size=10)
LINES = st.dictionaries(
    st.sampled_from(["to", "payload", "payload_base64", "x"]),
    TEXTS | st.none() | st.fixed_dictionaries({"role": TEXTS, "index": st.integers()}),
).map(lambda line: json.dumps(line, ensure_ascii=False).encode(errors="surrogatepass"))


@given(st.binary(max_size=40) | LINES)
def test_any_line_is_a_signal_or_a_bad_one(line: bytes) -> None:
    try:
        signal = read_line(line)
    except BadSignal:
        return
    assert len(signal.payload) <= 40


@pytest.mark.parametrize("character", ["\0", '"', "é", "x"])
def test_the_largest_payload_fits_a_line_however_it_is_written(character: str) -> None:
    payload = character * (m.MAX_SIGNAL_BYTES // len(character.encode()))
    line = json.dumps({"to": {"role": "lead", "index": 0}, "payload": payload}).encode()
    [ended] = LineSplitter().feed(line + b"\n")
    assert ended is not None
    assert read_line(ended).payload == payload.encode()


@given(st.lists(st.binary(max_size=8)), st.data())
def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], data: st.DataObject) -> None:
    lines = [line.replace(b"\n", b"") for line in lines]
    whole = b"".join(line + b"\n" for line in lines)
    splitter, got = LineSplitter(), []
    while whole:
        size = data.draw(st.integers(1, len(whole)))
        got += splitter.feed(whole[:size])
        whole = whole[size:]
    assert got == lines


def test_of_a_line_that_is_too_long_only_the_end_is_told() -> None:
    splitter = LineSplitter()
    for _ in range(20):
        assert splitter.feed(b"x" * MAX_LINE_BYTES) == []
        assert len(splitter._begun) <= MAX_LINE_BYTES
    assert splitter.feed(b"x\nfine\n" + b"y" * MAX_LINE_BYTES + b"\n") == [
        None, b"fine", b"y" * MAX_LINE_BYTES
    ]  # fmt: skip
    assert splitter.feed(b"y" * (MAX_LINE_BYTES + 1) + b"\n") == [None]


async def emptied(mailbox: Mailbox, count: int) -> list[bytes]:
    lines: list[bytes] = []

    async def write(line: bytes) -> None:
        await trio.lowlevel.checkpoint()
        lines.append(line)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.empty, write)
        await until(lambda: len(lines) == count)
        nursery.cancel_scope.cancel()
    return lines


async def test_what_is_dropped_is_told_at_its_place() -> None:
    mailbox = Mailbox()
    assert all(mailbox.put(b"%d" % number) for number in range(MAX_WAITING))
    assert not mailbox.put(b"lost")
    assert not mailbox.put(b"lost")
    lines = await emptied(mailbox, MAX_WAITING + 1)
    assert lines[:-1] == [b"%d" % number for number in range(MAX_WAITING)]
    assert json.loads(lines[-1])["error"].startswith("2 signals were dropped")
    assert mailbox.put(b"after")
    assert await emptied(mailbox, 1) == [b"after"]


async def test_a_mailbox_is_bounded_by_bytes_too() -> None:
    mailbox, line = Mailbox(), b"x" * (MAX_WAITING_BYTES // 4)
    assert [mailbox.put(line) for _ in range(6)] == [True] * 4 + [False] * 2
    assert len(await emptied(mailbox, 5)) == 5
    assert mailbox.put(line)


async def test_a_line_whose_writing_was_cut_off_is_written_again() -> None:
    mailbox, begun = Mailbox(), []

    async def hang(line: bytes) -> None:
        begun.append(line)
        await trio.sleep_forever()

    mailbox.put(b"a")
    mailbox.put(b"b")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mailbox.empty, hang)
        await until(lambda: begun)
        nursery.cancel_scope.cancel()
    assert begun == [b"a"]
    assert await emptied(mailbox, 2) == [b"a", b"b"]


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


def exists(env: dict[str, str]) -> bool:
    return Path(env[SOCKET]).parent.exists()


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


async def until(check) -> None:
    with trio.fail_after(10):
        while not check():
            await trio.sleep(0.01)


@pytest.fixture
def owner(tmp_path: Path) -> Path:
    return tmp_path


async def test_the_process_knows_who_it_is(cluster: Cluster, owner: Path) -> None:
    async with offered(cluster.member, owner) as env:
        told = json.loads(env[CLUSTER])
        assert (told["attempt"], told["role"], told["index"]) == ("t1", "helper", 0)
        assert told["primary"] is False
        assert [entry["worker_id"] for entry in told["roster"]] == ["w1", "w2"]
        assert told["roster"][0]["endpoint"] == "h1"
        assert "endpoint" not in told["roster"][1]
        assert mode(env[SOCKET]) == 0o600
        assert mode(Path(env[SOCKET]).parent) == 0o700
    assert not exists(env)


async def test_who_is_no_member_gets_nothing(owner: Path) -> None:
    async with offered(None, owner) as env:
        assert env == {}


async def test_the_address_is_short_wherever_temporary_files_are(
    cluster: Cluster, owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(owner / ("x" * 100)))
    async with offered(cluster.member, owner) as env:
        assert len(os.fsencode(env[SOCKET])) <= 103
        await (await connect(env)).aclose()


async def test_a_socket_that_cannot_be_made_is_said_in_one_line(
    cluster: Cluster, owner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "_place", lambda: owner / "absent")
    with pytest.raises(CannotListen, match="no socket for the cluster's signals"):
        async with offered(cluster.member, owner):
            raise AssertionError


async def test_what_a_killed_worker_left_is_removed(cluster: Cluster, owner: Path) -> None:
    other = owner / "other"
    async with offered(cluster.member, owner) as env, offered(cluster.member, other) as others:
        remove_leftovers(owner)
        assert not exists(env)
        assert exists(others)


async def test_signals_go_both_ways_in_order(cluster: Cluster, owner: Path) -> None:
    async with offered(cluster.member, owner) as env:
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


async def test_a_bad_line_is_answered_and_the_connection_goes_on(
    cluster: Cluster, owner: Path
) -> None:
    async with offered(cluster.member, owner) as env, await connect(env) as stream:
        lines = Lines(stream)
        await stream.send_all(b'nonsense\n{"to": {"role": "x", "index": 0}, "payload": "a"}\n')
        assert "not a signal" in (await lines.next())["error"]
        assert (await lines.next())["error"] == "there is no other member x 0"
        await stream.send_all(b'{"to": {"role": "helper", "index": 0}, "payload": "me"}\n')
        assert (await lines.next())["error"] == "there is no other member helper 0"
        await stream.send_all(b"x" * (MAX_LINE_BYTES + 1) + b"\n")
        assert "exceeds" in (await lines.next())["error"]
        await stream.send_all(b'{"payload": "fine"}\n')
        await until(lambda: cluster.sent)
    assert cluster.sent == [Signal(None, b"fine")]


async def test_a_bad_line_while_the_process_reads_nothing_breaks_nothing(
    cluster: Cluster, owner: Path
) -> None:
    count, payload = 60, b"x" * m.MAX_SIGNAL_BYTES  # more than the system takes for it
    async with offered(cluster.member, owner) as env, await connect(env) as stream:
        await stream.send_all(b'{"payload": "here"}\n')
        await until(lambda: cluster.sent)
        for _ in range(count):
            cluster.member.deliver(Signal(LEAD, payload))
        await trio.testing.wait_all_tasks_blocked()
        await stream.send_all(b"bad\n")
        lines = Lines(stream)
        got = [await lines.next() for _ in range(count + 1)]
        assert sum("error" in line for line in got) == 1


async def test_what_the_process_says_last_is_still_sent(cluster: Cluster, owner: Path) -> None:
    async with offered(cluster.member, owner) as env:
        cluster.member.deliver(Signal(LEAD, b"nobody will read this"))
        for number in range(3):
            with socket.socket(socket.AF_UNIX) as process:
                process.connect(env[SOCKET])
                # Not even the newline is needed at the end of a connection.
                process.sendall(b'{"payload": "%d"}\n{"payload": "bye"}' % number)
    said = [signal.payload for signal in cluster.sent]
    assert sorted(said) == [b"0", b"1", b"2", b"bye", b"bye", b"bye"]


async def test_a_connection_that_outlives_the_process_holds_nobody_up(
    cluster: Cluster, owner: Path, autojump_clock
) -> None:
    with socket.socket(socket.AF_UNIX) as escaped:
        async with offered(cluster.member, owner) as env:
            escaped.connect(env[SOCKET])
        assert escaped.recv(1) == b""


async def test_a_member_that_was_done_stays_done_when_it_is_stopped(
    cluster: Cluster, owner: Path, autojump_clock
) -> None:
    with socket.socket(socket.AF_UNIX) as escaped, trio.CancelScope() as scope:
        async with offered(cluster.member, owner) as env:
            escaped.connect(env[SOCKET])
            scope.deadline = trio.current_time() + 1
    assert not scope.cancelled_caught


async def test_a_stopped_member_does_not_wait(cluster: Cluster, owner: Path) -> None:
    with trio.CancelScope() as scope:
        async with offered(cluster.member, owner) as env, await connect(env):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert not exists(env)


async def test_what_nobody_reads_is_dropped_and_counted(cluster: Cluster, owner: Path) -> None:
    for number in range(MAX_WAITING + 5):
        cluster.member.deliver(Signal(LEAD, str(number).encode()))
    assert cluster.member.dropped == 5
    async with offered(cluster.member, owner) as env, await connect(env) as stream:
        lines = Lines(stream)
        got = [(await lines.next())["payload"] for _ in range(MAX_WAITING)]
        assert (await lines.next())["error"].startswith("5 signals were dropped")
    assert got == [str(number) for number in range(MAX_WAITING)]


async def test_what_one_connection_was_not_sent_waits_for_the_next(
    cluster: Cluster, owner: Path
) -> None:
    count, pad = 100, b"x" * 60_000  # more than the system takes for a connection
    async with offered(cluster.member, owner) as env:
        async with await connect(env) as stream:
            for number in range(count):
                cluster.member.deliver(Signal(LEAD, b"%03d" % number + pad))
            assert (await Lines(stream).next())["payload"].startswith("000")
        await until(lambda: not cluster.member._open)
        cluster.member.deliver(Signal(LEAD, b"%03d" % count))
        async with await connect(env) as stream:
            lines = Lines(stream)
            got = [int((await lines.next())["payload"][:3])]
            while got[-1] < count:
                got.append(int((await lines.next())["payload"][:3]))
    assert got == list(range(got[0], count + 1))
    assert got[0] < count


async def test_connections_are_bounded_and_each_hears_what_comes(
    cluster: Cluster, owner: Path
) -> None:
    async with offered(cluster.member, owner) as env:
        streams = [await connect(env) for _ in range(MAX_CONNECTIONS)]
        for stream in streams:  # each is served
            await stream.send_all(b'{"payload": "here"}\n')
        await until(lambda: len(cluster.sent) == MAX_CONNECTIONS)
        async with await connect(env) as refused:
            lines = Lines(refused)
            assert "connections" in (await lines.next())["error"]
        cluster.member.deliver(Signal(LEAD, b"to all"))
        for stream in streams:
            assert (await Lines(stream).next())["payload"] == "to all"
            await stream.aclose()
        await until(lambda: not cluster.member._open)
        async with await connect(env) as again:
            cluster.member.deliver(Signal(LEAD, b"to the next"))
            assert (await Lines(again).next())["payload"] == "to the next"
