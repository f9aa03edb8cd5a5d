"""The rules that look at what machines and lines are busy with."""

from __future__ import annotations

import numpy as np

from actors.server.scoring.columns import Bools, Columns, Extremes, Floats, Situation
from actors.server.scoring.rules import NeverVetoes

DOWNLOAD_SLOTS, UPLOAD_SLOTS = 16, 8
LARGE_OUTPUT_BYTES = 2**20
BUSY_PCT, BUSY_BUILTIN_PCT = 80.0, 90.0
SCARCE_MEMORY = 0.10
SATURATED = -8600.0
RESERVED = -300.0
NO_SLOT = -4000.0
WHOLE_SHARE = -500.0


class ReserveFetchWorkers(NeverVetoes):
    name = "reserve-fetch-workers"
    description = "keeps workers that can fetch for evaluations that need it, the busier they are"
    weight = "-300 to 0"

    def score(self, view: Columns) -> Floats | float:
        if view.kind == "build" or not view.worker.can_fetch or not view.averages.fetch_workers:
            return 0.0
        averages = view.averages
        penalty = RESERVED * (1 - averages.idle_fetch_workers / averages.fetch_workers)
        return np.where(view.needs_fetch, 0.0, penalty)

    def best(self, extremes: Extremes) -> float:  # noqa: ARG002 - the rule's form
        return 0.0

    def key(self, request: Situation) -> object:
        if request.kind == "build":
            return None
        averages = request.averages
        return request.worker.can_fetch, averages.fetch_workers, averages.idle_fetch_workers


class TransferLimit(NeverVetoes):
    name = "transfer-limit"
    description = "puts off builds with much to fetch or upload while all such slots are taken"
    weight = "-4000 or 0"

    def score(self, view: Columns) -> Floats | float:
        averages = view.averages
        if view.kind == "eval":
            return 0.0
        limited: Bools | None = None
        if averages.downloads >= DOWNLOAD_SLOTS:
            limited = view.missing_nar_size > (averages.missing_nar_size or 0.0)
            if view.outputs_present is not None:
                limited &= ~view.outputs_present
        if averages.uploads >= UPLOAD_SLOTS:
            large = view.in_profile(view.request.profiles.output_size > LARGE_OUTPUT_BYTES)
            if large is not None:
                limited = large if limited is None else limited | large
        return 0.0 if limited is None else np.multiply(limited, NO_SLOT, dtype=np.float64)

    def best(self, extremes: Extremes) -> float:  # noqa: ARG002 - the rule's form
        return 0.0

    def key(self, request: Situation) -> object:
        averages = request.averages
        return (
            averages.missing_nar_size if averages.downloads >= DOWNLOAD_SLOTS else None,
            averages.downloads >= DOWNLOAD_SLOTS,
            averages.uploads >= UPLOAD_SLOTS and request.profiles.version,
        )


class ResourceSaturation:
    name = "resource-saturation"
    description = "spares busy machines, and keeps builds from memory that is not there"
    weight = "-17200, -8600 or 0; veto"
    holds_memory = True
    """The worker's oldest held build has its memory kept free."""

    def score(self, view: Columns) -> Floats | float:
        if view.kind == "eval" or not view.worker.has_metrics:
            return 0.0
        busy = _busy(view.request)
        score = busy if isinstance(busy, float) else view.of_profile(busy)
        unfit = view.in_profile(view.request.unfit)
        if unfit is None:
            return score
        if view.held is not None:
            unfit &= ~view.held
        return score + np.multiply(unfit, SATURATED, dtype=np.float64)

    def veto(self, view: Columns) -> Bools | None:
        if view.kind == "eval" or not view.worker.has_metrics:
            return None
        return view.held

    def best(self, extremes: Extremes) -> float:
        request = extremes.request
        if request.kind == "eval" or not request.worker.has_metrics:
            return 0.0
        busy = _busy(request)
        return busy if isinstance(busy, float) else float(busy.max())

    def key(self, request: Situation) -> object:
        if request.kind == "eval" or not request.worker.has_metrics:
            return None
        busy = _busy(request)
        if not isinstance(busy, float) or request.unfit is not None:
            return object()
        return busy if request.crowds_out is None else object()


def _busy(request: Situation) -> Floats | float:
    """By profile: what the worker's own load costs a build."""
    worker = request.worker
    free, total, cpu = worker.ram_free_mb, worker.ram_total_mb, worker.cpu_usage_pct
    if free is not None and total and free / total <= SCARCE_MEMORY:
        return SATURATED
    if cpu is None or cpu < BUSY_PCT:
        return 0.0
    if cpu >= BUSY_BUILTIN_PCT:
        return SATURATED
    return np.where(request.profiles.builtin, 0.0, SATURATED)


class FairShare(NeverVetoes):
    name = "fair-share"
    description = "-500 times the share of the running work that the job's project holds"
    weight = "-500 to 0; off by default"

    def score(self, view: Columns) -> Floats | float:
        shares = view.request.project_shares
        return 0.0 if shares is None else view.of_class(shares) * WHOLE_SHARE

    def best(self, extremes: Extremes) -> float:
        shares = extremes.request.project_shares
        return 0.0 if shares is None else float(shares.min()) * WHOLE_SHARE

    def key(self, request: Situation) -> object:
        shares = request.project_shares
        return None if shares is None else shares.tobytes()
