"""The gateway core: frames in, typed messages out, garbage answered where it came from.

A frame is one message. What cannot be read is answered and counted, has no other effect, and
never touches the frames behind it or another peer.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from actors.server.effects import Tell
from actors.server.sessions import Session, SessionTable
from transport import messages as m
from transport.codec import Decoder, Malformed
from transport.interface import Incoming

MAX_COMMAND_PEERS = 10_000
"""Connections of commands that are remembered; beyond it the longest silent is forgotten."""


class Received(Struct, frozen=True):
    """A message from a connection, with its session if it has one."""

    peer: bytes
    session: Session | None
    message: m.Message
    user_id: str | None


class Gateway:
    """Reads what peers send. `malformed` counts the frames that could not be read."""

    def __init__(self, sessions: SessionTable, *, chaos: bool = False) -> None:
        self._sessions = sessions
        self.commands = m.COMMAND_MESSAGES + (m.CHAOS_MESSAGES if chaos else ())
        """What a client may send."""
        self._decoder = Decoder(m.WORKER_MESSAGES + self.commands)
        self.malformed = 0

    def take(self, incoming: Incoming, now: float) -> Iterator[Received | Tell]:
        """The messages of one ZeroMQ message, in order. Each is looked at only when the ones
        before it were handled, since they may open or end the session."""
        peer = incoming.peer
        for position, frame in enumerate(incoming.frames):
            session = self._sessions.by_peer.get(peer)
            if session is not None:
                session.last_seen = now
            if position >= m.MAX_FRAMES:
                self.malformed += 1
                yield Tell(peer, m.Error(code=400, message="more than 256 frames in one message"))
                return
            greeted = session is not None or peer in self._sessions.commands
            if not greeted and len(frame) > m.MAX_HANDSHAKE_FRAME_BYTES:
                self.malformed += 1
                yield Tell(peer, m.Reject(code=400, reason="frame too large before the handshake"))
                return
            try:
                message = self._decoder.decode(frame)
            except Malformed as error:
                self.malformed += 1
                yield Tell(peer, _complaint(str(error), greeted=greeted))
                continue
            if session is None and isinstance(message, m.CmdHello):
                yield Tell(peer, self._greet(peer, message, now))
            elif session is None and isinstance(message, self.commands) and not greeted:
                yield Tell(peer, m.Reject(code=400, reason="no session: say CmdHello first"))
            else:
                yield Received(peer, session, message, incoming.user_id)

    def _greet(self, peer: bytes, hello: m.CmdHello, now: float) -> m.Message:
        ours, theirs = m.PROTOCOL_VERSIONS, hello.versions
        if min(ours[1], theirs[1]) < max(ours[0], theirs[0]):
            return m.Reject(code=400, reason=no_shared_version(theirs))
        commands = self._sessions.commands
        if len(commands) >= MAX_COMMAND_PEERS:
            del commands[min(commands, key=commands.__getitem__)]
        commands[peer] = now
        return m.CmdWelcome(version=min(ours[1], theirs[1]), server="headrace")


def no_shared_version(theirs: tuple[int, int]) -> str:
    """The reason of a `Reject` 400 that names both ranges."""
    ours = m.PROTOCOL_VERSIONS
    return f"no shared protocol version: ours {ours[0]}..={ours[1]}, peer {theirs[0]}..={theirs[1]}"


def _complaint(text: str, *, greeted: bool) -> m.Message:
    if greeted:
        return m.Error(code=400, message=text)
    return m.Reject(code=400, reason=text)
