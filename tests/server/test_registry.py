"""The registry core alone: connections that compete for a worker id, and changes of the rights."""

from __future__ import annotations

import hashlib
import itertools
import math

import pytest

from actors.server.authorization import Registration
from actors.server.effects import Changed, Closed, Opened, Revoked, Tell
from actors.server.registry import CHALLENGE_SECS, MAX_CHALLENGES, PROBE_SECS, Registry
from actors.server.sessions import SessionTable
from tests.server.farm_harness import BOTH, BUILD
from transport import messages as m


def digest(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def init(worker: str, can: m.Capabilities = BUILD) -> m.InitConnection:
    return m.InitConnection(versions=(1, 1), id=worker, capabilities=can)


@pytest.fixture
def make():
    def registry(registrations=None, **options) -> Registry:
        numbers = itertools.count()
        return Registry(
            SessionTable(), registrations, lambda: f"c{next(numbers)}", options.pop("cordons", {}),
            **options,
        )  # fmt: skip

    return registry


def told(effects, peer: bytes) -> list[m.Message]:
    return [e.message for e in effects if isinstance(e, Tell) and e.peer == peer]


def opened(effects) -> list[str]:
    return [e.session.peer.decode() for e in effects if isinstance(e, Opened)]


def rejected(effects, peer: bytes) -> int:
    [answer] = told(effects, peer)
    assert isinstance(answer, m.Reject)
    return answer.code


# -- who gets the id ---------------------------------------------------------------------------


@pytest.fixture
def probing(make) -> Registry:
    """`old` has the session of w, `new` waits for the outcome of a probe."""
    registry = make()
    registry.init(b"old", init("w"), None, 0.0)
    [ping] = told(registry.init(b"new", init("w"), None, 0.0), b"old")
    assert ping == m.Ping(nonce=1)
    assert registry.deadline == PROBE_SECS
    return registry


@pytest.mark.parametrize("worker", ["w", "another"])
def test_a_second_opening_ends_a_handshake_that_waits_for_a_probe(probing, worker):
    assert rejected(probing.init(b"new", init(worker), None, 1.0), b"new") == 400
    assert probing.expire(PROBE_SECS) == []
    assert [s.peer for s in probing.sessions] == [b"old"]
    assert probing.deadline == math.inf
    probing.sessions.check()


def test_a_second_opening_ends_a_handshake_that_waits_for_tokens(make):
    registry = make({"w": Registration(projects={"a": digest("t")})})
    registry.init(b"p", init("w"), None, 0.0)
    assert rejected(registry.init(b"p", init("w"), None, 0.0), b"p") == 400
    assert rejected(registry.auth_response(b"p", m.AuthResponse(tokens={"a": "t"}), 0.0), b"p")


def test_a_third_connection_is_refused_at_once_and_the_probe_goes_on(probing):
    assert rejected(probing.init(b"third", init("w"), None, 1.0), b"third") == 496
    assert opened(probing.expire(PROBE_SECS)) == ["new"]


def test_only_the_answer_to_this_probe_counts(probing):
    session = probing.sessions.by_worker["w"]
    assert probing.pong(session, m.Pong(nonce=0)) == []
    assert probing.pong(session, m.Pong(nonce=2)) == []
    assert rejected(probing.pong(session, m.Pong(nonce=1)), b"new") == 496
    assert probing.pong(session, m.Pong(nonce=1)) == []


def test_a_newcomer_that_is_gone_leaves_the_older_session_alone(probing):
    probing.abandon_handshake(b"new")
    assert not probing.in_handshake(b"new")
    assert probing.expire(100.0) == []
    assert probing.sessions.by_worker["w"].peer == b"old"


def test_the_newcomer_goes_on_at_once_when_the_older_leaves(probing):
    session = probing.sessions.by_worker["w"]
    effects = probing.close(session, "goodbye", 1.0)
    assert [type(e) for e in effects] == [Closed, Opened]
    assert probing.sessions.by_worker["w"].peer == b"new"
    assert probing.deadline == math.inf


def test_a_silent_older_session_is_told_that_it_is_over(probing):
    assert probing.expire(PROBE_SECS - 0.01) == []
    effects = probing.expire(PROBE_SECS)
    assert rejected(effects, b"old") == 400
    assert [type(e) for e in effects] == [Tell, Closed, Opened]


def test_who_reconnects_takes_no_place_beyond_the_limit(make):
    registry = make(max_workers=1)
    assert opened(registry.init(b"old", init("w"), None, 0.0)) == ["old"]
    assert rejected(registry.init(b"other", init("v"), None, 0.0), b"other") == 403
    registry.init(b"new", init("w"), None, 0.0)
    assert opened(registry.expire(PROBE_SECS)) == ["new"]


def test_a_server_that_stops_accepts_nobody(make):
    registry = make()
    registry.accepting = False
    assert rejected(registry.init(b"p", init("w"), None, 0.0), b"p") == 403


def test_open_handshakes_are_bounded_and_the_oldest_goes_first(make):
    registry = make({"w": Registration(projects={"a": digest("t")})})
    for n in range(MAX_CHALLENGES + 1):
        registry.init(str(n).encode(), init("w"), None, float(n))
    assert not registry.in_handshake(b"0")
    assert registry.in_handshake(b"1")
    assert registry.deadline == 1.0 + CHALLENGE_SECS


# -- a registry that changes -------------------------------------------------------------------

TWO = Registration(projects={"a": digest("ta"), "b": digest("tb")})


@pytest.fixture
def registered(make) -> Registry:
    """`p` has the session of w for projects a and b."""
    registry = make({"w": TWO})
    registry.init(b"p", init("w", BOTH), "its-key", 0.0)
    registry.auth_response(b"p", m.AuthResponse(tokens={"a": "ta", "b": "tb"}), 0.0)
    assert registry.sessions.by_worker["w"].projects == {"a", "b"}
    return registry


def test_a_change_that_takes_nothing_is_not_told(registered):
    assert registered.set_registrations({"w": TWO, "v": TWO}, 1.0) == []


def test_a_token_that_was_changed_revokes_its_project_until_it_is_given(registered):
    changed = Registration(projects={"a": digest("other"), "b": digest("tb")})
    effects = registered.set_registrations({"w": changed}, 1.0)
    assert [type(e) for e in effects] == [Tell, Changed, Revoked]
    assert told(effects, b"p")[0].authorized_peers == ["b"]
    assert [f.peer for f in told(effects, b"p")[0].failed_peers] == ["a"]
    [challenge] = told(registered.reauth(registered.sessions.by_peer[b"p"]), b"p")
    assert challenge.peers == ["a", "b"]
    answer = m.AuthResponse(tokens={"a": "other", "b": "no longer known"})
    [update] = told(registered.auth_response(b"p", answer, 1.0), b"p")
    assert (update.authorized_peers, update.failed_peers) == (["a", "b"], [])  # it only adds


def test_wrong_tokens_change_nothing_in_a_reauthentication(registered):
    registered.set_registrations({"w": Registration(projects={"b": digest("tb")})}, 1.0)
    [update] = told(registered.auth_response(b"p", m.AuthResponse(tokens={"a": "ta"}), 1.0), b"p")
    assert update.authorized_peers == ["b"]


def test_capabilities_that_a_registration_takes_away_are_gone_at_once(registered):
    builds = Registration(projects=TWO.projects, capabilities=("build",))
    effects = registered.set_registrations({"w": builds}, 1.0)
    assert not registered.sessions.by_worker["w"].capabilities.eval
    assert any(isinstance(e, Changed) for e in effects)
    registered.set_registrations({"w": TWO}, 2.0)
    assert registered.sessions.by_worker["w"].capabilities.eval


@pytest.mark.parametrize(
    "now",
    [{}, {"w": Registration(active=False, projects=TWO.projects)},
     {"w": Registration(projects={})},
     {"w": Registration(projects=TWO.projects, key="another-key")}],
    ids=["unknown", "deactivated", "no project", "another key"],
)  # fmt: skip
def test_who_may_not_be_here_any_more_is_sent_away(registered, now):
    effects = registered.set_registrations(now, 1.0)
    assert rejected(effects, b"p") == 403
    assert [e.cause for e in effects if isinstance(e, Closed)] == ["revoked"]
    assert not registered.sessions.by_worker


def test_the_key_that_is_registered_may_stay(registered):
    same = Registration(projects=TWO.projects, key="its-key")
    assert registered.set_registrations({"w": same}, 1.0) == []


def test_a_newcomer_of_a_revoked_worker_is_not_let_in_instead(registered):
    registered.init(b"new", init("w"), None, 1.0)
    registered.auth_response(b"new", m.AuthResponse(tokens={"a": "ta"}), 1.0)
    assert registered.in_handshake(b"new")
    effects = registered.set_registrations({}, 1.5)
    assert rejected(effects, b"p") == rejected(effects, b"new") == 403
    assert opened(effects) == []
    assert not registered.sessions.by_worker
    assert registered.deadline == math.inf


def test_a_key_other_than_the_registered_one_does_not_open_a_session(make):
    registry = make({"w": Registration(projects={"a": digest("t")}, key="right")})
    for key in (None, "wrong"):
        assert rejected(registry.init(b"p", init("w"), key, 0.0), b"p") == 403
    assert isinstance(told(registry.init(b"p", init("w"), "right", 0.0), b"p")[0], m.AuthChallenge)


# -- draining ----------------------------------------------------------------------------------


def test_an_operators_drain_waits_for_a_worker_that_is_not_there_yet(make):
    registry = make(cordons={"w": "old disk"})
    assert registry.cordon("v", "new disk") == []
    for worker, reason in (("w", "old disk"), ("v", "new disk")):
        registry.init(worker.encode(), init(worker), None, 0.0)
        session = registry.sessions.by_worker[worker]
        assert session.cordon == reason
        assert session.view().draining
        [changed] = registry.cordon(worker, None)
        assert not changed.session.view().draining


def test_a_workers_own_draining_ends_with_its_session_and_not_with_an_undrain(make):
    registry = make()
    registry.init(b"p", init("w"), None, 0.0)
    session = registry.sessions.by_worker["w"]
    assert [type(e) for e in registry.draining(session)] == [Changed]
    assert registry.draining(session) == []
    registry.cordon("w", None)
    assert session.view().draining
    registry.close(session, "lost", 1.0)
    registry.init(b"q", init("w"), None, 2.0)
    assert not registry.sessions.by_worker["w"].view().draining
