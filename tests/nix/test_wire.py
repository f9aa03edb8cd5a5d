"""The framing of Nix's protocols: what is written is read back, and nothing else is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.nix import wire
from actors.nix.wire import AsyncReader, BadWire, Reader, WireEnded

TEXTS = st.binary(max_size=40).map(lambda data: data.decode(errors="surrogateescape"))


def test_the_bytes_are_those_of_nix():
    assert wire.integer(0x206) == b"\x06\x02\0\0\0\0\0\0"
    assert wire.string("try") == b"\x03\0\0\0\0\0\0\0try\0\0\0\0\0"
    assert wire.string("12345678") == b"\x08\0\0\0\0\0\0\x0012345678"
    assert wire.string("") == bytes(8)
    assert wire.strings(["a"]) == wire.integer(1) + wire.string("a")
    assert wire.boolean(True) == wire.integer(1)


@given(st.integers(0, 2**64 - 1), st.lists(TEXTS), st.dictionaries(TEXTS, TEXTS), st.booleans())
def test_what_is_written_is_read_back(number, items, pairs, flag):
    data = wire.integer(number) + wire.strings(items) + wire.mapping(pairs) + wire.boolean(flag)
    reader = Reader.of(data + b"rest")
    assert (reader.integer(), reader.strings()) == (number, items)
    assert (reader.mapping(), reader.boolean()) == (pairs, flag)
    assert reader.raw(4) == b"rest"


@pytest.mark.parametrize("piece", [1, 7, 1000])
async def test_the_asynchronous_reader_takes_any_pieces(piece):
    items = ["", "a", "/nix/store/" + "x" * 60, "12345678", "\udcff"]
    data = wire.strings(items) + wire.mapping({"k": "v"}) + b"raw" + wire.integer(5)

    async def receive(most: int) -> bytes:
        nonlocal data
        head, data = data[: min(piece, most)], data[min(piece, most) :]
        return head

    reader = AsyncReader(receive)
    assert await reader.strings() == items
    assert await reader.mapping() == {"k": "v"}
    assert await reader.raw(3) == b"raw"
    assert await reader.integer() == 5
    with pytest.raises(WireEnded):
        await reader.integer()


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (wire.integer(2**40), "a string of 1099511627776 bytes"),
        (b"\x01\0\0\0\0\0\0\0a\0\0\0\0\0\0x", "padding"),
        (b"\x09\0\0\0\0\0\0\0abc", "ended"),
        (b"\x09\0", "ended"),
    ],
)
def test_what_is_no_string_is_refused(data, complaint):
    with pytest.raises(BadWire, match=complaint):
        Reader.of(data).string()


def test_a_list_of_absurd_length_is_refused():
    with pytest.raises(BadWire, match="a list of"):
        Reader.of(wire.integer(2**60)).strings()
