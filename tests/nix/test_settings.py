"""The addresses and settings that Nix programs are given."""

from __future__ import annotations

import pytest

from actors.nix.settings import BadKey, Nix, plain, public_key, with_parameters
from tests.nix.real import needs_nix


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("file:///srv/cache", "file:///srv/cache?trusted=1"),
        ("file:///srv/cache?compression=none", "file:///srv/cache?trusted=1&compression=none"),
        ("http://cache:80?trusted=", "http://cache:80?trusted="),
    ],
)
def test_what_an_address_says_itself_stays(uri, expected):
    assert with_parameters(uri, {"trusted": "1"}) == expected
    assert with_parameters(uri, {}).partition("?")[0] == uri.partition("?")[0]


def test_a_cache_without_a_key_is_trusted_and_the_operators_settings_stay():
    env = Nix(cache="file:///c").environment({"NIX_CONFIG": "cores = 3", "A": "b"})
    lines = env["NIX_CONFIG"].splitlines()
    assert lines[0] == "cores = 3"
    assert "extra-substituters = file:///c?trusted=1" in lines
    assert env["A"] == "b"
    assert "extra-substituters" not in Nix().environment({})["NIX_CONFIG"]


@needs_nix
def test_a_key_signs_and_is_what_is_trusted(chroot, tmp_path):
    secret, public = tmp_path / "secret", tmp_path / "public"
    chroot("w1").run(
        "nix-store", "--generate-binary-cache-key", "farm-1", str(secret), str(public)
    )  # fmt: skip
    assert public_key(secret) == public.read_text().strip()
    nix = Nix(cache="file:///c", key_file=secret)
    lines = nix.environment({})["NIX_CONFIG"].splitlines()
    assert "extra-substituters = file:///c" in lines
    assert f"extra-trusted-public-keys = {public.read_text().strip()}" in lines
    assert f"file:///c?secret-key={secret}" in nix.copy_to_cache(["/nix/store/x"])
    secret.write_text("no key")
    with pytest.raises(BadKey, match="is not a secret key"):
        public_key(secret)
    with pytest.raises(BadKey, match="cannot read the key"):
        public_key(tmp_path / "absent")


def test_messages_lose_their_colours_and_lines():
    assert plain("\x1b[31;1merror:\x1b[0m no\n   such path\n") == "error: no such path"
