"""A job as the server holds it in memory, and its forms on the wire and in the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any

import msgspec

from actors.ledger.records import JobRecord, Status
from actors.server.model import JobClass, PoolEntry
from transport import messages as m
from transport.codec import decode_value, encode_value

_DEFAULT_PROJECT = "default"
# What of a derivation the job map says itself; the rest travels in its `derivation`.
_NOT_IN_DERIVATION = frozenset(
    {"drv_path", "outputs", "timeout_secs", "max_silent_secs", "job_id", "project",
     "prioritized", "required_paths"}
)  # fmt: skip


@dataclass(slots=True, eq=False)
class Node:
    """A job that has not ended. The feeder alone changes it."""

    job_id: str
    name: str
    cls: JobClass
    drv_path: str | None
    outputs: tuple[str, ...]
    sources: tuple[str, ...]
    """Paths it needs that no other job builds."""
    inputs: tuple[str, ...]
    """drv paths it needs built."""
    body: bytes
    """The CBOR entries of its job map, all but `required_paths`, see `job_map`."""
    status: Status
    package: str
    prioritized: bool = False
    interactive: bool = False
    attempts: int = 0
    losses: int = 0
    ready_at: float | None = None
    retry_at: float | None = None
    error: str | None = None
    lacks: frozenset[str] = frozenset()
    """Paths it needs that its worker could get nowhere; the ledger is looking for their makers."""
    rebuilds: int = 0
    """How often it has waited for inputs to be built again; a restarted server counts anew."""
    requesters: frozenset[str] = frozenset()
    waits_for: int = 0
    """How many of its inputs are not built."""
    built: list[str] = field(default_factory=list)
    """Output paths of its inputs that are built."""
    dependents: list[Node] = field(default_factory=list)
    abort_reason: str | None = None
    """It runs, and its worker was told to stop it."""
    children: int = 0
    """Of an evaluation: builds that have not ended."""
    failed_children: int = 0
    broken: str | None = None
    """Of an evaluation: why a batch of it could not be taken."""
    admissions: int = 0
    """Of an evaluation: batches on their way through the ledger."""
    evaluated: bool = False
    unchecked: bool = True
    """Of an evaluation: its graph was not searched for cycles yet."""
    cluster: str | None = None
    """It is a member: it starts with its cluster, and only the cluster's verdict ends it."""

    @property
    def kind(self) -> str:
        return self.cls.kind


def project_of(job: m.SubmittedJob | m.SubmittedEvaluation) -> str:
    return job.project or _DEFAULT_PROJECT


def build_record(
    job: m.SubmittedJob, job_id: str, *, interactive: bool, cluster: str | None = None
) -> JobRecord:
    """The ledger's form of a submitted build."""
    return JobRecord(
        job_id=job_id,
        kind="build",
        project=project_of(job),
        name=job.name,
        status="Created",
        drv_path=job.drv_path,
        outputs=tuple(job.outputs.values()),
        payload=encode_value(msgspec.to_builtins(job)),
        inputs=tuple(dict.fromkeys(job.input_drvs)),
        prioritized=bool(job.prioritized),
        interactive=interactive,
        cluster=cluster,
    )


def evaluation_record(
    evaluation: m.SubmittedEvaluation,
    job_id: str,
    ready_at: float,
    *,
    interactive: bool,
    cluster: str | None = None,
) -> JobRecord:
    """The ledger's form of a submitted evaluation."""
    return JobRecord(
        job_id=job_id,
        kind="eval",
        project=project_of(evaluation),
        name=evaluation.source.ref,
        status="Queued",
        drv_path=None,
        outputs=(),
        payload=encode_value(msgspec.to_builtins(evaluation)),
        inputs=(),
        prioritized=bool(evaluation.prioritized),
        interactive=interactive,
        ready_at=ready_at,
        cluster=cluster,
    )


def node_of(record: JobRecord, requesters: Iterable[str]) -> Node:
    """The in-memory form of a record that has not ended."""
    payload: dict[str, Any] = decode_value(record.payload)
    if record.kind == "eval":
        return _evaluation_node(record, payload, frozenset(requesters))
    assert record.drv_path is not None
    features = sorted(set(payload["required_features"]))
    required = [p["path"] for p in payload.get("required_paths") or ()]
    body = {
        "kind": "build",
        "project": record.project,
        "drv_path": record.drv_path,
        "name": record.name,
        "outputs": payload["outputs"],
        "requirement": {"system": payload["system"], "required_features": features},
        "timeout_secs": payload.get("timeout_secs") or 0,
        "max_silent_secs": payload.get("max_silent_secs") or 0,
        "derivation": {k: v for k, v in payload.items() if k not in _NOT_IN_DERIVATION},
    }
    return Node(
        job_id=record.job_id,
        name=record.name,
        cls=JobClass("build", record.project, payload["system"], frozenset(features), False),
        drv_path=intern(record.drv_path),
        outputs=tuple(map(intern, record.outputs)),
        # Many jobs need the same few paths: each of them is in memory once.
        sources=tuple(dict.fromkeys(map(intern, [*payload["input_srcs"], *required]))),
        inputs=tuple(map(intern, record.inputs)),
        body=_entries(body),
        status=record.status,
        package=payload.get("pname") or record.name,
        requesters=frozenset(requesters),
        **_mutable(record),
    )


def _evaluation_node(
    record: JobRecord, payload: dict[str, Any], requesters: frozenset[str]
) -> Node:
    source = payload["source"]
    body = {
        "kind": "eval",
        "project": record.project,
        "source": source,
        "attributes": payload.get("attributes") or [],
        "timeout_secs": payload.get("timeout_secs") or 0,
    }
    needs_fetch = source["kind"] == "flake" and not source["ref"].startswith((".", "/", "path:"))
    return Node(
        job_id=record.job_id,
        name=record.name,
        cls=JobClass("eval", record.project, "", frozenset(), needs_fetch),
        drv_path=None,
        outputs=(),
        sources=(),
        inputs=(),
        body=_entries(body),
        status=record.status,
        package=record.project,
        requesters=requesters,
        evaluated=record.status == "Building",
        # Its claim is over; see `Feeder.completed`.
        broken=record.error if record.status == "Building" else None,
        **_mutable(record),
    )


def _mutable(record: JobRecord) -> dict[str, Any]:
    return {
        "prioritized": record.prioritized,
        "interactive": record.interactive,
        "attempts": record.attempts,
        "losses": record.losses,
        "ready_at": record.ready_at,
        "retry_at": record.retry_at,
        "error": record.error,
        "cluster": record.cluster,
    }


def _entries(fields: dict[str, Any]) -> bytes:
    """The encoded entries of a map without its head, so that one more can be spliced in."""
    assert len(fields) < 23, "a map head of one byte, with room for `required_paths`"
    return bytes([len(fields) + 1]) + encode_value(fields)[1:]


_REQUIRED_KEY = encode_value("required_paths")


def job_map(node: Node, entry: PoolEntry) -> bytes:
    """The CBOR of the `job` of an `AssignJob`."""
    entries, body = node.body[0], node.body[1:]
    if node.kind == "eval":
        return bytes([0xA0 | (entries - 1)]) + body
    required = [
        {"path": path} if size is None else {"path": path, "nar_size": size}
        for path, size in entry.required_paths
    ]
    return bytes([0xA0 | entries]) + body + _REQUIRED_KEY + encode_value(required)


def pool_entry(node: Node, sizes: Mapping[str, int]) -> PoolEntry:
    """The candidate that a job which can start is to workers.

    `required_paths` are the outputs of its inputs, its sources and what the submission adds,
    each once, with the NAR sizes that are known.
    """
    assert node.ready_at is not None
    paths = dict.fromkeys((*node.built, *node.sources))
    return PoolEntry(
        job_id=node.job_id,
        cls=node.cls,
        name=node.name,
        ready_at=node.ready_at,
        prioritized=node.prioritized,
        interactive=node.interactive,
        required_paths=tuple((path, sizes.get(path)) for path in paths),
        drv_paths=(node.drv_path,) if node.drv_path else (),
        output_paths=node.outputs,
        package=node.package,
        is_cluster_member=node.cluster is not None,
    )
