"""The status object: what `headrace status --json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from actors.server.assigner import Assigner
from actors.server.claims import Claim
from actors.server.clusters.shown import ClusterViews
from actors.server.feeder import Feeder
from actors.server.sessions import Session, SessionTable

MAX_RUNNING = 10_000
"""Running jobs listed in one answer."""


def status(
    sessions: SessionTable,
    feeder: Feeder,
    assigner: Assigner,
    clusters: ClusterViews,
    now: float,
) -> dict[str, Any]:
    """Workers, job counts, running jobs and clusters; the caller adds `server`."""
    return {
        "workers": [_worker(s, assigner, clusters, now) for s in sessions],
        "jobs": _counts(feeder),
        "running": [
            _running(claim, feeder, clusters, now)
            for claim in list(assigner.claims.values())[:MAX_RUNNING]
        ],
        "clusters": clusters.status(now),
    }


def _worker(
    session: Session, assigner: Assigner, clusters: ClusterViews, now: float
) -> dict[str, Any]:
    told = session.announced
    view = session.view()
    held = assigner.held_by(session.worker)
    return {
        "id": session.worker,
        "name": session.name,
        "state": "draining" if view.draining else "active",
        "drain_reason": session.cordon,
        "capabilities": msgspec.to_builtins(session.capabilities),
        "architectures": list(told.architectures) if told else [],
        "system_features": list(told.system_features) if told else [],
        "zone": told.zone if told else None,
        "endpoint": told.endpoint if told else None,
        "cpu_core_score": told.cpu_core_score if told else None,
        "slots": {
            "build": {"used": assigner.open_builds(session.worker), "max": view.max_builds},
            "eval": {"used": sum(c.kind == "eval" for c in held)},
        },
        "held": sum(clusters.is_held(c) for c in held),
        "idle": assigner.idle_kinds(session.worker, now),
        "last_seen_secs": max(0.0, round(now - session.last_seen, 3)),
        "metrics": msgspec.to_builtins(session.metrics) if session.metrics else None,
    }


def _counts(feeder: Feeder) -> dict[str, int]:
    counts: Mapping[str, int] = feeder.counts
    running = counts["Building"] + counts["Evaluating"]
    return {
        "waiting": counts["Created"],
        "pending": counts["Queued"],
        "running": running,
        "completed": counts["Completed"],
        "failed": counts["Failed"] + counts["TimedOut"],
        "dependency_failed": counts["DependencyFailed"],
        "aborted": counts["Aborted"],
    }


def _running(claim: Claim, feeder: Feeder, clusters: ClusterViews, now: float) -> dict[str, Any]:
    node = feeder.nodes.get(claim.job_id)
    is_held = claim.state == "accepted" and clusters.is_held(claim)
    return {
        "job_id": claim.job_id,
        "worker": claim.worker,
        "assignment_id": claim.assignment_id,
        "kind": claim.kind,
        "name": node.name if node else "",
        "state": "aborting" if claim.abort_reason else "held" if is_held else claim.state,
        "since_secs": max(0.0, round(now - claim.claimed_at, 3)),
        "progress": msgspec.to_builtins(claim.progress) if claim.progress else None,
        "cluster": clusters.seat(claim, now),
    }
