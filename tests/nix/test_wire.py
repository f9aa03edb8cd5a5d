"""The framing of Nix's protocols: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.nix import wire
from actors.nix.wire import BadFrame, Writer

TEXTS = st.binary(max_size=40).map(lambda data: data.decode(errors="surrogateescape"))


def read(reply, data: bytes):
    """The value and what is left of the bytes."""
    source = io.BytesIO(data)
    return wire.read(reply, source.read), source.read()


def test_the_bytes_are_those_of_nix():
    assert Writer().integer(0x206).done() == b"\x06\x02\0\0\0\0\0\0"
    assert Writer().string("try").done() == b"\x03\0\0\0\0\0\0\0try\0\0\0\0\0"
    assert Writer().string("12345678").done() == b"\x08\0\0\0\0\0\0\x0012345678"
    assert Writer().string("").done() == bytes(8)
    assert Writer().strings({"a"}).done() == Writer().integer(1).string("a").done()
    assert Writer().boolean(True).done() == Writer().integer(1).done()


@given(st.integers(0, 2**64 - 1), st.lists(TEXTS), st.dictionaries(TEXTS, TEXTS), st.booleans())
def test_what_is_written_is_read_back_and_no_more(number, items, pairs, flag):
    def all_of_it():
        return (
            (yield from wire.integer()), (yield from wire.strings()),
            (yield from wire.pairs()), (yield from wire.boolean()),
        )  # fmt: skip

    request = Writer().integer(number).strings(items).pairs(pairs).boolean(flag)
    value, rest = read(all_of_it(), request.done() + b"rest")
    assert value == (number, items, pairs, flag)
    assert rest == b"rest"


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [(wire.string(), "a string of"), (wire.strings(), "a list of"), (wire.pairs(), "a map of")],
)
def test_an_absurd_length_is_refused_before_anything_is_read(reply, complaint):
    with pytest.raises(BadFrame, match=complaint):
        read(reply, Writer().integer(2**60).done())
