"""The framing that Nix's serve, daemon and build-hook protocols share.

| Value | Bytes |
|---|---|
| integer | 8, little endian |
| boolean | an integer, 0 or 1 |
| string | its length as an integer, its bytes, zeros up to a multiple of 8 |
| list, set | the count as an integer, the items |
| map | the count as an integer, key and value after each other |

Nix's strings are bytes; here they are `str` with `surrogateescape`, so whatever Nix sends goes
back to it unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping

MAX_STRING_BYTES = 64 * 2**20
MAX_ITEMS = 2**20
READ_BYTES = 2**16

_INTEGER = struct.Struct("<Q")
_PADDING = tuple(bytes(-length % 8) for length in range(8))


class BadWire(Exception):
    """The other side does not speak this protocol; the text is one line."""


class WireEnded(BadWire):
    """The other side closed the stream inside a value, or before one."""


# -- encoding ----------------------------------------------------------------------------


def integer(value: int) -> bytes:
    """An unsigned integer; `struct.error` outside of 64 bits."""
    return _INTEGER.pack(value)


def boolean(value: bool) -> bytes:
    return _INTEGER.pack(value)


def string(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode(errors="surrogateescape")
    return _INTEGER.pack(len(data)) + data + _PADDING[len(data) % 8]


def strings(values: Iterable[str]) -> bytes:
    """A list, or a set, which Nix expects in any order."""
    encoded = [string(value) for value in values]
    return _INTEGER.pack(len(encoded)) + b"".join(encoded)


def mapping(values: Mapping[str, str]) -> bytes:
    encoded = [string(key) + string(value) for key, value in values.items()]
    return _INTEGER.pack(len(encoded)) + b"".join(encoded)


# -- decoding ----------------------------------------------------------------------------


class Reader:
    """Decodes from a blocking source; every method raises `BadWire` for what is no such value.

    Reads no further than the value asked for, so that the rest of the stream may be raw.
    """

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read(n)` returns 1 to n bytes, or none at the end, as `io.RawIOBase.read` does."""
        self._read = read

    @classmethod
    def of(cls, data: bytes) -> Reader:
        """A reader of these bytes."""
        view = memoryview(data)
        position = 0

        def read(most: int) -> bytes:
            nonlocal position
            piece = bytes(view[position : position + most])
            position += len(piece)
            return piece

        return cls(read)

    def raw(self, length: int) -> bytes:
        """Exactly these many bytes, without padding."""
        pieces = []
        while length > 0:
            piece = self._read(length)
            if not piece:
                raise WireEnded("the stream ended inside a value")
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def integer(self) -> int:
        return _integer(self.raw(8))

    def boolean(self) -> bool:
        return self.integer() != 0

    def string(self) -> str:
        length = _checked_length(self.integer())
        return _text(self.raw(length + -length % 8), length)

    def strings(self) -> list[str]:
        return [self.string() for _ in range(_checked_count(self.integer()))]

    def mapping(self) -> dict[str, str]:
        count = _checked_count(self.integer())
        return {self.string(): self.string() for _ in range(count)}


class AsyncReader:
    """The same from an asynchronous source. It reads ahead; `raw` gives what it holds first."""

    def __init__(self, receive: Callable[[int], Awaitable[bytes | bytearray]]) -> None:
        """`receive(n)` returns 1 to n bytes, or none at the end, as `trio.abc.ReceiveStream`
        does."""
        self._receive = receive
        self._buffer = bytearray()
        self._position = 0

    async def raw(self, length: int) -> bytes:
        """Exactly these many bytes, without padding."""
        end = self._position + length
        if end > len(self._buffer):
            await self._fill(length)
            end = length
        data = bytes(self._buffer[self._position : end])
        self._position = end
        return data

    async def integer(self) -> int:
        return _integer(await self.raw(8))

    async def boolean(self) -> bool:
        return await self.integer() != 0

    async def string(self) -> str:
        length = _checked_length(await self.integer())
        return _text(await self.raw(length + -length % 8), length)

    async def strings(self) -> list[str]:
        return [await self.string() for _ in range(_checked_count(await self.integer()))]

    async def mapping(self) -> dict[str, str]:
        pairs = {}
        for _ in range(_checked_count(await self.integer())):
            key = await self.string()
            pairs[key] = await self.string()
        return pairs

    async def _fill(self, length: int) -> None:
        """Drops what was read, and waits until `length` bytes are in the buffer."""
        del self._buffer[: self._position]
        self._position = 0
        while len(self._buffer) < length:
            piece = await self._receive(READ_BYTES)
            if not piece:
                raise WireEnded("the stream ended inside a value")
            self._buffer += piece


def _integer(data: bytes) -> int:
    value: int = _INTEGER.unpack(data)[0]
    return value


def _checked_length(length: int) -> int:
    if length > MAX_STRING_BYTES:
        raise BadWire(f"a string of {length} bytes; at most {MAX_STRING_BYTES} are taken")
    return length


def _checked_count(count: int) -> int:
    if count > MAX_ITEMS:
        raise BadWire(f"a list of {count} items; at most {MAX_ITEMS} are taken")
    return count


def _text(padded: bytes, length: int) -> str:
    """The string of `length` bytes at the start of `padded`, which must end in zeros."""
    if any(padded[length:]):
        raise BadWire("the padding of a string is not zero")
    return padded[:length].decode(errors="surrogateescape")
