"""The lines that a cluster member's process and its worker exchange: one JSON object each. Pure.

    {"to": {"role": "client", "index": 0}, "payload": "text"}      sent; without `to` to all others
    {"from": {"role": "server", "index": 0}, "payload": "text"}    received
    {"error": "..."}                                               what was not sent, or was lost

Bytes that are no UTF-8 travel as `payload_base64`.
"""

from __future__ import annotations

import base64

import msgspec
from msgspec import Struct

from transport import messages as m

# JSON makes six bytes of one at worst: every payload that may be sent fits, however it is written.
MAX_LINE_BYTES = 8 * m.MAX_SIGNAL_BYTES


class BadSignal(ValueError):
    """A line that cannot be sent; the text says why."""


class Signal(Struct, frozen=True):
    """From or to a member; `peer` is none for all others."""

    peer: m.MemberRef | None
    payload: bytes


class _Line(Struct, frozen=True, forbid_unknown_fields=True):
    to: m.MemberRef | None = None
    payload: str | None = None
    payload_base64: str | None = None


def read_line(line: bytes) -> Signal:
    """A line of the process. Raises `BadSignal`."""
    try:
        told = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSignal(f"not a signal: {error}") from None
    if (told.payload is None) == (told.payload_base64 is None):
        raise BadSignal("give either payload or payload_base64")
    try:
        payload = (
            base64.b64decode(told.payload_base64, validate=True)
            if told.payload_base64 is not None
            else (told.payload or "").encode()
        )
    except ValueError:
        raise BadSignal("payload_base64 is not base64") from None
    if len(payload) > m.MAX_SIGNAL_BYTES:
        raise BadSignal(f"the payload of {len(payload)} bytes exceeds {m.MAX_SIGNAL_BYTES}")
    return Signal(told.to, payload)


def write_line(signal: Signal) -> bytes:
    """A line for the process."""
    try:
        payload = {"payload": signal.payload.decode()}
    except UnicodeDecodeError:
        payload = {"payload_base64": base64.b64encode(signal.payload).decode()}
    return msgspec.json.encode({"from": signal.peer, **payload}) + b"\n"


def error_line(text: str) -> bytes:
    return msgspec.json.encode({"error": text}) + b"\n"


class LineSplitter:
    """Cuts what arrives into lines. Of a line that is too long nothing is kept."""

    def __init__(self) -> None:
        self._begun = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> list[bytes | None]:
        """The lines that end in `data`; none for one beyond `MAX_LINE_BYTES`."""
        *ends, rest = data.split(b"\n")
        lines: list[bytes | None] = []
        for end in ends:
            self._add(end)
            lines.append(None if self._is_too_long else bytes(self._begun))
            self._begun.clear()
            self._is_too_long = False
        self._add(rest)
        return lines

    def _add(self, part: bytes) -> None:
        if len(self._begun) + len(part) > MAX_LINE_BYTES:
            self._is_too_long = True
        if self._is_too_long:
            self._begun.clear()
        else:
            self._begun += part
