"""What the server's cores agree on about jobs and workers: frozen values, and who may run what."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from transport.messages import Kind


class JobClass(NamedTuple):
    """All that eligibility depends on: jobs of one class are candidates of the same workers."""

    kind: Kind
    project: str
    system: str
    """Of a build; empty for an evaluation."""
    features: frozenset[str]
    """Required by a build; empty for an evaluation."""
    needs_fetch: bool
    """An evaluation whose source is best fetched by a worker with the `fetch` capability. No
    part of eligibility."""


class PoolEntry(Struct, frozen=True, kw_only=True, gc=False):  # holds no cycles, lives by 100 000
    """A job that can start, as offers and scoring see it."""

    job_id: str
    cls: JobClass
    name: str
    ready_at: float
    """Monotonic seconds: when the last dependency finished."""
    prioritized: bool = False
    interactive: bool = False
    """A person at a terminal waits for it."""
    required_paths: tuple[tuple[str, int | None], ...] = ()
    """Paths with their NAR sizes in bytes where known."""
    drv_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()
    package: str = ""
    """Of a build: its `pname`, else its name; history is kept under it."""
    is_cluster_member: bool = False
    """Offered and scored like any job, but never the answer to a single request."""


class WorkerView(Struct, frozen=True, kw_only=True):
    """A worker's session as eligibility and scoring see it; None = unknown."""

    worker: str
    can_fetch: bool
    can_eval: bool
    can_build: bool
    has_capabilities: bool
    """`WorkerCapabilities` was received."""
    architectures: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    projects: frozenset[str] | None = None
    """Authorized projects; None = every project (open mode)."""
    draining: bool = False
    max_builds: int = 0
    has_metrics: bool = False
    """`WorkerMetrics` was received."""
    cpu_count: int | None = None
    cpu_core_score: float | None = None
    cpu_usage_pct: float | None = None
    ram_total_mb: int | None = None
    ram_free_mb: int | None = None
    download_speed_mbps: float | None = None
    upload_speed_mbps: float | None = None


def eligible(cls: JobClass, worker: WorkerView) -> bool:
    """Whether pending jobs of the class are candidates of the worker.

    Draining is no part of it: it stops offers and assignments, not candidacy.
    """
    if worker.projects is not None and cls.project not in worker.projects:
        return False
    if cls.kind == "eval":
        return worker.can_eval
    return (
        worker.can_build
        and worker.has_capabilities
        and (cls.system == "builtin" or cls.system in worker.architectures)
        and cls.features <= worker.features
    )
