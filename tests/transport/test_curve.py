"""Keys in files, and who gets in."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import trio
import trio.testing

from transport import curve
from transport.adapter import Context
from transport.curve import Authenticator, KeyFileError, KeyPair
from transport.interface import ConnectionLost, Sent
from transport.zmq_sockets import ZmqConnector, ZmqDealer, ZmqRouter

SERVER = curve.ephemeral()
CLIENT = curve.ephemeral()
LOCAL = "tcp://127.0.0.1:0"


async def exchange(router: ZmqRouter, dealer: ZmqDealer) -> str | None:
    """Sends both ways; returns the user id that the router saw."""
    assert dealer.send([b"hello", b"again"])
    [message] = await router.receive()
    assert message.frames == [b"hello", b"again"]
    assert router.send(message.peer, [b"welcome"]) is Sent.OK
    assert await dealer.receive() == [[b"welcome"]]
    return message.user_id


async def test_any_key_may_connect_and_is_named(context: Context, nursery: trio.Nursery) -> None:
    nursery.start_soon(Authenticator(context, None).run)
    router = ZmqRouter(context, LOCAL, SERVER)
    own = ZmqConnector(context, SERVER.public, CLIENT).connect(router.endpoint)
    assert await exchange(router, own) == CLIENT.public
    made_up = ZmqConnector(context, SERVER.public).connect(router.endpoint)
    user = await exchange(router, made_up)
    assert user is not None
    assert curve.is_key(user)
    assert user not in (CLIENT.public, SERVER.public)


async def test_only_allowed_keys_connect_and_the_set_may_change(
    context: Context, nursery: trio.Nursery
) -> None:
    authenticator = Authenticator(context, [])
    nursery.start_soon(authenticator.run)
    router = ZmqRouter(context, LOCAL, SERVER)
    connector = ZmqConnector(context, SERVER.public, CLIENT)
    refused = connector.connect(router.endpoint)
    with pytest.raises(ConnectionLost, match="does not accept this client's key"):
        await refused.receive()
    authenticator.allow([CLIENT.public])
    assert await exchange(router, connector.connect(router.endpoint)) == CLIENT.public
    other = ZmqConnector(context, SERVER.public).connect(router.endpoint)
    with pytest.raises(ConnectionLost, match="does not accept this client's key"):
        await other.receive()


async def test_the_wrong_server_key_is_lost(context: Context, nursery: trio.Nursery) -> None:
    nursery.start_soon(Authenticator(context, None).run)
    router = ZmqRouter(context, LOCAL, SERVER)
    dealer = ZmqConnector(context, curve.ephemeral().public, CLIENT).connect(router.endpoint)
    with pytest.raises(ConnectionLost, match="is the server's public key the right one"):
        await dealer.receive()


async def test_curve_on_one_side_alone_is_lost(context: Context, nursery: trio.Nursery) -> None:
    nursery.start_soon(Authenticator(context, None).run)
    secure, bare = ZmqRouter(context, LOCAL, SERVER), ZmqRouter(context, LOCAL)
    with pytest.raises(ConnectionLost, match="the server uses CURVE"):
        await ZmqConnector(context).connect(secure.endpoint).receive()
    with pytest.raises(ConnectionLost, match="the server uses no CURVE"):
        await ZmqConnector(context, SERVER.public).connect(bare.endpoint).receive()


async def test_without_an_authenticator_nobody_gets_in(context: Context) -> None:
    router = ZmqRouter(context, LOCAL, SERVER)
    with pytest.raises(ConnectionLost, match="the handshake failed"):
        await ZmqConnector(context, SERVER.public, CLIENT).connect(router.endpoint).receive()


async def test_the_authenticator_can_be_restarted(context: Context) -> None:
    authenticator = Authenticator(context, None)
    async with trio.open_nursery() as first:
        first.start_soon(authenticator.run)
        await trio.testing.wait_all_tasks_blocked()
        first.cancel_scope.cancel()
    router = ZmqRouter(context, LOCAL, SERVER)
    dealer = ZmqConnector(context, SERVER.public, CLIENT).connect(router.endpoint)
    async with trio.open_nursery() as second:
        second.start_soon(authenticator.run)
        assert await exchange(router, dealer) == CLIENT.public
        second.cancel_scope.cancel()


# -- files -----------------------------------------------------------------------------------


def test_keys_are_created_private_and_read_back(tmp_path: Path) -> None:
    secret, public = tmp_path / "server.key", tmp_path / "server.pub"
    before = os.umask(0)
    try:
        pair = curve.generate(secret, public)
    finally:
        os.umask(before)
    for path in (secret, public):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret.read_text() == pair.secret + "\n"
    assert curve.load(secret) == pair
    assert curve.load_public(public) == pair.public


def test_a_secret_shows_in_no_repr() -> None:
    assert CLIENT.secret not in repr(CLIENT)
    assert CLIENT.public in repr(CLIENT)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o601])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    secret = tmp_path / "k"
    curve.generate(secret, tmp_path / "p")
    secret.chmod(mode)
    with pytest.raises(KeyFileError, match=f"key file {secret} is open to others"):
        curve.load(secret)


def test_keys_are_never_overwritten(tmp_path: Path) -> None:
    secret, public = tmp_path / "k", tmp_path / "p"
    pair = curve.generate(secret, public)
    with pytest.raises(KeyFileError, match="keys are not overwritten"):
        curve.generate(secret, public)
    with pytest.raises(KeyFileError, match="keys are not overwritten"):
        curve.generate(tmp_path / "other", public)
    assert not (tmp_path / "other").exists()
    assert curve.load(secret) == pair


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, "~" * 40, "#" * 40, "é" * 40])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "k"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match=f"key file {path} does not hold a key"):
        curve.load(path)
    assert not curve.is_key(text)


HASHES = "rq#rM>}U?@Lns4#E1%kR.o@n%Fcm#sL/@{H8]y##"  # `#` is a digit of Z85


def test_a_list_of_keys_has_comments(tmp_path: Path) -> None:
    path = tmp_path / "authorized_keys"
    path.write_text(f"# ours\n\n{HASHES}\n  {CLIENT.public}\tanna's # laptop\n#{SERVER.public}\n")
    assert curve.read_authorized(path) == {HASHES, CLIENT.public}


@pytest.mark.parametrize("bad", [CLIENT.public[:-1], CLIENT.public + "x", "anna"])
def test_a_line_that_is_no_key_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "authorized_keys"
    path.write_text(f"# ours\n{bad} anna\n")
    with pytest.raises(KeyFileError, match=f"{path}, line 2: .* is not a Z85 public key"):
        curve.read_authorized(path)


def test_a_list_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"cannot read .*No such file"):
        curve.read_authorized(tmp_path / "none")


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"cannot read key file .*: No such file"):
        curve.load(tmp_path / "none")
    with pytest.raises(KeyFileError, match=r"cannot create key file .*: No such file"):
        curve.generate(tmp_path / "none" / "k", tmp_path / "p")


def test_a_loaded_pair_has_its_public_key(tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.touch(0o600)
    path.write_text(f"  {CLIENT.secret}\n")
    assert curve.load(path) == KeyPair(CLIENT.public, CLIENT.secret)
