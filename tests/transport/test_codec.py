"""The codec: every message round-trips, every rule of the CBOR section holds, nothing escapes."""

from __future__ import annotations

import random
from typing import Any

import cbor2
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import inspect

from transport import codec
from transport import messages as m
from transport.codec import Decoder, Malformed, encode

ALL = tuple(dict.fromkeys((*m.WORKER_MESSAGES, *m.COMMAND_MESSAGES, *m.SERVER_MESSAGES)))
decoder = Decoder(ALL)


# -- strategies from the types of the messages -----------------------------------------------


def of_type(info: inspect.Type) -> st.SearchStrategy[Any]:  # one arm per kind of type
    match info:
        case inspect.Metadata(type=inner):
            return of_type(inner)
        case inspect.NoneType():
            return st.none()
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType(ge=ge, le=le):
            return st.integers(-(2**63) if ge is None else ge, 2**64 - 1 if le is None else le)
        case inspect.FloatType(ge=ge, le=le):
            return st.floats(ge, le, allow_nan=False, allow_infinity=False)
        case inspect.StrType(min_length=low, max_length=high, pattern=pattern):
            alphabet = st.characters(exclude_categories=["Cs", "Cc"] if pattern else ["Cs"])
            return st.text(alphabet, min_size=low or 0, max_size=min(high or 20, 20))
        case inspect.BytesType():
            return st.binary(max_size=40)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.ListType(item_type=item, min_length=low):
            return st.lists(of_type(item), min_size=low or 0, max_size=3)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(of_type, items))
        case inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(of_type(key), of_type(value), max_size=3)
        case inspect.UnionType(types=types):
            return st.one_of(*map(of_type, types))
        case inspect.StructType(cls=cls):
            return of_struct(cls)
        case inspect.AnyType():
            return plain_values
    raise AssertionError(info)


def of_struct(cls: type[Any]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return st.builds(cls, **{field.name: of_type(field.type) for field in info.fields})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.one_of(*map(of_struct, ALL))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_message_round_trips(kind: type[m.Message]) -> None:
    @given(of_struct(kind))
    def check(message: m.Message) -> None:
        frame = encode(message)
        assert decoder.decode(frame) == message
        wire = cbor2.loads(frame)
        assert wire["type"] == kind.__name__

    check()


def test_none_fields_are_left_out_and_names_are_those_of_the_wire() -> None:
    signal = m.ClusterSignal(attempt="a1", payload=b"\0\xff", sender=m.MemberRef("leader", 0))
    assert cbor2.loads(encode(signal)) == {
        "type": "ClusterSignal",
        "attempt": "a1",
        "payload": b"\0\xff",
        "from": {"role": "leader", "index": 0},
    }


def test_unknown_fields_are_ignored_and_null_is_missing() -> None:
    frame = cbor2.dumps({"type": "CmdWait", "request": 7, "jobs": None, "later": {"x": [None]}})
    assert decoder.decode(frame) == m.CmdWait(request=7)
    evaluation = {"source": {"kind": "flake", "ref": "."}, "attributes": None, "project": None}
    frame = cbor2.dumps(
        {"type": "CmdSubmit", "request": 1, "is_final": True, "evaluations": [evaluation]}
    )
    assert decoder.decode(frame) == m.CmdSubmit(
        request=1,
        is_final=True,
        evaluations=[m.SubmittedEvaluation(source=m.EvalSource("flake", "."))],
    )


def test_a_required_field_that_is_null_is_malformed() -> None:
    with pytest.raises(Malformed, match=r"^RequestJob: kind: Expected `str`, got `null`$"):
        decoder.decode(cbor2.dumps({"type": "RequestJob", "kind": None}))


def test_a_float_takes_an_integer_but_no_boolean() -> None:
    frame = cbor2.dumps({"type": "WorkerMetrics", "disk_speed_mbps": 2**64 - 1})
    assert decoder.decode(frame) == m.WorkerMetrics(disk_speed_mbps=float(2**64 - 1))
    with pytest.raises(Malformed, match="disk_speed_mbps"):
        decoder.decode(cbor2.dumps({"type": "WorkerMetrics", "disk_speed_mbps": True}))


def test_lengths_need_not_be_the_shortest() -> None:
    assert decoder.decode(bytes.fromhex("b80178047479706578084472 61696e696e67")) == m.Draining()


# -- one rule at a time ----------------------------------------------------------------------

# In place of the value of a field that no message has, so that only strictness can refuse it.
FOREIGN = {
    "undefined": "f7",
    "simple value 16": "f0",
    "simple value 32": "f820",
    "two-byte false": "f814",
    "undefined in an array": "81f7",
    "date text": "c074323031332d30332d32315432303a30343a30305a",
    "epoch date": "c11a514b67b0",
    "bignum": "c24101",
    "negative bignum": "c34101",
    "decimal": "c4820103",
    "string reference": "d81900",
    "shared value": "d81c01",
    "shared value that holds itself": "d81ca16161d81d00",
    "shared reference": "d81d00",
    "regular expression": "d8236161",
    "mime": "d8246161",
    "uuid": "d8255000000000000000000000000000000000",
    "date": "d86401",
    "string namespace": "d9010001",
    "set": "d9010280",
    "ip address": "d901044401020304",
    "self-described": "d9d9f701",
    "unknown tag": "d9fffe01",
    "endless array": "9fff",
    "endless map": "bfff",
    "endless text": "7f6161ff",
    "endless bytes": "5f4161ff",
    "break": "ff",
    "duplicate keys": "a2616101616102",
    "duplicate keys of other lengths": "a261610178016102",
    "integer key": "a10101",
    "byte key": "a1416101",
    "byte key beside text": "a2616101416101",
    "null key": "a1f601",
    "array key": "a18001",
    "tagged key": "a1c6616101",
    "integer below -2^63": "3b8000000000000000",
    "smallest cbor integer": "3bffffffffffffffff",
    "integer above 2^64-1": "c249010000000000000000",
    "invalid utf-8": "61ff",
    "surrogate": "63eda080",
    "invalid utf-8 in a key": "a161ff01",
    "reserved length": "1c",
    "huge array": "9bffffffffffffffff",
    "huge array of 2^32": "9b0000000100000000",
    "huge text": "7bffffffffffffffff",
    "huge bytes": "5b0000000100000000",
    "huge map": "bb0000000100000000",
    "truncated": "8201",
}
HEAD = b"\xa2" + cbor2.dumps("type") + cbor2.dumps("Draining") + cbor2.dumps("x")


def refusal(frame: bytes) -> Malformed:
    with pytest.raises(Malformed) as caught:
        decoder.decode(frame)
    check_text(str(caught.value))
    return caught.value


def check_text(text: str) -> None:
    assert 0 < len(text) <= 300
    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize("item", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_the_protocol_lacks_is_refused_even_in_ignored_fields(item: str) -> None:
    refusal(HEAD + bytes.fromhex(item))
    untyped = encode(m.CmdStatusReply(request=1, status={"x": "?"}))
    assert untyped.endswith(b"a?")
    refusal(untyped[:-2] + bytes.fromhex(item))


@pytest.mark.parametrize(
    "item", ["3b7fffffffffffffff", "1bffffffffffffffff", "f97e00", "f6", "40", "a0", "80"]
)
def test_what_the_protocol_has_passes_in_ignored_fields(item: str) -> None:
    assert decoder.decode(HEAD + bytes.fromhex(item)) == m.Draining()


def test_at_most_sixteen_levels() -> None:
    # The message's map is the first.
    for array, key in ((b"\x81", b""), (b"\xa1", b"\x61a")):
        assert decoder.decode(HEAD + (array + key) * 15 + b"\x01") == m.Draining()
        assert decoder.decode(HEAD + (array + key) * 14 + b"\x80") == m.Draining()
        refusal(HEAD + (array + key) * 16 + b"\x01")
        refusal(HEAD + (array + key) * 15 + b"\x80")


@pytest.mark.parametrize("level", ["81", "9f", "a16161", "bf6161", "c1", "d81c", "d9010281"])
def test_nesting_bombs_are_malformed(level: str) -> None:
    refusal(bytes.fromhex(level) * 200_000)
    refusal(HEAD + bytes.fromhex(level) * 200_000)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1, "the frame is not a map"),
        ([{"type": "Draining"}], "the frame is not a map"),
        ({}, "the message has no field `type`"),
        ({"type": 1}, "field `type` is not text"),
        ({"type": None}, "field `type` is not text"),
        ({"type": "Nonsense"}, "unknown message type 'Nonsense'"),
        ({"type": "RequestJob"}, "RequestJob: Object missing required field `kind`"),
        ({"type": "RequestJob", "kind": 3}, "RequestJob: kind: Expected `str`, got `int`"),
        (
            {"type": "RequestJobChunk", "scores": [{"job_id": "a"}]},
            "RequestJobChunk: scores[0]: Object missing required field `missing_count`",
        ),
        (
            {"type": "AuthResponse", "tokens": {"": "t"}},
            "AuthResponse: key in tokens: Expected `str` of length >= 1",
        ),
        (
            {"type": "CmdUndrain", "request": 1, "worker": "a\nb"},
            "CmdUndrain: worker: text with control characters",
        ),
    ],
)
def test_the_text_names_message_and_field(value: Any, text: str) -> None:
    assert str(refusal(cbor2.dumps(value))) == text


def test_the_text_stays_short_and_printable_whatever_the_peer_sends() -> None:
    nasty = "\x1b[2J\r\n\u202e" * 10_000
    for field in ("kind", "type"):
        text = str(refusal(cbor2.dumps({"type": "RequestJob", "kind": "build", field: nasty})))
        assert field in text
    twice = cbor2.dumps(nasty) + b"\x01"
    refusal(b"\xa2" + twice + twice)
    update = {"type": "JobUpdate", "job_id": "j", "assignment_id": "a", "update": {"kind": nasty}}
    assert str(refusal(cbor2.dumps(update))).startswith("JobUpdate: update.kind: Invalid value")


def test_the_message_type_is_given_once_known() -> None:
    assert refusal(cbor2.dumps({"type": "RequestJob"})).message_type == "RequestJob"
    assert refusal(HEAD + b"\xf7").message_type == "Draining"
    assert refusal(cbor2.dumps({"type": "Nonsense"})).message_type is None
    assert refusal(b"").message_type is None


def test_only_the_messages_of_the_direction_are_known() -> None:
    with pytest.raises(Malformed, match="unknown message type 'InitAck'"):
        Decoder(m.WORKER_MESSAGES).decode(cbor2.dumps({"type": "InitAck"}))


@pytest.mark.parametrize("extra", [b"\x01", b"\0", b"\xa0", b"\xff", encode(m.Draining())])
def test_bytes_after_the_map_are_malformed(extra: bytes) -> None:
    assert "bytes after the map" in str(refusal(encode(m.Draining()) + extra))


def test_a_duplicate_field_is_malformed_in_either_order() -> None:
    head = b"\xa4" + cbor2.dumps("type") + cbor2.dumps("JobCompleted")
    job = cbor2.dumps("job_id") + cbor2.dumps("j")
    one, other = (cbor2.dumps("assignment_id") + cbor2.dumps(value) for value in ("old", "new"))
    refusal(head + job + one + other)
    refusal(head + job + other + one)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -1, 2**63, "1"])
@pytest.mark.parametrize(
    ("kind", "field"),
    [("WorkerMetrics", "cpu_usage_pct"), ("WorkerMetrics", "ram_free_mb")],
)
def test_numbers_that_break_comparisons_are_malformed(kind: str, field: str, value: Any) -> None:
    assert field in str(refusal(cbor2.dumps({"type": kind, field: value})))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.5])
@pytest.mark.parametrize("field", ["disk_speed_mbps", "upload_speed_mbps", "download_speed_mbps"])
def test_speeds_are_finite(field: str, value: float) -> None:
    assert field in str(refusal(cbor2.dumps({"type": "WorkerMetrics", field: value})))


# -- sizes -----------------------------------------------------------------------------------


def failed(error: str) -> dict[str, Any]:
    return {
        "type": "JobFailed", "job_id": "j", "assignment_id": "a", "kind": "Permanent",
        "error": error,
    }  # fmt: skip


@pytest.mark.parametrize("letter", ["a", "é", "€", "😀"])
def test_the_limit_of_texts_counts_bytes(letter: str) -> None:
    size = len(letter.encode())
    fits = letter * (65_536 // size)
    fits += "." * (65_536 - len(fits.encode()))
    message = decoder.decode(cbor2.dumps(failed(fits)))
    assert isinstance(message, m.JobFailed)
    assert message.error == fits
    assert str(refusal(cbor2.dumps(failed(fits + ".")))).startswith("JobFailed: error: ")


def submission(**fields: Any) -> dict[str, Any]:
    job = {
        "drv_path": "/nix/store/a.drv", "name": "a", "system": "x86_64-linux",
        "required_features": [], "outputs": {}, "input_drvs": [], "input_srcs": [], **fields,
    }  # fmt: skip
    return {"type": "CmdSubmit", "request": 1, "is_final": True, "jobs": [job]}


def test_arguments_and_environment_may_be_longer() -> None:
    fits = "é" * 2**19
    for fields in ({"args": [fits]}, {"env": {"x": fits}}):
        message = decoder.decode(cbor2.dumps(submission(**fields)))
        assert isinstance(message, m.CmdSubmit)
    for fields in ({"args": [fits + "."]}, {"env": {"x": fits + "."}}, {"pname": "é" * 2**16}):
        assert "jobs[0]" in str(refusal(cbor2.dumps(submission(**fields))))
    # The limit is that of `text`; a field that nobody reads is none.
    assert decoder.decode(cbor2.dumps({"type": "Draining", "x": fits * 3})) == m.Draining()


def test_ids_count_characters_and_may_be_any_script() -> None:
    for worker in ("é" * 200, "工" * 200):
        frame = cbor2.dumps({"type": "CmdUndrain", "request": 1, "worker": worker})
        assert decoder.decode(frame) == m.CmdUndrain(request=1, worker=worker)
    refusal(cbor2.dumps({"type": "CmdUndrain", "request": 1, "worker": "é" * 201}))


def test_a_frame_above_the_limit_is_not_decoded() -> None:
    data = b"x" * (m.MAX_FRAME_BYTES - len(HEAD) - 5)
    frame = HEAD + cbor2.dumps(data)
    assert len(frame) == m.MAX_FRAME_BYTES
    assert decoder.decode(frame) == m.Draining()
    assert "8388609 bytes" in str(refusal(frame + b"\0"))


# -- whatever the bytes are ------------------------------------------------------------------


class NotStrict(Exception):
    pass


def scan(data: bytes, at: int, depth: int) -> int:
    """The protocol's CBOR, read from RFC 8949 byte by byte: the end of the item at `at`."""
    if at >= len(data):
        raise NotStrict
    major, info = data[at] >> 5, data[at] & 31
    at += 1
    if info > 27:
        raise NotStrict
    size = 0 if info < 24 else 2 ** (info - 24)
    if at + size > len(data):
        raise NotStrict
    value = info if info < 24 else int.from_bytes(data[at : at + size])
    at += size
    if major in (0, 1):
        if major == 1 and value >= 2**63:
            raise NotStrict
    elif major in (2, 3):
        if at + value > len(data):
            raise NotStrict
        if major == 3:
            try:
                data[at : at + value].decode()
            except UnicodeDecodeError:
                raise NotStrict from None
        at += value
    elif major in (4, 5):
        if depth == m.MAX_DEPTH:
            raise NotStrict
        keys = set()
        for _ in range(value):
            if major == 5:
                if at >= len(data) or data[at] >> 5 != 3:
                    raise NotStrict
                start, at = at, scan(data, at, depth + 1)
                keys.add(cbor2.loads(data[start:at]))
            at = scan(data, at, depth + 1)
        if major == 5 and len(keys) != value:
            raise NotStrict
    elif major == 6 or info not in (20, 21, 22, 25, 26, 27):
        raise NotStrict
    return at


def is_strict(data: bytes) -> bool:
    try:
        return scan(data, 0, 0) == len(data)
    except NotStrict:
        return False


# Heads of every kind, so that random bytes get somewhere.
cbor_like = st.lists(
    st.sampled_from([bytes.fromhex(item) for item in FOREIGN.values()])
    | st.sampled_from([b"\x81", b"\x82", b"\xa1", b"\xa2", b"\x61a", b"\x61b", b"\x01", b"\xf6"])
    | st.binary(min_size=1, max_size=3)
    | plain_values.map(cbor2.dumps),
    max_size=6,
).map(b"".join)


@given(cbor_like)
@example(b"\x81" * 15 + b"\x80")
@example(b"\x81" * 14 + b"\xa0")
def test_accepts_exactly_the_protocols_cbor(item: bytes) -> None:
    frame = HEAD + item
    try:
        decoder.decode(frame)
    except Malformed as error:
        check_text(str(error))
        assert not is_strict(frame)
    else:
        assert is_strict(frame)


@given(messages, st.randoms(use_true_random=False))
def test_a_damaged_frame_is_a_message_or_malformed(message: m.Message, rng: random.Random) -> None:
    frame = bytearray(encode(message))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(frame) + 1)
        match rng.randrange(4):
            case 0:
                frame[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                frame[at:at] = rng.choice(list(map(bytes.fromhex, FOREIGN.values())))
            case 2:
                del frame[at : at + rng.randint(1, 8)]
            case 3:
                start = rng.randrange(len(frame) + 1)
                frame[at:at] = frame[start : start + 16]
    try:
        decoder.decode(bytes(frame))
    except Malformed as error:
        check_text(str(error))
    else:
        assert is_strict(bytes(frame))


@given(st.binary(max_size=200))
def test_noise_is_malformed(noise: bytes) -> None:
    refusal(noise)


# -- splicing --------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 23, 24, 255, 256, 1_000])
def test_pages_of_encoded_candidates_equal_their_messages(count: int) -> None:
    candidates = [
        m.JobCandidate(
            job_id=f"j{index}",
            kind="build",
            project="p",
            required_paths=[m.RequiredPath("/nix/store/x", index)],
            drv_paths=["/nix/store/x.drv"],
            output_paths=[],
            requirement=m.Requirement("x86_64-linux", ["kvm"]),
        )
        for index in range(count)
    ]
    fragments = [codec.encode_value(candidate) for candidate in candidates]
    assert decoder.decode(codec.job_offer(fragments)) == m.JobOffer(candidates)
    for is_final in (False, True):
        chunk = codec.job_list_chunk(fragments, is_final)
        assert decoder.decode(chunk) == m.JobListChunk(candidates, is_final)
        assert chunk == encode(m.JobListChunk(candidates, is_final))


@given(of_struct(m.AssignJob))
def test_an_assignment_of_an_encoded_job_equals_its_message(message: m.AssignJob) -> None:
    seat = None if message.cluster is None else codec.encode_value(message.cluster)
    frame = codec.assign_job(
        message.job_id, message.assignment_id, codec.encode_value(message.job), seat
    )
    assert decoder.decode(frame) == message


@given(of_struct(m.SubmittedJob))
def test_values_are_kept(job: m.SubmittedJob) -> None:
    kept = codec.decode_value(codec.encode_value(job))
    assert msgspec.convert(kept, m.SubmittedJob) == job
