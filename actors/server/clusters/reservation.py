"""Seats that are kept for a cluster which single jobs starve."""

from __future__ import annotations

from dataclasses import dataclass

from transport.messages import Kind


@dataclass(slots=True, eq=False)
class Reservation:
    """The one reservation there is at a time: its workers finish what they run and get no new
    single job of the kind."""

    cluster_id: str
    seats: dict[str, tuple[str, Kind]]
    """Worker and kind by job id."""
    made_at: float
    until: float

    @property
    def kept(self) -> set[tuple[str, Kind]]:
        return set(self.seats.values())

    def has_worker(self, worker: str) -> bool:
        return any(worker == held for held, _ in self.seats.values())
