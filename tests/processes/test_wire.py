"""The protocol as a foreign program speaks it, over real sockets."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator

import cbor2
import pytest

from tests.processes.conftest import FarmOfProcesses, build, until
from tests.processes.wire import Wire

pytestmark = pytest.mark.processes


@pytest.fixture
def connect(farm: FarmOfProcesses) -> Iterator[Callable[[], Wire]]:
    wires: list[Wire] = []

    def make() -> Wire:
        wires.append(Wire(farm.endpoint))
        return wires[-1]

    yield make
    for wire in wires:
        wire.close()


METRICS = {"type": "WorkerMetrics"}
BAD_FRAMES = {
    "not CBOR": b"\xff\xff",
    "empty": b"",
    "bytes after the map": cbor2.dumps(METRICS) + b"\0",
    "not a map": cbor2.dumps([1]),
    "no type": cbor2.dumps({"kind": "build"}),
    "unknown type": cbor2.dumps({"type": "Hello"}),
    "duplicate key": b"\xa2dtypejRequestJobdtypejRequestJob",
    "indefinite length": b"\xbf" + cbor2.dumps("type") + cbor2.dumps("Goodbye") + b"\xff",
    "a tag": cbor2.dumps({**METRICS, "x": cbor2.CBORTag(4711, 1)}),
    "a known tag": cbor2.dumps({**METRICS, "x": 2**70}),
    "undefined": cbor2.dumps({**METRICS, "x": cbor2.undefined}),
    "too deep": b"\xa2" + cbor2.dumps(METRICS)[1:] + b"ax" + b"\x81" * 40 + b"\0",
    "invalid UTF-8": b"\xa1dtypea\xff",
    "a number key": cbor2.dumps({**METRICS, 1: 2}),
    "NaN": cbor2.dumps({**METRICS, "cpu_usage_pct": math.nan}),
    "below zero": cbor2.dumps({**METRICS, "ram_free_mb": -1}),
    "mistyped": cbor2.dumps({"type": "RequestJob", "kind": 3}),
    "missing field": cbor2.dumps({"type": "RequestJob"}),
}  # fmt: skip


def test_garbage_is_answered_and_touches_nothing_else(farm, connect):
    farm.server()
    wire, other = connect(), connect()
    wire.hello("w1")
    other.hello("w2")
    for name, frame in BAD_FRAMES.items():
        wire.raw(frame, cbor2.dumps({"type": "Ping", "nonce": 9}))
        error, pong = wire.receive(), wire.receive()
        assert error is not None, name
        assert (error["type"], error["code"]) == ("Error", 400), name
        assert pong == {"type": "Pong", "nonce": 9}, name
    assert farm.json("status")["server"]["malformed_frames"] == len(BAD_FRAMES)
    assert other.receive(0.1) is None
    stranger = connect()
    stranger.raw(BAD_FRAMES["mistyped"])
    assert stranger.receive()["type"] == "Reject"


def test_limits_of_frames(farm, connect):
    farm.server()
    stranger = connect()
    stranger.raw(cbor2.dumps({"type": "InitConnection", "x": b"y" * 70_000}))
    assert stranger.receive()["code"] == 400
    wire, giant = connect(), connect()
    wire.hello("w1")
    wire.raw(*[cbor2.dumps({"type": "Ping", "nonce": n}) for n in range(300)])
    answers = [wire.receive() for _ in range(257)]
    assert [a["type"] for a in answers] == ["Pong"] * 256 + ["Error"]
    giant.hello("w2")
    giant.raw(b"x" * (9 * 2**20))
    until(lambda: farm.json("status") and not giant_is_there(farm), "the giant is cut off", 60)
    wire.send({"type": "Ping", "nonce": 5})
    assert wire.until("Pong")["nonce"] == 5


def giant_is_there(farm) -> bool:
    # Nobody sees a cut connection before something is sent to it: a second session probes it.
    probe = Wire(farm.endpoint)
    try:
        probe.hello("w2")
    except AssertionError:
        return True
    finally:
        probe.close()
    return False


def test_lists_come_in_pages_and_offers_do_not_repeat_them(farm, connect):
    farm.server()
    wire = connect()
    wire.hello("w1")
    assert wire.job_list() == [[]]
    farm.submit(*(build(f"p{n}") for n in range(2_500)))
    other = connect()
    other.hello("w2")
    pages = other.job_list()
    assert [len(page) for page in pages] == [1000, 1000, 500]
    listed = {c["job_id"] for page in pages for c in page}
    assert len(listed) == 2_500
    offered: list[str] = []
    while len(offered) < 2_500:
        offered += [c["job_id"] for c in wire.until("JobOffer")["candidates"]]
    assert len(offered) == 2_500
    assert set(offered) == listed
    farm.submit(build("one-more"))
    [candidate] = other.until("JobOffer")["candidates"]
    assert candidate["job_id"] not in listed
    assert candidate["requirement"] == {"system": "x86_64-linux", "required_features": []}


def test_pages_are_bounded_by_bytes_too(farm, connect):
    farm.server()
    sources = [f"/nix/store/{n:0>150}-source" for n in range(300)]
    farm.submit(*(build(f"big{n}", input_srcs=sources) for n in range(200)))
    wire = connect()
    wire.hello("w1")
    wire.send({"type": "RequestJobList"})
    seen: list[str] = []
    is_final = False
    while not is_final:
        for frame in wire.socket.recv_multipart():
            assert len(frame) <= 2 * 2**20
            page = cbor2.loads(frame)
            seen += [c["job_id"] for c in page["candidates"]]
            is_final = page["is_final"]
    assert len(seen) == len(set(seen)) == 200


def test_who_does_not_read_holds_nobody_up(farm, connect):
    farm.server()
    sleeper, wire = connect(), connect()
    sleeper.hello("asleep")
    farm.submit(*(build(f"s{n}", input_srcs=[f"/nix/store/{'x' * 180}-{i}" for i in range(40)])
                  for n in range(3_000)))  # fmt: skip
    for _ in range(20):
        sleeper.send({"type": "RequestJobList"})
    wire.hello("awake", slots=5)
    for page in wire.job_list():
        wire.score(page)
    for _ in range(5):
        given = wire.request()
        wire.report("JobCompleted", given)
        wire.until("Recorded")
    assert farm.json("status")["jobs"]["completed"] == 5


def test_a_running_build_is_resumed_by_name_after_kill_9_of_the_server(farm, connect):
    server = farm.server()
    wire = connect()
    wire.hello("w1")
    farm.submit(build("a"))
    wire.score(wire.job_list()[0])
    given = wire.request()
    # A command's answer proves that everything before it was taken.
    farm.json("status")
    server.kill()
    server.wait()
    farm.server()
    thief = connect()
    thief.hello("w2")
    assert thief.job_list() == [[]]
    again = connect()
    ids = {"job_id": given["job_id"], "assignment_id": given["assignment_id"]}
    assert again.hello("w1", running=[ids])["resumed"] == [given["assignment_id"]]
    again.report("JobCompleted", given)
    assert again.until("Recorded")["assignment_id"] == given["assignment_id"]
    assert farm.jobs()["a"]["status"] == "Completed"


def test_a_second_worker_of_one_id_is_told(farm, connect):
    farm.server()
    first, second = connect(), connect()
    first.hello("w1")
    second.send({"type": "InitConnection", "versions": [1, 1], "id": "w1",
                 "capabilities": {"fetch": False, "eval": False, "build": True}})  # fmt: skip
    assert first.receive(0.5) is None  # answers the probe's `Ping`
    assert second.until("Reject")["code"] == 496


def test_sigterm_says_draining_and_ends_in_order(farm, connect):
    server = farm.server()
    wire = connect()
    wire.hello("w1")
    farm.json("status")
    server.send_signal(signal.SIGTERM)
    assert wire.until("Draining")
    assert server.wait(timeout=20) == 0


def test_an_unconfirmed_claim_of_a_lost_connection_goes_to_another(farm, connect):
    farm.server("--reconnect-grace", "0.5")
    wire, other = connect(), connect()
    wire.hello("w1")
    farm.submit(build("a"))
    wire.score(wire.job_list()[0])
    wire.request()
    wire.socket.close()
    other.hello("w2")
    until(lambda: farm.jobs()["a"]["status"] == "Queued", "the claim is given up", 20)
    other.score(other.job_list()[0])
    assert other.request()["job"]["name"] == "a"
