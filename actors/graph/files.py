"""The files that people submit: JSON of Nix, or headrace's own format.

`read_submission` tells them apart by their top-level keys. Everything that it returns has
passed the types of the wire's messages; whether the graph as a whole holds is for
`actors.graph.clusters.resolve`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from actors.graph.clusters import check_ids
from actors.graph.fields import convert, kind
from actors.graph.nix import read_derivations
from actors.graph.order import BadGraph, shown
from transport.messages import (
    SubmittedCluster,
    SubmittedEvaluation,
    SubmittedJob,
    SubmittedMember,
)

__all__ = ["BadGraph", "Submission", "read_submission"]

OWN_KEYS = ("jobs", "evaluations", "clusters")

T = TypeVar("T")


class Submission(Struct, frozen=True):
    """What one file asks for."""

    jobs: list[SubmittedJob] = []
    evaluations: list[SubmittedEvaluation] = []
    clusters: list[SubmittedCluster] = []


def read_submission(data: bytes | str, source: str) -> Submission:
    """Read the JSON of `nix derivation show -r`, or headrace's own.

    Args:
        data: the file's content; bytes must be UTF-8, with or without a byte order mark.
        source: what the file is called in errors, `standard input` for example.

    Raises:
        BadGraph: one line that starts with `source` and names the entry and the field.
    """
    try:
        top = _parse(data)
        if any(key in top for key in OWN_KEYS):
            return _own(top)
        return Submission(jobs=read_derivations(top))
    except BadGraph as error:
        raise BadGraph(f"{source}: {error}") from None


def _parse(data: bytes | str) -> dict[str, Any]:
    text = _text(data)
    if not text.strip():
        raise BadGraph("the file is empty; give the JSON of `nix derivation show -r`")
    try:
        top = msgspec.json.decode(text)
    except RecursionError:
        raise BadGraph("the JSON is nested too deeply; no derivation looks like that") from None
    except msgspec.MsgspecError as error:
        if _is_lines(text):
            raise BadGraph(
                "this is one JSON value a line (nix-eval-jobs?), not one JSON object; give the "
                "JSON of `nix derivation show -r`"
            ) from None
        raise BadGraph(f"not valid JSON: {error}; was the file cut off?") from None
    if not isinstance(top, dict):
        raise BadGraph(
            f"the top level is {kind(top)}, not an object; give the JSON of "
            '`nix derivation show -r`, or {"jobs": [...]}'
        )
    if not top:
        raise BadGraph("the object is empty; nothing to submit")
    return top


def _text(data: bytes | str) -> str:
    if isinstance(data, str):
        return data.removeprefix("\ufeff")
    if data.startswith(b"\x1f\x8b"):
        raise BadGraph("the file is compressed; unpack it first (gunzip -c FILE | ... -)")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise BadGraph("the file is UTF-16; save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadGraph(f"not UTF-8 text (byte {error.start}); is it JSON at all?") from None


def _is_lines(text: str) -> bool:
    first, _, rest = text.strip().partition("\n")
    try:
        msgspec.json.decode(first)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return bool(rest)


# -- headrace's own format -------------------------------------------------------------------


def _own(top: dict[str, Any]) -> Submission:
    strange = sorted(top.keys() - set(OWN_KEYS))
    if strange:
        raise BadGraph(
            f"unknown top-level field `{shown(strange[0])}`; there are {', '.join(OWN_KEYS)}"
        )
    submission = Submission(
        jobs=_entries(top, "jobs", _job),
        evaluations=_entries(top, "evaluations", _evaluation),
        clusters=_entries(top, "clusters", _cluster),
    )
    if not (submission.jobs or submission.evaluations or submission.clusters):
        raise BadGraph(f"nothing to submit: {', '.join(OWN_KEYS)} are all empty")
    named = [(f"jobs[{i}]", job) for i, job in enumerate(submission.jobs)]
    others = [(f"evaluations[{i}]", e) for i, e in enumerate(submission.evaluations)]
    check_ids([*named, *others])
    return submission


def _entries(top: dict[str, Any], key: str, read: Callable[[Any, str], T]) -> list[T]:
    entries = top.get(key)
    if entries is None:
        return []
    if not isinstance(entries, list):
        raise BadGraph(f"field `{key}` is {kind(entries)}, not a list")
    return [read(entry, f"{key}[{i}]") for i, entry in enumerate(entries)]


def _job(entry: Any, where: str) -> SubmittedJob:
    job = convert(entry, SubmittedJob, where)
    if not job.outputs:
        raise BadGraph(f"{where} ({shown(job.drv_path)}): field `outputs` is empty; name one")
    return job


def _evaluation(entry: Any, where: str) -> SubmittedEvaluation:
    return convert(entry, SubmittedEvaluation, where)


def _cluster(entry: Any, where: str) -> SubmittedCluster:
    if not isinstance(entry, dict):
        return convert(entry, SubmittedCluster, where)
    # One by one, so that an error names the member.
    members = entry.get("members")
    if not isinstance(members, list):
        return convert(entry, SubmittedCluster, where)
    read = [_member(member, f"{where}.members[{i}]") for i, member in enumerate(members)]
    return replace(convert({**entry, "members": []}, SubmittedCluster, where), members=read)


def _member(entry: Any, where: str) -> SubmittedMember:
    member = convert(entry, SubmittedMember, where)
    if isinstance(member.job, SubmittedJob) and not member.job.outputs:
        raise BadGraph(f"{where}: field `job.outputs` is empty; name one")
    return member
