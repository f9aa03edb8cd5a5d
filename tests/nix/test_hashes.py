"""Every notation in which Nix writes a hash."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.nix.hashes import BadHash, from_nix32, nix32_length, to_hex, to_nix32
from tests.nix.real import needs_nix

SIZES = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64}


@given(st.sampled_from(sorted(SIZES)), st.data())
def test_all_notations_mean_the_same(algorithm, data):
    size = SIZES[algorithm]
    digest = data.draw(st.binary(min_size=size, max_size=size))
    in_64 = base64.b64encode(digest).decode()
    for bare in (digest.hex(), digest.hex().upper(), to_nix32(digest), in_64):
        assert to_hex(bare, algorithm) == (algorithm, digest.hex())
        assert to_hex(f"{algorithm}:{bare}") == (algorithm, digest.hex())
        assert to_hex(f"{algorithm}:{bare}", algorithm) == (algorithm, digest.hex())
    assert to_hex(f"{algorithm}-{in_64}") == (algorithm, digest.hex())
    assert from_nix32(to_nix32(digest), size) == digest
    assert len(to_nix32(digest)) == nix32_length(size)


@pytest.mark.parametrize(
    ("text", "algorithm"),
    [
        ("", "sha256"),
        ("abc", "sha256"),
        ("z" * 52, "sha256"),  # more bits than there are
        ("e" * 52, "sha256"),  # no digit
        ("00" * 32, ""),
        ("00" * 32, "sha3"),
        ("sha1:" + "00" * 20, "sha256"),
        ("sha256-" + base64.b64encode(bytes(31)).decode(), ""),
        ("sha256-!" + base64.b64encode(bytes(32)).decode(), ""),
    ],
)
def test_what_is_no_hash_is_refused(text, algorithm):
    with pytest.raises(BadHash):
        to_hex(text, algorithm)


@needs_nix
def test_they_are_those_of_nix(chroot):
    store = chroot("w1")
    digest = bytes(range(32))
    convert = ("nix", "hash")
    for target, expected in (("to-base32", to_nix32(digest)), ("to-base16", digest.hex())):
        told = store.run(*convert, target, "--type", "sha256", digest.hex(), bare=True)
        assert told.stdout.strip() == expected
