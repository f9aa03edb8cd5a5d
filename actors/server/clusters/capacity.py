"""The workers of a moment as seats: columns for `placement`.

Built once per look; what it reads (sessions, idle slots, the pool's rows) must not change while
it is in use, but for seats that are taken from it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from actors.ledger.records import MemberRecord
from actors.server.assigner import Assigner
from actors.server.clusters.placement import Seats
from actors.server.sessions import Session
from transport.messages import Kind

KINDS: tuple[Kind, Kind] = ("build", "eval")


class Capacity:
    """Workers as columns, in the order of their ids.

    `only_idle` leaves out workers without a free idle slot; `taken` are seats (worker, kind) that
    are reserved for somebody else.
    """

    def __init__(
        self,
        assigner: Assigner,
        sessions: Collection[Session],
        now: float,
        *,
        only_idle: bool,
        taken: Collection[tuple[str, Kind]] = (),
    ) -> None:
        self._pool = assigner.pool
        rows = []
        for session in sorted(sessions, key=lambda s: s.worker):
            free = [assigner.is_free(session, kind, now) for kind in KINDS]
            usable = [free[i] and (session.worker, kind) not in taken
                      for i, kind in enumerate(KINDS)]  # fmt: skip
            if not only_idle:
                view = assigner.view_of(session)
                usable = [
                    has_slots and not view.draining and (session.worker, kind) not in taken
                    for kind, has_slots in zip(KINDS, (view.max_builds > 0, True), strict=True)
                ]
            if any(usable):
                rows.append((session, usable, free))
        self.workers: list[Session] = [row[0] for row in rows]
        self.zones: list[str | None] = [zone_of(session) for session in self.workers]
        self._slots = np.array([assigner.slot_of(s) for s in self.workers], np.intp)
        self._usable = _by_kind([row[1] for row in rows])
        self._free = _by_kind([row[2] for row in rows])
        self._open = np.ones(len(rows), np.bool_)

    @property
    def room(self) -> int:
        """How many workers are left."""
        return int(np.count_nonzero(self._open))

    def kind_of(self, member: MemberRecord) -> Kind:
        """Of a member that is pending."""
        entry = self._pool.get(member.job_id)
        assert entry is not None
        return entry.cls.kind

    def seats(self, members: Sequence[MemberRecord]) -> Seats:
        """What is known of each pending member on each worker."""
        shape = len(members), len(self.workers)
        seats = Seats(np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape))
        for row, member in enumerate(members):
            candidate, reported, missing = self._pool.seats(member.job_id, self._slots)
            seats.allowed[row] = candidate & self._usable[self.kind_of(member)] & self._open
            if member.pin is not None:
                seats.allowed[row] &= np.array([s.worker == member.pin for s in self.workers], bool)
            seats.reported[row] = reported
            seats.missing_bytes[row] = missing
        return seats

    def idle(self, members: Sequence[MemberRecord]) -> NDArray[np.bool_]:
        """Whether each worker has an idle slot of each member's kind."""
        shape = len(members), len(self.workers)
        rows = [self._free[self.kind_of(member)] for member in members]
        return np.array(rows, np.bool_).reshape(shape)

    def take(self, columns: Sequence[int]) -> None:
        """These workers are seated for a cluster: no other one is offered them."""
        self._open[list(columns)] = False


def zone_of(session: Session) -> str | None:
    """A worker's zone; workers without one form one zone."""
    return session.announced.zone if session.announced is not None else None


def _by_kind(rows: Sequence[Sequence[bool]]) -> dict[Kind, NDArray[np.bool_]]:
    table = np.array(rows, np.bool_).reshape(len(rows), len(KINDS))
    return {kind: table[:, i] for i, kind in enumerate(KINDS)}
