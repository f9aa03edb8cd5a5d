"""The gateway core: any bytes are either a message or answered, counted and without effect."""

from __future__ import annotations

import cbor2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.server.effects import Tell
from actors.server.gateway import MAX_COMMAND_PEERS, Gateway, Received
from actors.server.sessions import Session, SessionTable
from tests.server.farm_harness import BUILD, job
from transport import messages as m
from transport.codec import encode
from transport.interface import Incoming

IDS = {"job_id": "j", "assignment_id": "a"}
SEEDS = [
    encode(message)
    for message in (
        m.InitConnection(versions=(1, 1), id="w", capabilities=BUILD,
                         running=[m.ClaimRef("j", "a")]),
        m.AuthResponse(tokens={"p": "t"}), m.ReauthRequest(), m.RequestJobList(), m.Draining(),
        m.WorkerCapabilities(architectures=["x"], system_features=["kvm"],
                             max_concurrent_builds=2, cpu_core_score=1.5, zone="z"),
        m.WorkerMetrics(cpu_usage_pct=5.5, ram_free_mb=7, build_peak_ram_mb={"j": 5}),
        m.RequestJobChunk(scores=[m.Score("j", 1, 2, False)], is_final=True),
        m.RequestJob(kind="build"), m.Goodbye(), m.Ping(nonce=1), m.Pong(nonce=2),
        m.AssignJobResponse(**IDS, accepted=True, reason="r"),
        m.JobUpdate(**IDS, update=m.Building()),
        m.JobUpdate(**IDS, update=m.BuildOutput(outputs={"out": m.Output("/o", 5)},
                                                substituted=False)),
        m.JobCompleted(**IDS, spans=[m.Span("build", 0, 5)]),
        m.JobFailed(**IDS, error="e", kind="Transient", metrics=m.BuildMetrics(oom=True)),
        m.BuildProgress(**IDS, phase="build", bytes_done=5), m.LogChunk(**IDS, data=b"x"),
        m.EvalProgress(**IDS, derivations=4), m.ClusterSignal(attempt="t", payload=b"x"),
        m.QueryKnownDerivations(**IDS, query_id=1, drv_paths=["/d"]),
        m.CmdHello(versions=(1, 1)), m.CmdSubmit(request=1, is_final=True, jobs=[job("a")]),
        m.CmdCancel(request=1, targets=["a"]), m.CmdStatus(request=1),
    )
]  # fmt: skip


def session(worker: str = "w", peer: bytes = b"p") -> Session:
    return Session(
        id=f"s-{worker}", peer=peer, worker=worker, name=worker, agent="", asked=BUILD,
        capabilities=BUILD, projects=None, last_seen=0.0,
    )  # fmt: skip


@pytest.fixture
def sessions() -> SessionTable:
    table = SessionTable()
    table.add(session())
    return table


@pytest.fixture
def gateway(sessions: SessionTable) -> Gateway:
    return Gateway(sessions)


def take(gateway: Gateway, *frames: bytes, peer: bytes = b"p", now: float = 1.0):
    return list(gateway.take(Incoming(peer, list(frames), None), now))


def complaints(items) -> list[m.Error | m.Reject]:
    return [i.message for i in items if isinstance(i, Tell)]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_damaged_frame_is_a_message_or_a_complaint(data):
    table = SessionTable()
    table.add(session())
    gateway = Gateway(table)
    frame = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        match data.draw(st.sampled_from(("flip", "cut", "insert", "double"))):
            case "flip" if at < len(frame):
                frame[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del frame[at : at + data.draw(st.integers(1, 8))]
            case "insert":
                frame[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case _:
                frame[at:at] = frame[max(0, at - 20) : at]
    for peer, refusal in ((b"p", m.Error), (b"stranger", m.Reject)):
        before = gateway.malformed
        [item] = take(gateway, bytes(frame), peer=peer)
        if isinstance(item, Received):
            assert item.peer == peer
            assert gateway.malformed == before
        elif gateway.malformed > before:
            assert isinstance(item.message, refusal)
            assert item.message.code == 400
        else:
            assert isinstance(item.message, m.CmdWelcome | m.Reject)  # CmdHello, or before it


@pytest.mark.parametrize(
    "frame",
    [
        b"\x81" * 200_000, b"\xa1\x61x" * 50_000, b"\xc1" * 200_000, b"\x9f" * 200_000,
        b"\xa2dtypedPingexxxxx", b"\xdb" + b"\xff" * 8, b"\xbb" + b"\xff" * 8,
        b"\x5b" + b"\x7f" * 8,
    ],
    ids=["arrays", "maps", "tags", "indefinite", "cut", "huge tag", "huge map", "huge bytes"],
)  # fmt: skip
def test_nesting_and_lengths_that_lie_are_one_bad_frame(gateway, frame):
    [error] = complaints(take(gateway, frame, encode(m.Ping(nonce=1)))[:1])
    assert error.code == 400
    assert gateway.malformed == 1


def test_ids_that_come_twice_are_refused_whatever_their_order(gateway):
    head, ids = b"\xa4", [b"\x6dassignment_id" + cbor2.dumps(i) for i in ("old", "new")]
    rest = b"\x64type\x6cJobCompleted\x66job_id\x61j"
    for pair in (ids, ids[::-1]):
        [error] = complaints(take(gateway, head + rest + b"".join(pair)))
        assert error.code == 400


def test_nothing_that_is_shared_in_one_frame_is_seen_in_another(gateway):
    shared = cbor2.dumps({"type": "Draining", "x": cbor2.CBORTag(28, ["secret"])})
    reference = cbor2.dumps({"type": "Draining", "x": cbor2.CBORTag(29, 0)})
    first, second = complaints(take(gateway, shared, reference))
    assert (first.code, second.code) == (400, 400)
    assert "secret" not in second.message


@pytest.mark.parametrize(
    ("frame", "names"),
    [
        ({"type": "WorkerMetrics", "cpu_usage_pct": float("nan")}, "cpu_usage_pct"),
        ({"type": "WorkerMetrics", "ram_free_mb": -1}, "ram_free_mb"),
        ({"type": "WorkerMetrics", "disk_speed_mbps": float("inf")}, "disk_speed_mbps"),
        ({"type": "WorkerCapabilities", "architectures": [], "system_features": [],
          "max_concurrent_builds": 1, "cpu_core_score": float("nan")}, "cpu_core_score"),
        ({"type": "RequestJobChunk", "scores": [{"job_id": "j", "missing_count": 0,
          "missing_nar_size": -1, "outputs_present": False}]}, "missing_nar_size"),
        ({"type": "JobFailed", **IDS, "error": "e", "kind": "Odd"}, "kind"),
        ({"type": "JobCompleted", **IDS, "job_id": ""}, "job_id"),
        ({"type": "JobCompleted", **IDS, "job_id": "x" * 201}, "job_id"),
        ({"type": "JobCompleted", **IDS, "job_id": "a\nb"}, "job_id"),
    ],
)  # fmt: skip
def test_a_complaint_names_the_message_and_the_field(gateway, frame, names):
    [error] = complaints(take(gateway, cbor2.dumps(frame)))
    assert isinstance(error, m.Error)
    assert names in error.message
    assert frame["type"] in error.message
    assert "\n" not in error.message


def test_an_id_of_200_characters_is_taken(gateway):
    [received] = take(gateway, encode(m.JobCompleted(job_id="x" * 200, assignment_id="a")))
    assert isinstance(received, Received)


def test_garbage_counts_as_a_sign_of_life_too(gateway, sessions):
    take(gateway, b"\xff", now=7.0)
    assert sessions.by_worker["w"].last_seen == 7.0


def test_each_frame_meets_the_session_that_the_one_before_it_left(gateway, sessions):
    seen = []
    incoming = Incoming(b"q", [encode(m.Ping(nonce=n)) for n in range(3)], None)
    for item in gateway.take(incoming, 1.0):
        seen.append(item.session)
        if len(seen) == 1:
            sessions.add(session("v", b"q"))
        elif len(seen) == 2:
            sessions.remove(sessions.by_worker["v"])
    assert [s and s.worker for s in seen] == [None, "v", None]


def test_frames_beyond_256_are_dropped_with_one_error(gateway):
    items = take(gateway, *[encode(m.Ping(nonce=1))] * 257)
    assert [type(i) for i in items] == [Received] * 256 + [Tell]
    assert items[-1].message.code == 400


def test_before_the_greeting_a_frame_of_64_kib_is_the_largest(gateway):
    def hello(size: int) -> bytes:
        def frame(padding: int) -> bytes:
            return cbor2.dumps({"type": "CmdHello", "versions": [1, 1], "x": bytes(padding)})

        made = frame(2 * size - 100 - len(frame(size - 100)))
        assert len(made) == size
        return made

    assert isinstance(complaints(take(gateway, hello(65_537), peer=b"q"))[0], m.Reject)
    assert isinstance(complaints(take(gateway, hello(65_536), peer=b"q"))[0], m.CmdWelcome)
    assert isinstance(complaints(take(gateway, hello(70_000), peer=b"q"))[0], m.CmdWelcome)


def test_commands_need_a_greeting_in_a_shared_version(gateway):
    status, hello = encode(m.CmdStatus(request=1)), m.CmdHello(versions=(2, 3))
    assert complaints(take(gateway, status, peer=b"q"))[0].code == 400
    [reject] = complaints(take(gateway, encode(hello), peer=b"q"))
    assert reject.reason == "no shared protocol version: ours 1..=1, peer 2..=3"
    assert complaints(take(gateway, status, peer=b"q"))[0].code == 400


def test_command_connections_are_bounded_and_the_longest_silent_is_forgotten(gateway, sessions):
    sessions.commands.update({str(n).encode(): 10.0 + n for n in range(MAX_COMMAND_PEERS)})
    sessions.commands[b"5"] = 1.0
    take(gateway, encode(m.CmdHello(versions=(1, 1))), peer=b"one more", now=99_999.0)
    assert len(sessions.commands) == MAX_COMMAND_PEERS
    assert b"5" not in sessions.commands
