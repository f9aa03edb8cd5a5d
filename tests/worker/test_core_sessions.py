"""Handshake, liveness, reconnecting, reports across sessions."""

from __future__ import annotations

import pytest

from actors.worker import events as e
from actors.worker.core import Link
from actors.worker.executors.base import Built, Evaluated, Failed
from actors.worker.policy import retry_delay
from transport import messages as m
from transport.codec import encode

BUILT = Built({"out": m.Output(path="/nix/store/p1", nar_size=3)})


def names(messages):
    return [type(message).__name__ for message in messages]


def seat(attempt="t1", hold=40.0):
    return m.ClusterSeat(attempt=attempt, role="r", index=0, hold_secs=hold)


def derivation(name):
    return m.Derivation(
        drv_path=f"/nix/store/{name}.drv", name=name, system="x86_64-linux",
        required_features=[], outputs={"out": f"/nix/store/{name}"}, input_drvs=[],
        input_srcs=[],
    )  # fmt: skip


# -- handshake ---------------------------------------------------------------------------


def test_open_mode_handshake_announces_and_asks_for_the_list(driver):
    worker = driver()
    sent = worker.connect()
    assert worker.hello.id == "w1"
    assert worker.hello.versions == (1, 1)
    assert worker.hello.running is None
    assert names(sent) == ["WorkerCapabilities", "RequestJobList"]


def test_challenge_is_answered_with_explicit_tokens_and_the_wildcard(driver):  # 16
    worker = driver(tokens={"a": "for-a", "*": "for-all"})
    worker.step(e.Tick())
    [answer] = worker.receive(m.AuthChallenge(peers=["a", "b", "c"]))
    assert answer == m.AuthResponse(tokens={"a": "for-a", "b": "for-all", "c": "for-all"})


def test_challenge_without_a_wildcard_names_only_peers_with_a_token(driver):
    worker = driver(tokens={"a": "for-a"})
    worker.step(e.Tick())
    [answer] = worker.receive(m.AuthChallenge(peers=["a", "b"]))
    assert answer == m.AuthResponse(tokens={"a": "for-a"})


def test_silent_handshake_is_given_up_after_5_s(driver):
    worker = driver()
    worker.step(e.Tick())
    assert worker.core.deadline == worker.now + 5
    worker.now += 5
    worker.step(e.Tick())
    assert worker.did(e.Disconnect)
    assert worker.core.link is Link.IDLE


def test_changed_peers_file_asks_for_reauthorization_with_the_new_tokens(driver):
    worker = driver(tokens={"a": "old"})
    worker.serve()
    assert worker.step(e.PeersChanged({"a": "new"})) == [m.ReauthRequest()]
    [answer] = worker.receive(m.AuthChallenge(peers=["a"]))
    assert answer == m.AuthResponse(tokens={"a": "new"})


@pytest.mark.parametrize(
    ("code", "hint"), [(401, "peers file"), (403, "registered"), (496, "another worker")]
)
def test_refusal_says_what_to_do_and_tries_again(driver, code, hint):
    worker = driver()
    worker.step(e.Tick())
    worker.receive(m.Reject(code=code, reason="because"))
    [note] = worker.did(e.Note)
    assert note.level == "error"
    assert "because" in note.text
    assert hint in note.text
    assert names(worker.wait(2)) == ["InitConnection"]


def test_of_a_server_that_is_about_to_stop_nobody_is_told_to_do_anything(driver):
    worker = driver()
    worker.step(e.Tick())
    reason = "the server is stopping and not accepting connections"
    worker.receive(m.Reject(code=403, reason=reason))
    assert [note.text for note in worker.did(e.Note)] == [
        f"the server refused this worker: {reason} (403)"
    ]


def test_frames_of_an_old_session_are_ignored(driver):
    worker = driver()
    worker.serve()
    old = worker.connection
    worker.lose()
    worker.serve()
    assert worker.connection != old
    worker.step(e.Received(old, m.Ping(nonce=1)))
    worker.step(e.Received(old, m.Reject(code=400, reason="no session")))
    worker.step(e.Scored(old, 1, []))
    worker.step(e.Lost(old, "late"))
    assert worker.effects == []
    assert worker.core.link is Link.SERVING


def test_ping_is_answered_with_its_nonce(driver):
    worker = driver()
    worker.serve()
    assert worker.receive(m.Ping(nonce=7)) == [m.Pong(nonce=7)]


def test_malformed_frames_and_errors_leave_the_session_alone(driver):
    worker = driver()
    worker.serve()
    worker.step(e.Garbled(worker.connection, "not CBOR"))
    assert "not CBOR" in worker.did(e.Note)[0].text
    worker.receive(m.Error(code=400, message="JobUpdate: bad"))
    assert "JobUpdate: bad" in worker.did(e.Note)[0].text
    assert worker.core.link is Link.SERVING


# -- liveness ----------------------------------------------------------------------------


def test_silence_is_pinged_after_5_s_and_lost_after_10(driver):
    worker = driver(builds=0, evals=1)
    worker.serve()
    [ping] = [x for x in worker.wait(5) if isinstance(x, m.Ping)]
    assert ping == m.Ping(nonce=1)
    assert worker.core.link is Link.SERVING
    worker.wait(4.9)
    assert worker.core.link is Link.SERVING
    worker.wait(0.1)
    assert worker.core.link is Link.IDLE


def test_any_frame_ends_the_silence(driver):
    worker = driver()
    worker.serve()
    worker.wait(9)
    worker.receive(m.Pong(nonce=1))
    worker.wait(9)
    assert worker.core.link is Link.SERVING


def test_worker_that_stood_still_asks_before_it_judges(driver):  # FIELD 41
    worker = driver()
    worker.serve()
    worker.wait(6)
    worker.now += 600
    assert "Ping" in names(worker.step(e.Tick()))
    assert worker.core.link is Link.SERVING
    worker.receive(m.Reject(code=400, reason="no session"))
    assert worker.core.link is Link.IDLE
    assert names(worker.wait(10))[0] == "InitConnection"


# -- reconnecting ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outage", "late", "refusals", "expected"),
    [
        (0, 0, 0, 2), (60, 0, 0, 2), (61, 1, 0, 4), (70, 2, 0, 8), (100, 3, 0, 16),
        (200, 4, 0, 32), (300, 5, 0, 60), (9e9, 10**6, 0, 60),
        (0, 0, 1, 1), (5, 0, 2, 2), (5, 0, 3, 4), (5, 0, 6, 32), (5, 0, 7, 60), (5, 0, 10**6, 60),
    ],
)  # fmt: skip
def test_retry_delay(outage, late, refusals, expected):
    assert retry_delay(outage, late, refusals, 1.0) == expected
    assert 0 < retry_delay(outage, late, refusals, 0.0) <= expected / 2


def tries_within(worker, seconds):
    """Times of connection tries against a port where nobody listens."""
    times, end = [], worker.now + seconds
    while worker.core.deadline <= end:
        worker.now = max(worker.now, worker.core.deadline)
        worker.step(e.Tick())
        if worker.did(e.Connect):
            times.append(worker.now)
            worker.lose("connection refused")
    worker.now = end
    return times


def test_lost_server_is_tried_often_for_a_minute_then_ever_more_rarely(driver):
    worker = driver(jitter=1.0)
    worker.serve()
    lost_at = worker.now
    worker.lose()
    times = tries_within(worker, 600)
    gaps = [b - a for a, b in zip([lost_at, *times], times, strict=False)]
    assert all(gap <= 2 for gap, at in zip(gaps, times, strict=True) if at <= lost_at + 60)
    assert gaps[-1] == pytest.approx(60)
    assert gaps == sorted(gaps)


def test_refusals_after_the_handshake_double_and_a_served_session_resets(driver):  # 114
    worker = driver(jitter=1.0)
    delays = []
    for _ in range(5):
        worker.connect()
        worker.receive(m.Reject(code=403, reason="worker is deactivated"))
        delays.append(worker.core.deadline - worker.now)
    assert delays == [1, 2, 4, 8, 16]
    worker.serve()
    worker.receive(m.Reject(code=400, reason="no session"))
    assert worker.core.deadline - worker.now == 1


def test_reconnect_sends_everything_again(driver):  # 115
    worker = driver()
    first = worker.serve()
    worker.lose()
    second = worker.serve()
    expected = ["WorkerCapabilities", "RequestJobList", "RequestJobChunk", "RequestJob",
                "RequestJob"]  # fmt: skip
    assert names(first) == names(second) == expected
    assert {x.kind for x in second if isinstance(x, m.RequestJob)} == {"build", "eval"}


def test_new_capabilities_are_sent_and_kept_for_the_next_session(driver):
    worker = driver()
    worker.serve()
    changed = m.WorkerCapabilities(
        architectures=["a"], system_features=["kvm"], max_concurrent_builds=1
    )
    assert worker.step(e.CapabilitiesChanged(changed)) == [changed]
    worker.lose()
    assert worker.connect()[0] == changed


def test_metrics_go_out_while_there_is_a_session(driver):
    worker = driver()
    metrics = m.WorkerMetrics(cpu_usage_pct=5.0)
    worker.step(e.MetricsReady(metrics))
    assert metrics not in worker.sent()
    assert metrics in worker.connect()
    assert worker.step(e.MetricsReady(metrics)) == [metrics]


# -- jobs across sessions ----------------------------------------------------------------


def test_running_job_outlives_the_connection_and_is_named(driver):  # FIELD 33, 36
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.lose()
    assert not worker.did(e.StopJob)
    sent = worker.connect(resumed=["a1"])
    assert worker.hello.running == [m.ClaimRef("j1", "a1")]
    assert not worker.did(e.StopJob)
    assert names(sent) == ["WorkerCapabilities", "RequestJobList"]
    assert names(worker.finish(1, BUILT))[:2] == ["JobUpdate", "JobCompleted"]


def test_what_is_not_resumed_is_aborted_without_a_report(driver):  # FIELD 35, 41
    worker = driver(builds=2)
    worker.serve()
    worker.assign(1)
    worker.assign(2)
    worker.lose()
    worker.serve(resumed=["a2"])
    worker.receive(m.Ping(nonce=1))
    sent = worker.finish(1)
    assert names(sent) == ["RequestJob"]
    assert names(worker.finish(2, BUILT)) == ["JobUpdate", "JobCompleted", "RequestJob"]


def test_stopping_of_what_was_not_resumed_is_asked_for_at_the_ack(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.lose()
    worker.connect()
    assert worker.did(e.StopJob) == [e.StopJob("a1")]


def test_unconfirmed_report_is_sent_again_once_resumed(driver):  # FIELD 43
    worker = driver()
    worker.serve()
    worker.assign(1)
    report = worker.finish(1, BUILT)[:2]
    worker.lose()
    sent = worker.connect(resumed=["a1"])
    assert worker.hello.running == [m.ClaimRef("j1", "a1")]
    assert sent[-2:] == report
    worker.receive(m.Recorded(job_id="j1", assignment_id="a1"))
    worker.lose()
    worker.connect()
    assert worker.hello.running is None


def test_report_made_while_away_is_sent_once_resumed(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.lose()
    assert worker.finish(1, Failed("Permanent", "exit 1")) == []
    sent = worker.connect(resumed=["a1"])
    assert sent[-1] == m.JobFailed("j1", "a1", "exit 1", "Permanent")


def test_unconfirmed_report_is_dropped_if_not_resumed(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.finish(1, BUILT)
    worker.lose()
    assert names(worker.connect()) == ["WorkerCapabilities", "RequestJobList"]
    worker.lose()
    worker.connect()
    assert worker.hello.running is None


def test_evaluation_batches_are_sent_again_in_a_new_session(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, job=eval_of())
    batch = m.EvalResult([derivation("x")], warnings=[], errors=[])
    [first] = worker.step(e.JobUpdated("a1", batch))
    worker.lose()
    worker.step(e.JobUpdated("a1", m.EvalResult([derivation("y")], warnings=[], errors=[])))
    sent = worker.connect(resumed=["a1"])
    assert sent[2] == first
    assert sent[3].update.derivations[0].name == "y"
    worker.finish(1, Evaluated())
    worker.lose()
    sent = worker.connect(resumed=["a1"])
    assert names(sent[2:]) == ["JobUpdate", "JobUpdate", "JobCompleted"]


def eval_of():
    source = m.EvalSource(kind="graph-file", ref="g.json")
    return m.EvalJob(project="default", source=source, attributes=[], timeout_secs=0)


def test_log_made_while_away_is_counted_and_named(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.lose()
    worker.step(e.JobLogged("a1", b"x" * 1234))
    sent = worker.connect(resumed=["a1"])
    [chunk] = [x for x in sent if isinstance(x, m.LogChunk)]
    assert b"1234 bytes" in chunk.data


def test_large_output_is_cut_into_chunks(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    sent = worker.step(e.JobLogged("a1", b"x" * (256 * 1024 + 1)))
    assert [len(x.data) for x in sent] == [256 * 1024, 1]


@pytest.mark.parametrize(("timeout", "limit"), [(300.0, 300), (0.0, 120)])
def test_build_that_no_server_takes_is_aborted_after_the_heartbeat_timeout(driver, timeout, limit):
    worker = driver(builds=2)
    worker.serve(heartbeat_timeout=timeout)
    worker.assign(1)
    worker.assign(2)
    worker.finish(2, BUILT)
    worker.lose()
    stopped = []
    end = worker.now + limit
    while worker.core.deadline < end:
        worker.now = max(worker.now, worker.core.deadline)
        worker.step(e.Tick())
        stopped += worker.did(e.StopJob)
        if worker.did(e.Connect):
            worker.lose("refused")
    assert stopped == []
    worker.now = end
    worker.step(e.Tick())
    assert worker.did(e.StopJob) == [e.StopJob("a1")]
    worker.finish(1)
    worker.lose()
    worker.connect()
    assert worker.hello.running is None


def test_held_members_are_dropped_with_the_session(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    worker.lose()
    worker.serve()
    assert worker.hello.running is None
    worker.receive(m.StartCluster(attempt="t1", roster=[]))
    assert worker.effects == []


def test_first_frame_of_a_handshake_stays_within_its_bound(driver):
    worker = driver(builds=1000)
    worker.serve()
    for number in range(1000):
        worker.receive(m.AssignJob("j" * 196 + f"{number:04}", f"a{number}", small_build()))
    worker.lose()
    worker.connect()
    assert 100 < len(worker.hello.running) < 1000
    assert len(encode(worker.hello)) <= m.MAX_HANDSHAKE_FRAME_BYTES


def small_build():
    return m.BuildJob(
        "default", "/nix/store/p.drv", "p", {"out": "/nix/store/p"},
        m.Requirement("x86_64-linux", []), [], 0, 0,
    )  # fmt: skip


def test_error_text_that_is_no_utf_8_can_be_sent(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    report = worker.finish(1, Failed("Transient", "cannot remove '\udcff'"))[0]
    assert b"cannot remove" in encode(report)
