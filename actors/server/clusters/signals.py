"""Who hears what a member of a cluster says. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from actors.server.claims import Claim
from actors.server.clusters.model import Attempt
from transport import messages as m


def relayed(
    attempt: Attempt | None, session: str, signal: m.ClusterSignal
) -> Iterator[tuple[Claim, m.ClusterSignal]]:
    """The claims whose workers hear a signal of a session's, with what they hear.

    A member of a started attempt speaks to another one, or to all others, as long as neither has
    ended; anything else is dropped.
    """
    if attempt is None or attempt.phase != "started":
        return
    running = [seat for job, seat in attempt.seats.items() if job not in attempt.results]
    sender = next((seat for seat in running if seat.claim.session == session), None)
    if sender is None:
        return
    name = m.MemberRef(sender.member.role, sender.member.index)
    heard = m.ClusterSignal(signal.attempt, signal.payload, sender=name)
    for seat in running:
        is_meant = signal.to in (None, m.MemberRef(seat.member.role, seat.member.index))
        if seat is not sender and is_meant:
            yield seat.claim, heard
