"""Whether all is well: asks every actor for a sign of life.

The answer is never better than the truth. It comes from a task of its own, after the request
went through the socket, dispatch, the ledger's thread and back; a server that cannot do that much
does not answer at all, and the command says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from actors.hangs import Inlet
from actors.ledger.port import Waiting
from actors.server.effects import HealthRequest
from actors.server.outbox import Outbox
from actors.supervision import Child
from transport import messages as m
from transport.codec import encode

ECHO_SECS, POLL_SECS = 3.0, 0.02
MAX_WAITING = 1_000


class Health:
    """Answers requests; those that come while it looks are answered by the next look."""

    def __init__(
        self,
        actors: Sequence[Child],
        is_up: Callable[[str], bool],
        outbox: Outbox,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._actors = actors
        self._is_up = is_up
        self._outbox = outbox
        self._is_stopping = is_stopping
        self._waiting: Waiting[HealthRequest] = Waiting(MAX_WAITING)

    @property
    def queue(self) -> int:
        """Requests that wait for an answer."""
        return len(self._waiting)

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        """What it takes from."""
        return (self._waiting.inlet("requests"),)

    def put(self, request: HealthRequest) -> None:
        """To be answered soon; beyond 1 000 a request is dropped and its client gives up."""
        self._waiting.put(request)

    async def run(self) -> None:
        """Serves the queue until cancelled."""
        while True:
            await self._waiting.head()
            asked = list(self._waiting.items)
            problems = await self._problems()
            now = trio.current_time()
            for request in asked:
                ledger = [f"the ledger takes no writes: {request.ledger}"] if request.ledger else []
                reply = m.CmdHealthReply(request=request.request, problems=ledger + problems)
                self._outbox.send(request.peer, [encode(reply)], now)
                self._waiting.done()

    async def _problems(self) -> list[str]:
        silent = await self._silent()
        problems = [
            f"actor {actor.name} is down" for actor in self._actors if not self._is_up(actor.name)
        ]
        problems += [
            f"actor {inlet.counted_as or actor.name} takes nothing from its {inlet.name}"
            for actor, inlet in silent
            if self._is_up(actor.name)
        ]
        if self._is_stopping():
            problems.append("the server is stopping")
        return problems

    async def _silent(self) -> list[tuple[Child, Inlet]]:
        """The inlets from which nothing was taken within `ECHO_SECS`."""
        before = [(a, i, i.taken()) for a in self._actors for i in a.inlets]
        for _, inlet, _ in before:
            inlet.nudge()
        with trio.move_on_after(ECHO_SECS):
            while True:
                before = [
                    (actor, inlet, taken)
                    for actor, inlet, taken in before
                    if inlet.taken() == taken and not inlet.is_excused()
                ]
                if not before:
                    break
                await trio.sleep(POLL_SECS)
        return [(actor, inlet) for actor, inlet, _ in before]
