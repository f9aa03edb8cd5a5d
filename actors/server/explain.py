"""Why a job waits, or why it went where it went: what `headrace explain --json` prints.

Rules of the file:

- One *dominant* reason first. Where no worker that is here may run the job, it is the last
  hurdle that any of them reached: kind, system, features, project. Where some may, it is the state
  at the worker that is nearest to running it (`_NEAREST`).
- Codes are stable; texts are for people.
- A pending job is explained from memory, as the next request would be decided, with what became
  of its claims so far; one that runs or has ended from the breakdown that its claim left in the
  ledger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from actors.ledger.records import TERMINAL, JobInfo, PastClaim
from actors.server.assigner import Assigner
from actors.server.clusters.shown import ClusterViews
from actors.server.feeder import Feeder
from actors.server.jobs import Node
from actors.server.model import JobClass, WorkerView, eligible
from actors.server.roster import Roster
from actors.server.scoring import explain, outranking
from actors.server.sessions import Session, SessionTable
from transport import messages as m
from transport.codec import decode_value

MAX_COUNTED_JOBS = 2_000_000
"""How many (worker, pending job) pairs may be compared for one explanation: some 15 ms."""
MAX_NAMED = 20
"""Inputs, workers and claims that one explanation names of each."""

_HURDLES = ("wrong_kind", "no_system", "no_feature", "not_authorized")
_NEAREST = (
    "next", "outranked", "below_floor", "held_memory", "unscored", "vetoed", "declined",
    "cluster", "all_full", "drained",
)  # fmt: skip
_VETOES = {"rescore-wait": "unscored", "resource-saturation": "held_memory"}
_CHANGES = {
    "wrong_kind": "a worker that takes jobs of this kind",
    "no_system": "a worker for this system",
    "no_feature": "a worker with these features",
    "not_authorized": "a token of this project on the worker",
    "drained": "headrace undrain, or the worker's return",
    "all_full": "a build that ends there, or more slots",
    "unscored": "its report of what it lacks, or 4 ticks",
    "held_memory": "running builds that end and free their memory",
    "vetoed": "the rule that vetoes it",
    "declined": "the end of the pause after its decline",
    "cluster": "a seat for every member of the cluster at once",
    "below_floor": "time: rules that wait lift the total, and load goes",
    "outranked": "headrace prioritize, or those before it being assigned",
    "next": "the worker's next request",
}


class _Verdict(Struct, frozen=True):
    """Of one worker."""

    session: Session
    eligible: bool
    code: str
    why: str
    scores: dict[str, float] = {}
    total: float | None = None
    vetoes: tuple[str, ...] = ()
    outranked_by: int | None = None
    last_request: dict[str, Any] | None = None

    def shown(self) -> dict[str, Any]:
        return {
            "worker": self.session.worker,
            "name": self.session.name,
            "eligible": self.eligible,
            "code": self.code,
            "why_not": self.why,
            "total": self.total,
            "vetoes": list(self.vetoes),
            "rules": self.scores,
            "outranked_by": self.outranked_by,
            "would_change": _CHANGES[self.code],
            "last_request": self.last_request,
        }


class Explainer:
    """Reads the other cores; changes nothing."""

    def __init__(
        self,
        feeder: Feeder,
        assigner: Assigner,
        sessions: SessionTable,
        roster: Roster,
        clusters: ClusterViews,
    ) -> None:
        self._clusters = clusters
        self._feeder = feeder
        self._assigner = assigner
        self._sessions = sessions
        self._roster = roster

    def waiting(
        self, job_id: str, claims: Sequence[PastClaim], now: float
    ) -> dict[str, Any] | None:
        """Why a job waits, and what became of its claims so far; None when it does not: it runs,
        has ended, or is unknown."""
        node = self._feeder.nodes.get(job_id)
        if node is None or node.status not in ("Created", "Queued"):
            return None
        counted = max(1, MAX_COUNTED_JOBS // max(1, len(self._assigner.pool)))
        verdicts = []
        for session in self._sessions:
            verdict = self._verdict(node, session, now, counts=counted > 0)
            counted -= verdict.outranked_by is not None
            asked = self._last_request(session.worker, node.cls.kind, now)
            verdicts.append(replace(verdict, last_request=asked))
        reason = self._standing(node, now) or self._reason(node.cls, verdicts, now)
        return {
            **_head(node.job_id, node.cls.kind, node.name, node.status),
            "reason": reason,
            "workers": [verdict.shown() for verdict in verdicts],
            "away": self._away(node.cls, now),
            "decisions": _decisions(claims),
        }

    def decided(self, info: JobInfo, claims: Sequence[PastClaim], now: float) -> dict[str, Any]:
        """Why a job went where it went."""
        newest = claims[-1] if claims else None
        node = self._feeder.nodes.get(info.job_id)
        held = self._clusters.standing(info.job_id, now)
        if held is not None:
            reason = held
        elif node is not None and node.evaluated:
            reason = _reason("running", f"evaluated; {node.children} of its builds have not ended")
        elif newest is not None and newest.closed_at is None:
            reason = _reason("running", f"on worker {newest.claim.worker}")
        elif info.status not in TERMINAL:
            reason = _reason("running", f"{info.status}, by another server")
        else:
            told = f": {info.error}" if info.error else ""
            reason = _reason("ended", f"{info.status}{told}")
        return {
            **_head(info.job_id, info.kind, info.name, info.status),
            "reason": reason,
            "workers": [],
            "away": [],
            "decisions": _decisions(claims),
        }

    # -- reasons that no worker can do anything about -------------------------------------------

    def _standing(self, node: Node, now: float) -> dict[str, Any] | None:
        if node.waits_for:
            inputs = [self._input(path) for path in node.inputs]
            missing = [i for i in inputs if i is not None]
            names = ", ".join(i["name"] for i in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            text = f"waits for {len(missing)} of its inputs to be built: {names}{more}"
            return {**_reason("inputs", text), "inputs": missing[:MAX_NAMED]}
        if node.retry_at is not None and node.retry_at > now:
            secs = round(node.retry_at - now, 3)
            text = f"tried again in {math.ceil(secs)} s; the last try: {node.error}"
            return {**_reason("retry_at", text), "retry_in_secs": secs}
        return self._clusters.standing(node.job_id, now)

    def _input(self, path: str) -> dict[str, Any] | None:
        """An input that is not built; None for one that is."""
        dependency = self._feeder.by_drv.get(path)
        if dependency is not None:
            return {"drv_path": path, "job_id": dependency.job_id, "name": dependency.name,
                    "status": dependency.status}  # fmt: skip
        if self._feeder.is_awaited(path):
            return {"drv_path": path, "job_id": None, "name": path, "status": None}
        return None

    # -- workers -----------------------------------------------------------------------------------

    def _verdict(self, node: Node, session: Session, now: float, *, counts: bool) -> _Verdict:
        view = session.view()
        hurdle = _hurdle(node.cls, view)
        if hurdle is not None:
            return _Verdict(session, False, *hurdle)
        assigner, job_id = self._assigner, node.job_id
        code, why = self._busy(node, session, view, now)
        if job_id not in assigner.pool:
            return _Verdict(session, True, code or "next", why or "could run it")
        slot, averages = assigner.slot_of(session), assigner.averages(now)
        load = assigner.load_on(session.worker, now)
        told = explain(assigner.policy, assigner.pool, slot, job_id, now, averages, load=load)
        assert told is not None
        outranked_by = None
        if not code:
            code, why = self._ranked(node, session, told.total, told.vetoes, now)
        if code == "next" and not counts:
            code, why = "outranked", "in its turn; who comes before it was not counted"
        elif code in ("next", "all_full") and counts:
            outranked_by = outranking(
                assigner.policy, assigner.pool, slot, job_id, now, averages, load=load
            )
            if code == "next" and outranked_by:
                code, why = "outranked", f"{outranked_by} other jobs come first"
        return _Verdict(
            session, True, code, why, told.scores, told.total, told.vetoes, outranked_by
        )

    def _last_request(self, worker: str, kind: m.Kind, now: float) -> dict[str, Any] | None:
        """The worker's last request, if it was left unanswered."""
        unanswered = self._assigner.unanswered(worker, kind)
        if unanswered is None:
            return None
        asked_at, decision = unanswered
        return {
            "secs_ago": round(now - asked_at, 3),
            "candidates": decision.candidates,
            "best": _totals(decision.best),
        }

    def _busy(self, node: Node, session: Session, view: WorkerView, now: float) -> tuple[str, str]:
        if view.draining:
            by = f"drained: {session.cordon}" if session.cordon is not None else "it is draining"
            return "drained", by
        used = self._assigner.open_builds(session.worker)
        if node.cls.kind == "build" and used >= view.max_builds:
            return "all_full", f"all {view.max_builds} slots are taken"
        if node.cluster is not None:
            is_free = self._assigner.is_free(session, node.cls.kind, now)
            return "cluster", "has an idle slot" if is_free else "has no idle slot"
        if (session.worker, node.cls.kind) in self._assigner.kept:
            return "cluster", "its seat is kept for a cluster"
        return "", ""

    def _ranked(
        self, node: Node, session: Session, total: float, vetoes: Sequence[str], now: float
    ) -> tuple[str, str]:
        until = self._assigner.declines_until(session.worker, node.job_id, now)
        if until is not None:
            return "declined", f"it declined the job; asked again in {math.ceil(until - now)} s"
        for veto in vetoes:
            code = _VETOES.get(veto, "vetoed")
            if code == "unscored":
                return code, "it has not reported yet what it lacks of the job"
            if code == "held_memory":
                return code, "its running builds were promised the memory that the job needs"
            return code, f"the rule {veto} vetoes it"
        if total < 0:
            return "below_floor", f"its total {total:g} is below 0"
        return "next", "the best job for it: assigned at its next request"

    def _reason(self, cls: JobClass, verdicts: Sequence[_Verdict], now: float) -> dict[str, Any]:
        needs = _needs(cls)
        if not verdicts:
            return _reason("no_worker", f"no worker is connected{needs}{self._hint(cls, now)}")
        able = [v for v in verdicts if v.eligible]
        if not able:
            code = max((v.code for v in verdicts), key=_HURDLES.index)
            reached = [v for v in verdicts if v.code == code]
            return _reason(code, _nobody(code, cls, reached) + self._hint(cls, now))
        nearest = min(able, key=_distance)
        same = [v for v in able if v.code == nearest.code]
        where = nearest.session.worker
        if len(same) > 1:
            where += f" and {len(same) - 1} more"
        if nearest.code == "all_full":
            return _reason("all_full", f"all workers that could run it are full ({where})")
        return _reason(nearest.code, f"{where}: {nearest.why}")

    def _hint(self, cls: JobClass, now: float) -> str:
        """Whether somebody who is away could."""
        able = [a for a in self._away(cls, now) if a["eligible"]]
        if not able:
            return "; none that was here before could run it"
        first = able[0]
        return f"; {first['worker']} could, last seen {math.ceil(first['last_seen_secs'])} s ago"

    def _away(self, cls: JobClass, now: float) -> list[dict[str, Any]]:
        away = []
        for worker, known in list(self._roster.away().items()):
            is_able = eligible(cls, known.view)
            hurdle = _hurdle(cls, known.view)
            away.append(
                {
                    "worker": worker,
                    "name": known.name,
                    "last_seen_secs": round(max(0.0, now - known.last_seen), 3),
                    "eligible": is_able,
                    "why_not": "not connected" if hurdle is None else hurdle[1],
                }
            )
        away.sort(key=lambda a: not a["eligible"])
        return away[:MAX_NAMED]


def _distance(verdict: _Verdict) -> tuple[int, float]:
    """How far a worker is from running the job."""
    before = math.inf if verdict.outranked_by is None else verdict.outranked_by
    return _NEAREST.index(verdict.code), before


def _hurdle(cls: JobClass, view: WorkerView) -> tuple[str, str] | None:
    """The first reason why a worker may not run jobs of the class; None = it may."""
    if cls.kind == "eval":
        if not view.can_eval:
            return "wrong_kind", "takes no evaluations"
    elif not view.can_build:
        return "wrong_kind", "takes no builds"
    elif not view.has_capabilities:
        return "no_system", "has not said yet what it can build"
    elif cls.system != "builtin" and cls.system not in view.architectures:
        return "no_system", f"does not build for {cls.system}"
    elif cls.features - view.features:
        missing = ", ".join(sorted(cls.features - view.features))
        return "no_feature", f"missing feature: {missing}"
    if view.projects is not None and cls.project not in view.projects:
        return "not_authorized", f"not authorized for project {cls.project}"
    return None


def _nobody(code: str, cls: JobClass, reached: Sequence[_Verdict]) -> str:
    match code:
        case "wrong_kind":
            what = "evaluations" if cls.kind == "eval" else "builds"
            return f"no connected worker takes {what}"
        case "no_system":
            return f"no connected worker builds for {cls.system}"
        case "no_feature":
            lacking = [cls.features - v.session.view().features for v in reached]
            common = frozenset.intersection(*map(frozenset, lacking)) or lacking[0]
            return (
                f"no connected worker for {cls.system} has the "
                f"feature{'s' * (len(common) > 1)} {', '.join(sorted(common))}"
            )
        case _:
            return f"no connected worker that could run it is authorized for {cls.project}"


def _needs(cls: JobClass) -> str:
    if cls.kind == "eval":
        return "; it needs one that takes evaluations"
    features = f" with {', '.join(sorted(cls.features))}" if cls.features else ""
    return f"; it needs one for {cls.system}{features}"


def _reason(code: str, text: str) -> dict[str, Any]:
    return {"code": code, "text": text}


def _head(job_id: str, kind: str, name: str, status: str) -> dict[str, Any]:
    return {"job_id": job_id, "kind": kind, "name": name, "status": status}


def _decisions(claims: Sequence[PastClaim]) -> list[dict[str, Any]]:
    return [_decision(claim) for claim in claims[-MAX_NAMED:]]


def _decision(past: PastClaim) -> dict[str, Any]:
    score = {} if past.score is None else decode_value(past.score)
    missing = score.get("missing")
    return {
        "assignment_id": past.claim.assignment_id,
        "worker": past.claim.worker,
        "claimed_at": _iso(past.claim.claimed_at),
        "closed_at": None if past.closed_at is None else _iso(past.closed_at),
        "outcome": past.outcome,
        "error": past.error,
        "total": score.get("total"),
        "rules": score.get("rules", {}),
        "missing_nar_size": missing[0] if missing else None,
        "missing_count": missing[1] if missing else None,
        "rejected": _totals(score.get("rejected", ())),
    }


def _totals(ranking: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"job_id": job_id, "total": total} for job_id, total in ranking]


def _iso(wall: float) -> str:
    return datetime.fromtimestamp(wall, UTC).isoformat(timespec="milliseconds")
