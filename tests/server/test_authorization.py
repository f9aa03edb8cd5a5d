"""The registry file and its tokens."""

from __future__ import annotations

import hashlib

import pytest

from actors.server.authorization import BadRegistry, Registration, read_registry
from tests.server.farm_harness import BOTH, BUILD
from transport import messages as m

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def digest(token: str) -> str:
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


def test_a_file_names_workers_with_their_rights():
    text = f"""
        [workers.builder-1]
        capabilities = ["build"]
        key = "{KEY}"
        [workers.builder-1.projects]
        default = "{digest("t")}"
        [workers.gone]
        active = false
    """
    assert read_registry(text, "f") == {
        "builder-1": Registration(
            capabilities=("build",), key=KEY, projects={"default": digest("t")}
        ),
        "gone": Registration(active=False),
    }
    assert read_registry("", "f") == {}


@pytest.mark.parametrize(
    "text",
    [
        "[workers.'']\nactive = true",
        "[workers.w.projects]\na = 'sha256:ABC'",
        f"[workers.w.projects]\na = '{digest('t').upper()}'",
        f"[workers.w.projects]\na = '{digest('t')}0'",
        "[workers.w]\nkey = 3",
        "[workers.w]\nkey = 'no Z85 key'",
        "workers = []",
        "[extra]",
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(text):
    with pytest.raises(BadRegistry, match=r"^f: "):
        read_registry(text, "f")


@pytest.mark.parametrize(
    ("listed", "asked", "allowed"),
    [
        (("fetch", "eval", "build"), BOTH, BOTH),
        (("build",), BOTH, BUILD),
        (("eval",), BUILD, m.Capabilities(fetch=False, eval=False, build=False)),
        ((), BOTH, m.Capabilities(fetch=False, eval=False, build=False)),
    ],
)
def test_rights_are_what_is_both_asked_for_and_listed(listed, asked, allowed):
    assert Registration(capabilities=listed).allows(asked) == allowed


@pytest.mark.parametrize("token", ["", "T", "t ", "t\0", "\ud800", digest("t")])
def test_only_the_very_token_is_right(token):
    registration = Registration(projects={"a": digest("t")})
    good, [failed] = registration.verify({"a": token})
    assert good == frozenset()
    assert (failed.peer, failed.reason) == ("a", "wrong token")
    assert registration.verify({"a": "t", "other": "t"}) == (frozenset({"a"}), [])


def test_no_reason_repeats_a_token_or_its_hash():
    registration = Registration(projects={"a": digest("secret"), "b": digest("other")})
    _, failed = registration.verify({"a": "guess-1", "c": "guess-2"})
    text = repr(failed)
    assert [f.peer for f in failed] == ["a", "b"]
    assert not any(word in text for word in ("guess", "sha256", digest("secret")))
