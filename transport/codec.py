"""Frames to messages and back: strict CBOR (RFC 8949) as docs/protocol.md restricts it.

Theory of operation. A frame from the wire passes three checks, each in compiled code:

1. cbor2 parses it and refuses tags (all of them, see `_NoTags`), indefinite lengths, duplicate
   keys, invalid UTF-8 and nesting; the stream's position shows bytes after the map.
2. A MessagePack encoder that insists on text keys runs over the result and is thrown away: it
   refuses what that format lacks too, which is `undefined`, other simple values and integers
   outside -2**63..2**64-1, in ignored fields as well. (65 ns a small message; a walk in Python
   would take longer than all the rest.)
3. msgspec converts to the Struct that `type` names, and with it checks types and ranges.

The rare cases that these do not decide exactly have slower paths beside them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from typing import Any, NoReturn

import cbor2
import msgspec

from transport.messages import MAX_DEPTH, MAX_FRAME_BYTES, Message

_TEXT_BYTES = 64 * 2**10
_SHORT_BYTES, _MAX_SHORT = 48, 256
"""A `RequestJob` is the same short frame every time: looking it up takes 0.07 us, decoding 1.5."""
_MAX_DETAIL = 160  # characters of an error that may quote the peer


class Malformed(Exception):
    """A frame that is no message; the text is one short, printable line for the peer.

    `message_type` is the name of the message where the frame gave a known one.
    """

    def __init__(self, text: str, message_type: str | None = None) -> None:
        super().__init__(text if message_type is None else f"{message_type}: {text}")
        self.message_type = message_type


def encode(message: Message) -> bytes:
    """Encodes a message as one frame; fields that are None are left out."""
    return cbor2.dumps(msgspec.to_builtins(message, builtin_types=(bytes,)))


def encode_value(value: Any) -> bytes:
    """Encodes a Struct or plain value, to be kept or spliced into a frame."""
    return cbor2.dumps(msgspec.to_builtins(value, builtin_types=(bytes,)))


def decode_value(data: bytes) -> Any:
    """Decodes what `encode_value` made, into plain values. Not for data of others."""
    return cbor2.loads(data)


# -- decoding --------------------------------------------------------------------------------


class Decoder:
    """Decodes the messages of one direction."""

    def __init__(self, message_types: Iterable[type[Message]]) -> None:
        self._types = {kind.__name__: kind for kind in message_types}
        self._short: dict[bytes, Message] = {}
        """Short frames of late and what they mean; messages are immutable."""

    def decode(self, frame: bytes) -> Message:
        """Raises `Malformed`, and nothing else, for whatever the bytes are."""
        if len(frame) > _SHORT_BYTES:
            return self._decode(frame)
        message = self._short.get(frame)
        if message is None:
            message = self._decode(frame)
            if len(self._short) >= _MAX_SHORT:
                self._short.clear()
            self._short[frame] = message
        return message

    def _decode(self, frame: bytes) -> Message:
        if len(frame) > MAX_FRAME_BYTES:
            raise Malformed(f"frame of {len(frame)} bytes, the limit is {MAX_FRAME_BYTES}")
        value = _load(frame)
        if type(value) is not dict:
            raise Malformed("the frame is not a map")
        name = value.get("type")
        kind = self._types.get(name) if isinstance(name, str) else None
        if kind is None:
            raise Malformed(_unknown_type(value))
        try:
            _refuse_foreign(value)
        except (TypeError, OverflowError) as error:
            raise Malformed(_foreign(error), kind.__name__) from None
        try:
            message = msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            message = _convert_without_nulls(value, kind, error)
        if len(frame) > _TEXT_BYTES and (b"\x7a\x00" in frame or b"\x7b\x00" in frame):
            _check_text_bytes(value, kind)
        return message


class _NoTags(dict[int, Callable[[Any, bool], Any]]):
    """Decoders for semantic tags that refuse every tag, those that cbor2 builds in too."""

    def __missing__(self, tag: int) -> Callable[[Any, bool], Any]:
        return _refuse_tag


def _refuse_tag(*_: object) -> NoReturn:
    raise ValueError  # cbor2 words the error and names the tag


_NO_TAGS = _NoTags()
_refuse_foreign = msgspec.msgpack.Encoder(order="deterministic").encode


def _load(frame: bytes) -> Any:
    # cbor2 lets an empty container pass one level below its limit. With a limit one lower
    # nothing too deep passes; the slow path takes in the rest of the last level.
    try:
        return _parse(frame, MAX_DEPTH - 1)
    except Malformed:
        value = _parse(frame, MAX_DEPTH)
    if _depth(value) > MAX_DEPTH:
        raise Malformed(f"not CBOR of this protocol: more than {MAX_DEPTH} levels deep")
    return value


def _parse(frame: bytes, max_depth: int) -> Any:
    stream = BytesIO(frame)
    try:
        value = cbor2.load(
            stream,
            semantic_decoders=_NO_TAGS,
            max_depth=max_depth,
            allow_indefinite=False,
            allow_duplicate_keys=False,
            strict_hashable_types=True,
        )
    # Decoders are known to raise anything under fuzzing, MemoryError and OverflowError too.
    except Exception as error:  # noqa: BLE001
        raise Malformed(f"not CBOR of this protocol: {_printable(str(error))}") from None
    if stream.tell() != len(frame):
        raise Malformed("not CBOR of this protocol: bytes after the map")
    return value


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


def _convert_without_nulls(
    value: dict[str, Any], kind: type[Message], first: msgspec.ValidationError
) -> Message:
    """An optional field that is null is a missing one; some Structs only know the latter."""
    try:
        return msgspec.convert(_without_nulls(value), kind)
    except msgspec.ValidationError:
        raise Malformed(_field_error(first), kind.__name__) from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _check_text_bytes(value: dict[str, Any], kind: type[Message]) -> None:
    """The limits of texts count bytes, msgspec counts characters: give it as many."""
    try:
        msgspec.convert(_without_nulls(_widened(value)), kind)
    except msgspec.ValidationError as error:
        raise Malformed(_field_error(error), kind.__name__) from None


def _widened(value: Any) -> Any:
    if isinstance(value, str):
        # Shorter ones are within the limit of any text, and ids have their own rules.
        if len(value) > _TEXT_BYTES // 4 and not value.isascii():
            return value.encode().decode("latin-1")
        return value
    if isinstance(value, dict):
        return {_widened(key): _widened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_widened(item) for item in value]
    return value


# -- what is said of a bad frame -------------------------------------------------------------


def _unknown_type(value: dict[Any, Any]) -> str:
    if "type" not in value:
        return "the message has no field `type`"
    name = value["type"]
    if not isinstance(name, str):
        return "field `type` is not text"
    return f"unknown message type '{_printable(name[:_MAX_DETAIL])}'"


def _foreign(error: Exception) -> str:
    if isinstance(error, OverflowError):
        return "an integer is outside -2^63..2^64-1"
    if "keys" in str(error):
        return "a map has a key that is not text"
    return "`undefined` or a simple value that this protocol does not have"


def _field_error(error: msgspec.ValidationError) -> str:
    """`Expected `int`, got `str` - at `$.scores[0].job_id`` with the field put first."""
    detail, at, path = str(error).rpartition(" - at ")
    if not at:
        return _printable(str(error))
    if "matching regex" in detail:
        detail = "text with control characters"
    field = path.replace("$.", "").replace("`", "")
    return _printable(detail) if field == "$" else f"{field}: {_printable(detail)}"


def _printable(text: str) -> str:
    if len(text) > _MAX_DETAIL:
        text = text[:_MAX_DETAIL] + "..."
    return re.sub(r"[^\x20-\x7e]", "?", text)


# -- frames from parts that are encoded already ------------------------------------------------
#
# A candidate is encoded once, when it enters the pool, and sent to every session: a page is a
# head and its joined fragments.


def _text(value: str) -> bytes:
    return cbor2.dumps(value)


def _array_head(length: int) -> bytes:
    if length < 24:
        return bytes((0x80 | length,))
    if length < 2**8:
        return b"\x98" + length.to_bytes(1)
    return b"\x99" + length.to_bytes(2)


_OFFER = b"\xa2" + _text("type") + _text("JobOffer") + _text("candidates")
_CHUNK = b"\xa3" + _text("type") + _text("JobListChunk") + _text("candidates")
_IS_FINAL = {final: _text("is_final") + cbor2.dumps(final) for final in (False, True)}
_ASSIGN = _text("type") + _text("AssignJob") + _text("job_id")
_ASSIGNMENT_ID = _text("assignment_id")
_JOB = _text("job")
_CLUSTER = _text("cluster")


def job_offer(fragments: Sequence[bytes]) -> bytes:
    """The frame of a `JobOffer` of encoded `JobCandidate`s."""
    return b"".join((_OFFER, _array_head(len(fragments)), *fragments))


def job_list_chunk(fragments: Sequence[bytes], is_final: bool) -> bytes:
    """The frame of a `JobListChunk` of encoded `JobCandidate`s."""
    return b"".join((_CHUNK, _array_head(len(fragments)), *fragments, _IS_FINAL[is_final]))


def assign_job(job_id: str, assignment_id: str, job: bytes, cluster: bytes | None = None) -> bytes:
    """The frame of an `AssignJob` with an encoded `Job` and, if any, `ClusterSeat`."""
    parts = [_ASSIGN, _text(job_id), _ASSIGNMENT_ID, _text(assignment_id), _JOB, job]
    if cluster is None:
        return b"\xa4" + b"".join(parts)
    return b"\xa5" + b"".join((*parts, _CLUSTER, cluster))
