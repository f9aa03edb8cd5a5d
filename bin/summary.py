"""The server's status as plain lines: stable, without colour, for pipes and files. Pure.

A status is the object that `headrace status --json` prints. What a server leaves out of it is
taken as nothing, so that an older command reads a newer server and the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Status = Mapping[str, Any]

COUNTS = (
    "pending", "running", "waiting", "completed", "failed", "dependency_failed", "aborted"
)  # fmt: skip
_ALWAYS = frozenset({"pending", "running", "waiting", "completed"})


def lines(status: Status) -> list[str]:
    """One block: the server, counts of jobs, each worker, each running job, clusters."""
    block = [heading(status), f"jobs: {', '.join(counts(status))}"]
    block += [_worker(worker) for worker in status.get("workers", ())] or ["no workers"]
    block += [_running(status, job) for job in status.get("running", ())]
    block += [_cluster(cluster) for cluster in status.get("clusters", ())]
    notes = troubles(status)
    return [*block, f"server: {', '.join(notes)}"] if notes else block


def heading(status: Status) -> str:
    """`headrace 0.1.0, up 1h 02m`."""
    server = status.get("server", {})
    return f"headrace {clean(server.get('version', '?'))}, up {duration(server.get('uptime_secs'))}"


def counts(status: Status) -> list[str]:
    """`12 pending` and so on; kinds that rarely occur are left out at 0."""
    jobs = status.get("jobs", {})
    return [
        f"{jobs.get(name, 0)} {name.replace('_', ' ')}"
        for name in COUNTS
        if jobs.get(name, 0) or name in _ALWAYS
    ]


def progress_line(status: Status) -> str:
    """All of it in one line, for a log that gets a line per change."""
    jobs = status.get("jobs", {})
    total = sum(jobs.get(name, 0) for name in COUNTS)
    names = [clean(job.get("name") or job.get("job_id")) for job in status.get("running", ())]
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return f"{jobs.get('completed', 0)}/{total} built" + (f"; running {shown}" if names else "")


def change_key(status: Status) -> object:
    """Equal for two statuses that differ only in times and measurements."""
    return (
        tuple(status.get("jobs", {}).items()),
        tuple((w.get("id"), w.get("state"), slots(w)) for w in status.get("workers", ())),
        tuple(r.get("assignment_id") for r in status.get("running", ())),
        tuple((c.get("id"), c.get("status"), c.get("attempt")) for c in status.get("clusters", ())),
        tuple(troubles(status)),
    )


def open_jobs(status: Status) -> int:
    """How many jobs have not ended."""
    jobs = status.get("jobs", {})
    return sum(jobs.get(name, 0) for name in ("pending", "running", "waiting"))


def troubles(status: Status) -> list[str]:
    """What an operator should know of the server itself; empty when all is well."""
    server = status.get("server", {})
    notes = [
        f"{server[name]} {name.replace('_', ' ')}"
        for name in ("stale_reports", "malformed_frames", "lost_races")
        if server.get(name)
    ]
    return notes + [
        f"{clean(name)} restarted {actor['restarts']}x"
        for name, actor in server.get("actors", {}).items()
        if actor.get("restarts")
    ]


def worker_names(status: Status) -> dict[str, str]:
    """Worker id to the name that people see."""
    return {
        w.get("id", "?"): clean(w.get("name") or w.get("id", "?"))
        for w in status.get("workers", ())
    }


def slots(worker: Mapping[str, Any]) -> str:
    """Build slots of a worker, `1/2`."""
    build = worker.get("slots", {}).get("build", {})
    return f"{build.get('used', 0)}/{build.get('max', 0)}"


def evaluations(worker: Mapping[str, Any]) -> int:
    """Evaluations that a worker runs."""
    used: int = worker.get("slots", {}).get("eval", {}).get("used", 0)
    return used


def progress(job: Mapping[str, Any]) -> str:
    """How far a running job is, as far as its worker said; `aborting` once it was told to stop."""
    if job.get("state") == "aborting":
        return "aborting"
    if job.get("state") == "held":
        return "held for its cluster"
    said = job.get("progress") or {}
    if not isinstance(said, Mapping):
        return clean(said)
    if "derivations" in said:
        return f"{said['derivations']} derivations"
    phase = clean(said.get("phase", ""))
    done, total = said.get("bytes_done"), said.get("bytes_total")
    return f"{phase} {100 * done // total}%" if done is not None and total else phase


def duration(seconds: float | None) -> str:
    """`12s`, `3m 05s`, `1h 02m`, `2d 03h`."""
    if seconds is None:
        return "?"
    whole = int(seconds)
    for size, unit, small, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // small:02d}{part}"
    return f"{whole}s"


def clean(value: object) -> str:
    """Text of others, fit for a terminal: what could steer it is replaced."""
    text = str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _worker(worker: Mapping[str, Any]) -> str:
    parts = [f"build {slots(worker)}", f"eval {evaluations(worker)}"]
    parts.append(" ".join(map(clean, worker.get("architectures", ()))) or "no systems")
    if worker.get("system_features"):
        parts.append(f"features {' '.join(map(clean, worker['system_features']))}")
    if worker.get("zone"):
        parts.append(f"zone {clean(worker['zone'])}")
    if worker.get("drain_reason"):
        parts.append(f"drained: {clean(worker['drain_reason'])}")
    name = clean(worker.get("name") or worker.get("id", "?"))
    return f"worker {name} ({clean(worker.get('state', '?'))}): {', '.join(parts)}"


def _running(status: Status, job: Mapping[str, Any]) -> str:
    where = worker_names(status).get(job.get("worker", ""), clean(job.get("worker", "?")))
    name = clean(job.get("name") or job.get("job_id", "?"))
    parts = [f"running {name} on {where}", f"{clean(job.get('kind', '?'))}"]
    parts.append(duration(job.get("since_secs")))
    if progress(job):
        parts.append(progress(job))
    return ", ".join(parts)


def _cluster(cluster: Mapping[str, Any]) -> str:
    members = cluster.get("members", ())
    size = members if isinstance(members, int) else len(members)
    attempt = f", attempt {clean(cluster['attempt'])}" if cluster.get("attempt") else ""
    why = f", {clean(cluster['reason'])}" if cluster.get("reason") else ""
    return (
        f"cluster {clean(cluster.get('id', '?'))}: {clean(cluster.get('status', '?'))}"
        f"{attempt}, {size} members{why}"
    )
