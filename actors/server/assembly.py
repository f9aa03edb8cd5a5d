"""A server put together: the world that outlives its actors, and the actors under supervision.

The one place where shells meet what they run on, so that a simulation can give them a loopback,
a virtual clock and no threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import trio

from actors.ledger.actor import run_ledger
from actors.ledger.errors import LedgerLost
from actors.ledger.port import LedgerEvent, LedgerPort, Offload
from actors.ledger.sqlite import SqliteLedger
from actors.server.authorization import Registration
from actors.server.config import ServerConfig
from actors.server.dispatch import CORES, Dispatch, blame
from actors.server.effects import PagerEvent, StopRequested
from actors.server.farm import DispatchEvent
from actors.server.health import Health
from actors.server.ids import Ids
from actors.server.logbook import Logbook
from actors.server.outbox import Outbox
from actors.server.scoring import Policy
from actors.server.sessions import SessionTable
from actors.server.shells import PagerShell, ReaperShell
from actors.server.world import INBOX_EVENTS, PAGER_BATCHES, World
from actors.supervision import Child, Supervisor
from transport import messages as m
from transport.codec import encode
from transport.interface import Router

DAY_SECS, GIB = 86_400.0, 2**30


class Server:
    """All actors of one server. `run` ends by cancellation or with `GaveUp`."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        server: str,
        epoch: str,
        policy: Policy,
        ledger: SqliteLedger,
        router: Router,
        wall_offset: Callable[[], float],
        load_registrations: Callable[[], dict[str, Registration] | None] = lambda: None,
        others_alive: Callable[[], frozenset[str]] = frozenset,
        offload: Offload = trio.to_thread.run_sync,
        version: str = "",
        end_process: Callable[[str], object] | None = None,
        ending: Callable[[], object] | None = None,
    ) -> None:
        inbox, events = trio.open_memory_channel[DispatchEvent](INBOX_EVENTS)
        to_pager, pager_events = trio.open_memory_channel[list[PagerEvent]](PAGER_BATCHES)
        self._version = version
        self._started_at = trio.current_time()
        outbox = Outbox(router)
        actors: list[Child] = []
        self._health = Health(actors, self._is_up, outbox, lambda: self.world.is_stopping)
        self.world = World(
            config=config,
            server=server,
            ids=Ids(epoch),
            policy=policy,
            router=router,
            outbox=outbox,
            sessions=SessionTable(),
            port=LedgerPort(ledger, self._deliver, wall_offset),
            logbook=Logbook(config.state_dir / "logs", self._send_log, config.log_quota * GIB),
            inbox=inbox,
            events=events,
            to_pager=to_pager,
            pager_events=pager_events,
            offload=offload,
            load_registrations=load_registrations,
            others_alive=others_alive,
            kill=self.kill,
            check_health=self._health.put,
            server_status=self._status,
        )
        self.dispatch = Dispatch(self.world)
        self.pager_shell = PagerShell(self.world)
        reaper = ReaperShell(self.world)
        port, logbook = self.world.port, self.world.logbook
        keep_secs = config.keep_finished * DAY_SECS
        run_the_ledger = functools.partial(run_ledger, port, offload, keep_secs)
        actors += [
            Child("ledger", run_the_ledger, inlets=port.inlets, fatal=(LedgerLost,)),
            Child("logbook", functools.partial(logbook.run, offload), inlets=logbook.inlets),
            Child("dispatch", self.dispatch.run, blame, inlets=self.dispatch.inlets),
            Child("pager", self.pager_shell.run, inlets=self.pager_shell.inlets),
            Child("reaper", reaper.run, inlets=reaper.inlets),
        ]
        health = Child("health", self._health.run, inlets=self._health.inlets)
        self.supervisor = Supervisor([*actors, health], end_process, ending)

    async def run(self) -> None:
        """Runs all actors."""
        await self.supervisor.run()

    def stop(self) -> None:
        """Tells every session that the server is stopping; nothing is assigned from now on."""
        self.world.is_stopping = True
        self.world.post(StopRequested())

    def kill(self, actor: str) -> bool:
        """Ends an actor at its next await, and the supervisor restarts it; false if none runs."""
        if actor in CORES:
            return self.supervisor.kill("dispatch", counted_as=actor)
        return self.supervisor.kill(actor)

    def _is_up(self, actor: str) -> bool:
        if actor == "dispatch" or actor in CORES:
            return self.supervisor.is_alive("dispatch") and self.dispatch.is_up
        is_ready = actor != "pager" or self.pager_shell.is_ready
        return is_ready and self.supervisor.is_alive(actor)

    def _deliver(self, event: LedgerEvent) -> None:
        self.world.inbox.send_nowait(event)

    def _send_log(self, peer: bytes, reply: m.CmdLogsReply) -> None:
        self.world.outbox.send(peer, [encode(reply)], trio.current_time())

    def _status(self, now: float) -> dict[str, Any]:
        world = self.world
        in_dispatch = world.events.statistics().current_buffer_used
        queues = {
            **dict.fromkeys(CORES, in_dispatch),
            "pager": world.pager_events.statistics().current_buffer_used,
            "reaper": 0,
            "ledger": world.port.queue,
            "logbook": world.logbook.queue,
            "health": self._health.queue,
        }
        restarts = self.supervisor.intensity.restarts
        return {
            "version": self._version,
            "uptime_secs": round(now - self._started_at, 3),
            **self.dispatch.counters,
            "undeliverable": world.outbox.undeliverable,
            "dropped_log_chunks": world.logbook.dropped,
            "is_stopping": world.is_stopping,
            "ledger_refuses_writes": world.port.is_failing,
            "actors": {
                name: {"restarts": restarts.get(name, 0), "queue": queue, "up": self._is_up(name)}
                for name, queue in queues.items()
            },
        }
