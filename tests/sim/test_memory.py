"""Hours of simulated traffic leave the memory of server and workers as it was."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import pytest
from msgspec.structs import replace

from actors.server import changes, feeder, history, ranks
from actors.server.graph import JobGraph
from tests.sim.server import SimServer
from tests.sim.watch import Watch
from tests.sim.world import Client, World
from transport import messages as m

HOURS, WARM = 4, 2
HOUR_SECS, SUBMIT_EVERY = 3_600.0, 240.0
TOLERANCE = 1.05
_PLAIN = (str, bytes, int, float, bool, type(None))


class HoursOfTraffic(World):
    """Graphs come in all the time, some of it goes wrong, and every hour there is a pause."""

    def __init__(self, seed: int) -> None:
        super().__init__("cuts", seed)
        self.submitted = 0
        self.sizes: list[int] = []

    def _run(self) -> None:
        self._start_server()
        self.clients = []
        self.workers = self._workers({})
        self.watch.is_finished = lambda key: any(key in w.finished for w in self.workers)
        for _ in range(HOURS):
            end = self.clock.now + HOUR_SECS
            self.stormy = True
            self._weather()
            self._submit_until(end - 2_000.0)
            self._until(end - 1_500.0, lambda: False)
            self.stormy = False
            self._until(end, lambda: False)  # connections of commands are forgotten meanwhile
            assert not self.network.server.farm.feeder.nodes
            self.sizes.append(self._measure())
            self._forget()

    def _submit_until(self, end: float) -> None:
        if self.clock.now < end:
            self.submitted += 1
            # New derivations of packages that come again and again.
            jobs = [
                replace(job, name=f"package{n}")
                for n, job in enumerate(self._graph(f"t{self.submitted}", 12))
            ]
            message = m.CmdSubmit(request=self.submitted, is_final=True, jobs=jobs)
            self.clients.append(Client(self, self.submitted, message))
            self.clock.after(SUBMIT_EVERY, lambda: self._submit_until(end))

    def _measure(self) -> int:
        server = self.network.server
        cores = [worker.core for worker in self.workers]
        mine = (server.farm, server.sessions, server.pager, server.reaper, *cores)
        return bytes_of(mine, besides=(server, server.ledger, self, self.watch, self.network))

    def _forget(self) -> None:
        """What the simulation itself remembers of the past is not what is measured."""
        self.watch.trace.clear()
        self.clients.clear()


def bytes_of(roots: Iterable[Any], besides: Iterable[Any]) -> int:
    """Memory of everything that can be reached from some objects, but not through others."""
    gc.collect()
    seen = {id(other) for other in besides}
    stack, total = list(roots), 0
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, ModuleType | type | BuiltinFunctionType):
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):
            stack += item.__closure__ or ()
            continue
        if isinstance(item, SimServer | Watch | World):
            continue
        total += sys.getsizeof(item)
        if not isinstance(item, (*_PLAIN, MethodType)):
            stack += gc.get_referents(item)
    return total


def test_hours_of_traffic_leave_memory_flat(monkeypatch):
    logging.disable(logging.CRITICAL)
    # Bounds that these hours reach.
    monkeypatch.setattr(feeder, "MAX_SIZES", 50)
    monkeypatch.setattr(history, "KEPT_SAMPLES", 3)
    monkeypatch.setattr(history, "MAX_RECENT_BUILDS", 20)
    monkeypatch.setattr(ranks, "_KEPT", 10)
    monkeypatch.setattr(changes, "MAX_CHANGES", 20)
    hours = HoursOfTraffic(1)
    hours.run()
    logging.disable(logging.NOTSET)
    assert hours.submitted > 20
    assert len(hours.watch.completions) > 200
    warm = hours.sizes[WARM - 1]
    assert max(hours.sizes[WARM:]) <= TOLERANCE * warm, hours.sizes


def test_a_leak_would_be_seen(monkeypatch):
    kept: list[object] = []
    ended = JobGraph.end

    def leaky(self, node, *arguments, **options):
        self.leak = kept
        kept.append(node)
        ended(self, node, *arguments, **options)

    monkeypatch.setattr(JobGraph, "end", leaky)
    with pytest.raises(AssertionError, match=r"\[\d+, \d+"):
        test_hours_of_traffic_leave_memory_flat(monkeypatch)
