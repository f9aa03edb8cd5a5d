"""Memory that running builds were promised, and what is left of a machine for the next one.

Several builds are assigned between two heartbeats, so what is measured lags behind what was given
away. Sizes are MiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from msgspec import Struct

from actors.server.claims import Claim
from actors.server.model import WorkerView

MARGIN = 1.1
"""A build needs its predicted peak times this."""


class Reservation(Struct, frozen=True):
    """The one held build of a worker, whose need is kept free."""

    job_id: str
    peak_mb: float
    ready_at: float

    @property
    def need_mb(self) -> float:
        return self.peak_mb * MARGIN


class Load(Struct, frozen=True):
    """What a worker is busy with."""

    open_builds: int = 0
    promised_mb: float = 0.0
    """The larger of predicted and observed peak, over its running builds."""
    used_mb: float = 0.0
    """Observed peaks, the part of it that the machine's free memory lacks already."""
    reserved: Reservation | None = None

    def room_mb(self, worker: WorkerView) -> float:
        """What one more build may need now; inf when nothing is known of the machine."""
        room = math.inf
        if not worker.has_metrics:
            return room
        if worker.ram_free_mb is not None:
            room = worker.ram_free_mb - (self.promised_mb - self.used_mb)
        if worker.ram_total_mb is not None:
            room = min(room, worker.ram_total_mb - self.promised_mb)
        return room

    def room_later_mb(self, worker: WorkerView) -> float:
        """What one may need once all running builds have ended."""
        room = math.inf
        if worker.ram_free_mb is not None:
            room = worker.ram_free_mb + self.used_mb
        if worker.ram_total_mb is not None:
            room = min(room, worker.ram_total_mb)
        return room


def load_of(claims: Iterable[Claim], reserved: Reservation | None) -> Load:
    """The load that a worker's open claims are."""
    builds, promised, used = 0, 0.0, 0.0
    for claim in claims:
        if claim.kind == "build":
            builds += 1
            observed = claim.peak_ram_mb or 0
            promised += max(claim.predicted_mb, observed)
            used += observed
    return Load(builds, promised, used, reserved)
