"""The framing that Nix's protocols share: integers, strings and sets of strings.

An integer is 8 bytes, little endian; a string is its length, its bytes and zeros up to a multiple
of 8; a list its length and its items. Text is UTF-8 with surrogate escapes, for Nix has bytes.

A *reply* is read by a generator that yields how many bytes it wants next and returns the value, so
that the same parser serves a blocking pipe and Trio's streams.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TypeVar

MAX_STRING_BYTES = 64 * 2**20
MAX_ITEMS = 10_000_000

T = TypeVar("T")
Reply = Generator[int, bytes, T]


class BadFrame(Exception):
    """The other side does not speak the protocol; the text is one line."""


class Writer:
    """Builds one message."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def integer(self, value: int) -> Writer:
        self._parts.append(value.to_bytes(8, "little"))
        return self

    def boolean(self, value: bool) -> Writer:
        return self.integer(int(value))

    def string(self, text: str) -> Writer:
        data = text.encode("utf-8", "surrogateescape")
        self._parts += (len(data).to_bytes(8, "little"), data, bytes(-len(data) % 8))
        return self

    def strings(self, texts: Iterable[str]) -> Writer:
        items = list(texts)
        self.integer(len(items))
        for text in items:
            self.string(text)
        return self

    def pairs(self, pairs: Mapping[str, str]) -> Writer:
        self.integer(len(pairs))
        for key, value in pairs.items():
            self.string(key).string(value)
        return self

    def done(self) -> bytes:
        return b"".join(self._parts)


def integer() -> Reply[int]:
    return int.from_bytes((yield 8), "little")


def boolean() -> Reply[bool]:
    return (yield from integer()) != 0


def string() -> Reply[str]:
    size = yield from integer()
    if size > MAX_STRING_BYTES:
        raise BadFrame(f"a string of {size} bytes")
    data = (yield size) if size else b""
    if size % 8:
        yield 8 - size % 8
    return data.decode("utf-8", "surrogateescape")


def strings() -> Reply[list[str]]:
    count = yield from integer()
    if count > MAX_ITEMS:
        raise BadFrame(f"a list of {count} items")
    found = []
    for _ in range(count):
        found.append((yield from string()))  # noqa: PERF401 - no comprehension can yield
    return found


def pairs() -> Reply[dict[str, str]]:
    count = yield from integer()
    if count > MAX_ITEMS:
        raise BadFrame(f"a map of {count} items")
    found = {}
    for _ in range(count):
        key = yield from string()
        found[key] = yield from string()
    return found


def read(reply: Reply[T], read_exactly: Callable[[int], bytes]) -> T:
    """Reads a reply from a blocking source; `read_exactly` raises at its end."""
    try:
        wanted = next(reply)
        while True:
            wanted = reply.send(read_exactly(wanted))
    except StopIteration as done:
        value: T = done.value
        return value
