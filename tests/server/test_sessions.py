"""Handshake, authorization and the end of sessions; numbers are those of the behaviours list."""

from __future__ import annotations

import hashlib

import pytest

from actors.server.authorization import BadRegistry, Registration, read_registry
from actors.server.effects import RegistryFileChanged
from tests.server.farm_harness import BOTH, BUILD, job
from transport import messages as m


def init(name: str, versions=(1, 1), can=BUILD) -> m.InitConnection:
    return m.InitConnection(versions=versions, id=name, capabilities=can)


def digest(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


REGISTERED = {
    "w1": Registration(projects={"a": digest("ta"), "b": digest("tb")}),
    "off": Registration(active=False, projects={"a": digest("ta")}),
    "noeval": Registration(capabilities=("fetch", "build"), projects={"a": digest("ta")}),
}


def reject(answers: list[m.Message]) -> tuple[int, str]:
    [answer] = answers
    assert isinstance(answer, m.Reject), answer
    return answer.code, answer.reason


def test_open_mode_acknowledges_at_once_for_every_project(farm):
    [ack] = farm.send("p", init("w1"))
    assert (ack.authorized_peers, ack.resumed, ack.heartbeat_timeout) == (["*"], [], 120.0)


@pytest.mark.parametrize(
    "message", [m.RequestJob(kind="build"), m.Pong(nonce=1), m.Draining(), m.Goodbye(),
                m.AuthResponse(tokens={})],
)  # fmt: skip
def test_anything_but_an_opening_is_refused_without_a_session(farm, message):  # 1
    assert reject(farm.send("p", message))[0] == 400


def test_the_second_message_of_a_handshake_must_be_the_answer(make_farm):  # 2
    farm = make_farm(REGISTERED)
    [challenge] = farm.send("p", init("w1"))
    assert challenge == m.AuthChallenge(peers=["a", "b"])
    assert reject(farm.send("p", m.RequestJobList()))[0] == 400
    assert reject(farm.send("p", m.AuthResponse(tokens={"a": "ta"})))[0] == 400


def test_unknown_and_deactivated_workers_are_told_apart(make_farm):  # 3, 4
    farm = make_farm(REGISTERED)
    assert reject(farm.send("p", init("stranger"))) == (403, "unknown worker")
    assert reject(farm.send("q", init("off"))) == (403, "worker is deactivated")


def test_one_good_token_is_enough_and_the_other_is_named(make_farm):  # 5
    farm = make_farm(REGISTERED)
    farm.send("p", init("w1"))
    [ack] = farm.send("p", m.AuthResponse(tokens={"a": "ta", "b": "wrong"}))
    assert ack.authorized_peers == ["a"]
    assert [(f.peer, f.reason) for f in ack.failed_peers] == [("b", "wrong token")]


@pytest.mark.parametrize("tokens", [{}, {"a": "x"}, {"c": "ta"}])
def test_no_valid_token_is_refused(make_farm, tokens):  # 6
    farm = make_farm(REGISTERED)
    farm.send("p", init("w1"))
    assert reject(farm.send("p", m.AuthResponse(tokens=tokens)))[0] == 401


def test_capabilities_are_cut_to_the_registration(make_farm):  # 7
    farm = make_farm(REGISTERED)
    farm.send("p", init("noeval", can=BOTH))
    [ack] = farm.send("p", m.AuthResponse(tokens={"a": "ta"}))
    assert ack.capabilities == m.Capabilities(fetch=False, eval=False, build=True)
    source = m.EvalSource(kind="graph-file", ref="g")
    farm.submit(evaluations=[m.SubmittedEvaluation(source=source, project="a")])
    assert farm.request("p", "eval") is None


def test_a_challenge_does_not_stay_open_for_ever(make_farm):  # 8
    farm = make_farm(REGISTERED)
    farm.send("p", init("w1"))
    farm.wait(11)
    assert reject(farm.send("p", m.AuthResponse(tokens={"a": "ta"})))[0] == 400


def test_a_large_frame_before_the_session_is_not_decoded(farm):  # 9
    assert reject(farm.send_raw("p", b"\xa1" + b"x" * 70_000))[0] == 400


def test_no_shared_version_names_both_ranges(farm):  # 10
    code, reason = reject(farm.send("p", init("w", versions=(2, 3))))
    assert (code, reason) == (400, "no shared protocol version: ours 1..=1, peer 2..=3")


def test_a_revoked_project_takes_only_its_own_job(make_farm):  # 13
    farm = make_farm(REGISTERED)
    farm.send("w1", init("w1"))
    farm.send("w1", m.AuthResponse(tokens={"a": "ta", "b": "tb"}))
    farm.send("w1", m.WorkerCapabilities(
        architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=2))  # fmt: skip
    farm.submit(job("ja", project="a"), job("jb", project="b"))
    given = {g.job.name: g for g in (farm.request("w1"), farm.request("w1"))}
    farm.take(RegistryFileChanged({"w1": Registration(projects={"b": digest("tb")})}))
    aborts = [a for a in farm.answers[b"w1"] if isinstance(a, m.AbortJob)]
    assert [a.assignment_id for a in aborts] == [given["ja"].assignment_id]
    assert (farm.status("ja"), farm.status("jb")) == ("Queued", "Building")
    farm.complete("w1", given["jb"])
    assert farm.status("jb") == "Completed"


def test_a_session_that_loses_its_last_project_is_over(make_farm):  # 11
    farm = make_farm(REGISTERED)
    farm.send("p", init("w1"))
    farm.send("p", m.AuthResponse(tokens={"a": "ta"}))
    farm.take(RegistryFileChanged({"w1": Registration(projects={"c": digest("tc")})}))
    assert farm.answers[b"p"][-1].code == 403
    assert not farm.sessions.by_worker


def test_a_new_project_is_seen_after_reauthentication(make_farm):  # 12
    farm = make_farm({"w1": Registration(projects={"a": digest("ta")})})
    farm.send("w1", init("w1"))
    farm.send("w1", m.AuthResponse(tokens={"a": "ta"}))
    farm.send("w1", m.WorkerCapabilities(
        architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=2))  # fmt: skip
    farm.submit(job("ja", project="a"), job("jb", project="b"))
    running = farm.request("w1")
    farm.take(RegistryFileChanged(REGISTERED))
    assert farm.request("w1") is None
    [challenge] = farm.send("w1", m.ReauthRequest())
    assert challenge.peers == ["a", "b"]
    [update] = farm.send("w1", m.AuthResponse(tokens={"b": "tb"}))
    assert update.authorized_peers == ["a", "b"]
    assert farm.request("w1").job.name == "jb"
    assert running.job.name == "ja"
    assert farm.status("ja") == "Building"


def test_an_opening_within_a_session_is_an_error_and_no_more(farm):  # 14
    farm.worker("w1")
    [error] = farm.send("w1", init("w1"))
    assert (error.code, "InitConnection" in error.message) == (400, True)
    assert farm.send("w1", m.Ping(nonce=7)) == [m.Pong(nonce=7)]


def test_a_second_connection_is_refused_while_the_first_answers(farm):
    farm.worker("w1", peer="first")
    assert farm.send("second", init("w1")) == []
    ping = farm.answers[b"first"][-1]
    farm.send("first", m.Pong(nonce=ping.nonce))
    assert reject(farm.answers[b"second"])[0] == 496
    assert farm.sessions.by_worker["w1"].peer == b"first"


def test_a_second_connection_takes_over_when_the_first_is_silent(farm):
    farm.worker("w1", peer="first")
    farm.send("second", init("w1"))
    farm.wait(2.5)
    assert isinstance(farm.answers[b"second"][-1], m.InitAck)
    assert farm.sessions.by_worker["w1"].peer == b"second"
    assert reject(farm.send("first", m.RequestJobList()))[0] == 400


def test_the_limit_of_workers_holds_and_a_place_is_free_at_once(make_farm):
    farm = make_farm(max_workers=1)
    farm.worker("w1")
    assert reject(farm.send("w2", init("w2")))[0] == 403
    farm.send("w1", m.Goodbye())
    assert isinstance(farm.send("w2", init("w2"))[0], m.InitAck)


def test_malformed_frames_are_answered_counted_and_skipped(farm):
    farm.worker("w1")
    answers = farm.send_raw("w1", b"\xff", b"\xa1dtypedPing", b"\xa2dtypedPingenonce\x07")
    assert [type(a) for a in answers] == [m.Error, m.Error, m.Pong]
    assert "nonce" in answers[1].message
    assert farm.farm.gateway.malformed == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("workers = 3", "workers"),
        ("[workers.w]\nactive = 'yes'", "active"),
        ("[workers.w]\nspeed = 3", "speed"),
        ("[workers.w]\ncapabilities = ['cook']", "cook"),
        ("[workers.w.projects]\na = 'plain'", "sha256:"),
        ("[workers.w", "f.toml"),
    ],
)
def test_a_bad_registry_file_says_what_is_wrong_in_one_line(text, says):
    with pytest.raises(BadRegistry) as caught:
        read_registry(text, "f.toml")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_drain_that_was_never_written_is_none_for_a_restarted_dispatch(farm):
    farm.worker("w1")
    [session] = farm.sessions
    session.cordon = "its commit failed"
    farm.start_dispatch()
    assert session.cordon is None
    assert not session.view().draining
