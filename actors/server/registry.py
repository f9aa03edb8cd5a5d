"""The registry core: who is here, on which connection, and what may it do.

Rules of the file:

- A connection is unknown, challenged, waiting behind a probe, or a session; nothing else.
- A worker id has at most one session. A second connection with the id makes the first
  answer a `Ping` within `PROBE_SECS`; if it does, the newcomer is refused (496), else the
  first is lost and the newcomer goes on.
- The core never raises for what a peer sends. It returns effects, to be performed in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from msgspec import Struct
from msgspec.structs import replace

from actors.server.authorization import Registration
from actors.server.effects import Cause, Changed, Closed, Effect, Opened, Revoked, Tell
from actors.server.sessions import Session, SessionTable
from transport import messages as m

PROBE_SECS = 2.0
CHALLENGE_SECS = 10.0
MAX_CHALLENGES = 1_000
"""Open handshakes at a time; beyond it the oldest is given up."""


class _Newcomer(Struct):
    """A connection between `InitConnection` and its session."""

    peer: bytes
    init: m.InitConnection
    user_id: str | None
    version: int
    capabilities: m.Capabilities
    deadline: float
    projects: frozenset[str] | None = None
    verified: dict[str, str] = {}
    failed: tuple[m.FailedPeer, ...] = ()
    nonce: int = 0


class Registry:
    """See the rules above. `sessions` is the supervisor's table; only this core writes it."""

    def __init__(
        self,
        sessions: SessionTable,
        registrations: Mapping[str, Registration] | None,
        new_session_id: Callable[[], str],
        cordons: Mapping[str, str],
        max_workers: int = 0,
    ) -> None:
        self.sessions = sessions
        self.registrations = registrations
        self.cordons = dict(cordons)
        for session in sessions:
            # A drain that was not written when dispatch failed was not confirmed either.
            session.cordon = self.cordons.get(session.worker)
        self.accepting = True
        self._new_session_id = new_session_id
        self._max_workers = max_workers
        self._challenges: dict[bytes, _Newcomer] = {}
        self._probes: dict[str, _Newcomer] = {}
        self._nonce = 0

    @property
    def deadline(self) -> float:
        """When `expire` has something to do; inf when never."""
        waiting = (*self._challenges.values(), *self._probes.values())
        return min((n.deadline for n in waiting), default=math.inf)

    # -- handshake ---------------------------------------------------------------------

    def init(
        self, peer: bytes, message: m.InitConnection, user_id: str | None, now: float
    ) -> list[Effect]:
        """The opening message of a connection without a session."""
        if self.in_handshake(peer):
            self.abandon_handshake(peer)
            return _reject(peer, 400, "InitConnection twice in one handshake")
        ours, theirs = m.PROTOCOL_VERSIONS, message.versions
        version = min(ours[1], theirs[1])
        if version < max(ours[0], theirs[0]):
            reason = (
                f"no shared protocol version: ours {ours[0]}..={ours[1]}, "
                f"peer {theirs[0]}..={theirs[1]}"
            )
            return _reject(peer, 400, reason)
        if not self.accepting:
            return _reject(peer, 403, "the server is stopping and not accepting connections")
        newcomer = _Newcomer(
            peer, message, user_id, version, message.capabilities, now + CHALLENGE_SECS
        )
        if self.registrations is None:
            return self._authorized(newcomer, now)
        registration = _valid(self.registrations.get(message.id), user_id)
        if isinstance(registration, str):
            return _reject(peer, 403, registration)
        if len(self._challenges) >= MAX_CHALLENGES:
            del self._challenges[next(iter(self._challenges))]
        self._challenges[peer] = newcomer
        return [Tell(peer, m.AuthChallenge(peers=sorted(registration.projects)))]

    def auth_response(self, peer: bytes, message: m.AuthResponse, now: float) -> list[Effect]:
        """The answer to our challenge, in the handshake or in a reauthentication."""
        session = self.sessions.by_peer.get(peer)
        if session is not None:
            return self._reauthorized(session, message)
        newcomer = self._challenges.pop(peer, None)
        if newcomer is None:
            return _reject(peer, 400, "no session")
        # The file may have changed since the challenge.
        found = (self.registrations or {}).get(newcomer.init.id)
        registration = _valid(found, newcomer.user_id)
        if isinstance(registration, str):
            return _reject(peer, 403, registration)
        newcomer.capabilities = registration.allows(newcomer.init.capabilities)
        good, failed = registration.verify(message.tokens)
        if not good:
            return _reject(peer, 401, "no valid peer tokens provided")
        newcomer.projects, newcomer.failed = good, tuple(failed)
        newcomer.verified = {p: registration.projects[p] for p in good}
        return self._authorized(newcomer, now)

    def abandon_handshake(self, peer: bytes) -> None:
        """The connection broke the handshake's rules or is gone."""
        self._challenges.pop(peer, None)
        for worker, newcomer in list(self._probes.items()):
            if newcomer.peer == peer:
                del self._probes[worker]

    def in_handshake(self, peer: bytes) -> bool:
        """Whether the connection opened a handshake that has not ended."""
        return peer in self._challenges or any(n.peer == peer for n in self._probes.values())

    def _authorized(self, newcomer: _Newcomer, now: float) -> list[Effect]:
        older = self.sessions.by_worker.get(newcomer.init.id)
        if older is None:
            if self._max_workers and len(self.sessions) >= self._max_workers:
                reason = f"the server takes no more than {self._max_workers} workers"
                return _reject(newcomer.peer, 403, reason)
            return self._open(newcomer, now)
        if newcomer.init.id in self._probes:
            return _reject(newcomer.peer, 496, "worker already connected")
        self._nonce += 1
        newcomer.nonce = self._nonce
        newcomer.deadline = now + PROBE_SECS
        self._probes[newcomer.init.id] = newcomer
        return [Tell(older.peer, m.Ping(nonce=newcomer.nonce))]

    def _open(self, newcomer: _Newcomer, now: float) -> list[Effect]:
        init = newcomer.init
        session = Session(
            id=self._new_session_id(),
            peer=newcomer.peer,
            worker=init.id,
            name=init.name or init.id,
            agent=init.agent or "",
            asked=init.capabilities,
            capabilities=newcomer.capabilities,
            projects=newcomer.projects,
            verified=dict(newcomer.verified),
            last_seen=now,
            cordon=self.cordons.get(init.id),
            user_id=newcomer.user_id,
        )
        self.sessions.add(session)
        return [Opened(session, tuple(init.running or ()), newcomer.version, newcomer.failed)]

    # -- inside a session ----------------------------------------------------------------

    def pong(self, session: Session, message: m.Pong) -> list[Effect]:
        """The older session of a probed id is alive: the newcomer is refused."""
        newcomer = self._probes.get(session.worker)
        if newcomer is None or newcomer.nonce != message.nonce:
            return []
        del self._probes[session.worker]
        return _reject(newcomer.peer, 496, "worker already connected")

    def reauth(self, session: Session) -> list[Effect]:
        """The worker's peers file changed: challenge it again."""
        registration = (self.registrations or {}).get(session.worker)
        if registration is None:
            return [Tell(session.peer, _auth_update(session, ()))]
        return [Tell(session.peer, m.AuthChallenge(peers=sorted(registration.projects)))]

    def _reauthorized(self, session: Session, message: m.AuthResponse) -> list[Effect]:
        registration = (self.registrations or {}).get(session.worker)
        if registration is None or session.projects is None:
            return [Tell(session.peer, _auth_update(session, ()))]
        good, failed = registration.verify(message.tokens)
        session.projects |= good
        session.verified.update({p: registration.projects[p] for p in good})
        failed = [f for f in failed if f.peer not in session.projects]
        return [Tell(session.peer, _auth_update(session, failed)), Changed(session)]

    def announced(self, session: Session, message: m.WorkerCapabilities) -> list[Effect]:
        """Capabilities replace all fields of the earlier ones."""
        session.announced = replace(
            message, zone=message.zone or None, endpoint=message.endpoint or None
        )
        return [Changed(session)]

    def draining(self, session: Session) -> list[Effect]:
        """The worker takes no new job until it opens its next session."""
        if session.draining:
            return []
        session.draining = True
        return [Changed(session)]

    def cordon(self, worker: str, reason: str | None) -> list[Effect]:
        """An operator's drain (a reason) or undrain (none)."""
        if reason is None:
            self.cordons.pop(worker, None)
        else:
            self.cordons[worker] = reason
        session = self.sessions.by_worker.get(worker)
        if session is None:
            return []
        session.cordon = reason
        return [Changed(session)]

    # -- the end of a session --------------------------------------------------------------

    def close(self, session: Session, cause: Cause, now: float) -> list[Effect]:
        """Ends a session; a newcomer that waits for its worker id takes its place, unless the
        worker lost its rights: it must ask for them anew."""
        self.sessions.remove(session)
        effects: list[Effect] = [Closed(session, cause)]
        newcomer = self._probes.pop(session.worker, None)
        if newcomer is None:
            return effects
        if cause == "revoked":
            return [*effects, *_reject(newcomer.peer, 403, "the worker's rights were revoked")]
        return [*effects, *self._open(newcomer, now)]

    def expire(self, now: float) -> list[Effect]:
        """Gives up handshakes that are overdue, and sessions that a probe found dead."""
        for peer, newcomer in list(self._challenges.items()):
            if newcomer.deadline <= now:
                del self._challenges[peer]
        effects: list[Effect] = []
        for worker, newcomer in list(self._probes.items()):
            if newcomer.deadline > now:
                continue
            older = self.sessions.by_worker.get(worker)
            assert older is not None, "a probe ends with the session it probes"
            effects += [Tell(older.peer, m.Reject(code=400, reason="no session"))]
            effects += self.close(older, "lost", now)
        return effects

    def set_registrations(
        self, registrations: Mapping[str, Registration], now: float
    ) -> list[Effect]:
        """A changed registry file takes effect at once."""
        self.registrations = registrations
        effects: list[Effect] = []
        for session in self.sessions:
            effects += self._reregistered(session, registrations.get(session.worker), now)
        return effects

    def _reregistered(
        self, session: Session, found: Registration | None, now: float
    ) -> list[Effect]:
        registration = _valid(found, session.user_id)
        if isinstance(registration, str):
            return [*_reject(session.peer, 403, registration), *self.close(session, "revoked", now)]
        if session.projects is None:
            return []
        kept = {p for p, h in session.verified.items() if registration.projects.get(p) == h}
        missing = [
            m.FailedPeer(peer=p, reason="reauthenticate with its token")
            for p in sorted(registration.projects.keys() - kept)
        ]
        capabilities = registration.allows(session.asked)
        if kept == session.projects and capabilities == session.capabilities:
            return []
        if not kept:
            rejected = _reject(session.peer, 403, "no project authorizes this worker any more")
            return [*rejected, *self.close(session, "revoked", now)]
        session.projects, session.capabilities = frozenset(kept), capabilities
        session.verified = {p: session.verified[p] for p in kept}
        update = Tell(session.peer, _auth_update(session, missing))
        return [update, Changed(session), Revoked(session)]


def _valid(registration: Registration | None, key: str | None) -> Registration | str:
    """The registration of a worker whose connection has this key, or why it may not be here."""
    if registration is None:
        return "unknown worker"
    if not registration.active:
        return "worker is deactivated"
    if registration.key is not None and registration.key != key:
        return "the connection's key is not this worker's"
    return registration


def _auth_update(
    session: Session, failed: list[m.FailedPeer] | tuple[m.FailedPeer, ...]
) -> m.AuthUpdate:
    projects = ["*"] if session.projects is None else sorted(session.projects)
    return m.AuthUpdate(authorized_peers=projects, failed_peers=list(failed))


def _reject(peer: bytes, code: int, reason: str) -> list[Effect]:
    return [Tell(peer, m.Reject(code=code, reason=reason))]
