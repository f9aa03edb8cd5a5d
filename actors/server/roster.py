"""Who was here: workers with what they can do and when they were seen last, across restarts.

Only explanations read it: a job that nobody who is here can run may wait for somebody who is away.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from actors.ledger.records import SeenWorker, SeeWorker
from actors.server.effects import Effect, Record
from actors.server.model import WorkerView
from actors.server.sessions import Session, SessionTable
from transport.codec import decode_value, encode_value

REFRESH_SECS = 60.0
MAX_AWAY = 1_000
"""Workers remembered; beyond it those seen longest ago are forgotten here (not in the ledger)."""


class Away(Struct, frozen=True):
    """A worker as it was when it was seen last."""

    view: WorkerView
    name: str
    last_seen: float
    """Monotonic seconds."""


class Roster:
    """Remembers every worker that announced what it can do."""

    def __init__(self, sessions: SessionTable, seen: Iterable[SeenWorker] = ()) -> None:
        self._sessions = sessions
        self._known = {
            s.worker: Away(_view(s.worker, decode_value(s.capabilities)), s.name, s.last_seen)
            for s in reversed(tuple(seen))
        }
        self._refreshed_at = 0.0

    def away(self) -> dict[str, Away]:
        """By id: workers that are not connected, those seen last first."""
        here = self._sessions.by_worker
        away = {worker: known for worker, known in self._known.items() if worker not in here}
        return dict(sorted(away.items(), key=lambda item: -item[1].last_seen))

    def announced(self, session: Session, now: float) -> list[Effect]:
        """A worker said what it can do."""
        view = session.view()
        before = self._known.get(session.worker)
        told = _capabilities(view)
        if (
            before is not None
            and _capabilities(before.view) == told
            and before.name == session.name
            and now - before.last_seen < REFRESH_SECS
        ):
            return []  # the ledger need not hear of it each time
        self._remember(view, session.name, now)
        capabilities = encode_value(told)
        return [Record(SeeWorker(session.worker, now, session.name, capabilities))]

    def left(self, session: Session) -> list[Effect]:
        """A session is over."""
        if session.announced is None:
            return []
        self._remember(session.view(), session.name, session.last_seen)
        return [Record(SeeWorker(session.worker, session.last_seen, session.name))]

    def refresh(self, now: float) -> list[Effect]:
        """Once a minute: who is here was seen, should this server end without notice."""
        if now - self._refreshed_at < REFRESH_SECS:
            return []
        self._refreshed_at = now
        return [
            Record(SeeWorker(session.worker, session.last_seen, session.name))
            for session in self._sessions
            if session.announced is not None
        ]

    def _remember(self, view: WorkerView, name: str, at: float) -> None:
        self._known.pop(view.worker, None)
        self._known[view.worker] = Away(view, name, at)
        if len(self._known) > MAX_AWAY:
            del self._known[next(iter(self._known))]


def _capabilities(view: WorkerView) -> dict[str, Any]:
    return {
        "fetch": view.can_fetch,
        "eval": view.can_eval,
        "build": view.can_build,
        "architectures": sorted(view.architectures),
        "features": sorted(view.features),
        "projects": None if view.projects is None else sorted(view.projects),
        "max_builds": view.max_builds,
    }


def _view(worker: str, told: dict[str, Any]) -> WorkerView:
    projects = told["projects"]
    return WorkerView(
        worker=worker,
        can_fetch=told["fetch"],
        can_eval=told["eval"],
        can_build=told["build"],
        has_capabilities=True,
        architectures=frozenset(told["architectures"]),
        features=frozenset(told["features"]),
        projects=None if projects is None else frozenset(projects),
        max_builds=told["max_builds"],
    )
