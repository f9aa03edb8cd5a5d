"""A whole farm, its faults and its people: one seed decides everything."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from random import Random
from typing import Any

from actors.ledger.records import TERMINAL
from actors.server import assigner
from actors.server.config import ServerConfig
from actors.server.pool import Pool
from tests.sim.clock import Clock
from tests.sim.clusters import ZONES, clusters_of
from tests.sim.disk import Disk
from tests.sim.faults import PRESETS, Faults
from tests.sim.network import Connection, Network
from tests.sim.server import SimServer
from tests.sim.watch import Violation, Watch
from tests.sim.worker import SimWorker
from transport import messages as m
from transport.codec import Decoder, encode

STORMY_SECS = 120.0
HEALING_SECS = 2_500.0
QUIET_SECS = 20.0
"""From the healing to the end at least: what is late still comes in."""
MAX_STEPS = 60_000
SYSTEMS = ("x86_64-linux", "aarch64-linux")


class Client:
    """Someone who submits a graph, again until it is answered."""

    def __init__(self, world: World, number: int, message: m.CmdSubmit) -> None:
        self.world, self.number, self.message = world, number, message
        self.answer: dict[str, str] | None = None
        self.evaluations: list[str] = []
        self.submission = ""
        self._decoder = Decoder(m.SERVER_MESSAGES)
        self._connect()

    def _connect(self) -> None:
        if self.answer is None:
            self.connection: Connection = self.world.network.connect(self._take, self._lost)
            self.connection.to_server([encode(m.CmdHello(versions=(1, 1))), encode(self.message)])
            self.world.clock.after(20.0, self._again)

    def _again(self) -> None:
        if self.answer is None:
            self.connection.cut("gave up")

    def _lost(self, _: str) -> None:
        self.world.clock.after(self.world.random.uniform(0.1, 2.0), self._connect)

    def _take(self, frames: list[bytes]) -> None:
        for frame in frames:
            match self._decoder.decode(frame):
                case m.CmdSubmitted() as told:
                    self.answer = dict(told.jobs)
                    self.evaluations, self.submission = told.evaluations, told.submission
                    self.world.accepted.update(told.jobs.values())
                    self.world.accepted.update(told.evaluations)
                case m.CmdError() as error:
                    # An explicit id that a lost answer had brought in already.
                    self.world.note(f"client {self.number}: {error.message}")


class World:
    """Runs one seed of one preset."""

    def __init__(self, preset: str, seed: int) -> None:
        self.preset, self.seed = preset, seed
        self.random = Random(f"{preset}/{seed}")
        self.clock = Clock()
        self.faults: Faults = PRESETS[preset]
        self.network = Network(self.clock, self.random, self.faults)
        self.watch = Watch(self.clock)
        self.accepted: set[str] = set()
        self.lives = 0
        self.is_starting = False
        self._folder = tempfile.TemporaryDirectory(prefix="headrace-sim-", dir=_fast_folder())
        self._file = Path(self._folder.name) / "ledger.sqlite3"
        self.config = ServerConfig(state_dir=Path(self._folder.name))
        self.disk = Disk() if self.faults.server_crashes else None

    def run(self) -> Watch:
        """Raises `Violation` with the stories and the command that replays it."""
        # Small blocks are quickly made, and full.
        assigner.Pool = functools.partial(Pool, block_rows=16, slots=4)
        try:
            self._run()
        except Exception as error:
            replay = f"python -m tests.sim --preset {self.preset} --seed {self.seed}"
            raise Violation(f"{type(error).__name__}: {error}\nreplay: {replay}") from error
        finally:
            assigner.Pool = Pool
            if self.network.server is not None:
                self.network.server.ledger.close()
            if self.disk is not None:
                self.disk.close()
            self._folder.cleanup()
        return self.watch

    def note(self, text: str) -> None:
        self.watch.note(text)

    def _run(self) -> None:
        self._start_server()
        graphs: dict[str, list[m.Derivation]] = {}
        self.workers = self._workers(graphs)
        self.watch.is_finished = lambda key: any(key in w.finished for w in self.workers)
        self.clients: list[Client] = []
        for number in range(self.random.randint(1, 4)):
            message = self._submission(number, graphs)
            when = self.random.uniform(0.0, STORMY_SECS / 2)
            self.clock.after(when, lambda n=number, msg=message: self.clients.append(
                Client(self, n, msg)))  # fmt: skip
        self.stormy = True
        self._weather()
        self._until(self.clock.now + STORMY_SECS, lambda: False)
        self._heal()
        end = self.clock.now + HEALING_SECS
        self._until(end, self._is_done)
        self._judge()

    def _workers(self, graphs: dict[str, list[m.Derivation]]) -> list[SimWorker]:
        has_clusters = self.faults.clusters > 0
        count = self.random.randint(3, 7) if has_clusters else self.random.randint(2, 5)
        self.zones = [self.random.choice(ZONES) if has_clusters else None for _ in range(count)]
        return [
            SimWorker(
                f"w{n}", self.network, self.random, slots=self.random.randint(1, 3),
                systems=list(SYSTEMS if n < 2 else SYSTEMS[: self.random.randint(1, 2)]),
                features=["kvm"] if n < 2 else [], graphs=graphs, may_die=n >= 2,
                zone=zone,
            )
            for n, zone in enumerate(self.zones)
        ]  # fmt: skip

    def _start_server(self) -> None:
        self.lives += 1
        self.network.server = SimServer(
            self.network, self.random, self.watch, self._file, self.config, self.lives, self.disk
        )
        self.note(f"server life {self.lives}")

    def _until(self, end: float, is_done: Any) -> None:
        steps = 0
        while self.clock.now < end and not is_done():
            if not self.clock.step():
                return
            steps += 1
            assert steps < MAX_STEPS, "the farm is busy without getting anywhere"
            if self.network.server is None and not self.is_starting:
                self.is_starting = True
                self.clock.after(self.random.uniform(0.05, 5.0), self._restart)

    def _restart(self) -> None:
        self.is_starting = False
        self._start_server()

    # -- what people submit ------------------------------------------------------------------------

    def _submission(self, number: int, graphs: dict[str, Any]) -> m.CmdSubmit:
        random = self.random
        jobs = self._graph(f"g{number if random.random() < 0.8 else 0}", random.randint(1, 25))
        evaluations = []
        if random.random() < 0.4:
            ref = f"graph-{number}"
            graphs[ref] = [
                m.Derivation(**{f: getattr(j, f) for f in m.Derivation.__struct_fields__})
                for j in self._graph(f"e{number}", random.randint(1, 120))
            ]
            random.shuffle(graphs[ref])
            source = m.EvalSource(kind="graph-file", ref=ref)
            evaluations = [m.SubmittedEvaluation(source=source)]
        clusters = []
        if random.random() < self.faults.clusters:
            clusters = clusters_of(random, f"c{number}", jobs, self.zones, sorted(graphs))
        return m.CmdSubmit(
            request=number, is_final=True, jobs=jobs, evaluations=evaluations, clusters=clusters
        )

    def _graph(self, name: str, count: int) -> list[m.SubmittedJob]:
        # Of the name alone, so that two clients can submit the same graph.
        random = Random(f"{self.seed}/{name}")
        jobs: list[m.SubmittedJob] = []
        for n in range(count):
            needs = random.sample(range(n), min(n, random.choice((0, 1, 1, 2, 4))))
            jobs.append(
                m.SubmittedJob(
                    drv_path=f"/nix/store/{name}-{n}.drv", name=f"{name}-{n}",
                    system=random.choice((*SYSTEMS, "builtin")),
                    required_features=["kvm"] if random.random() < 0.1 else [],
                    outputs={"out": f"/nix/store/{name}-{n}"},
                    input_drvs=[jobs[i].drv_path for i in needs], input_srcs=[],
                    prioritized=random.random() < 0.1 or None,
                )
            )  # fmt: skip
        return jobs

    # -- faults ------------------------------------------------------------------------------------

    def _weather(self) -> None:
        """Once a second, for as long as it is stormy."""
        if not self.stormy:
            return
        faults, random = self.faults, self.random
        server = self.network.server
        if server is not None:
            self._trouble(server, faults, random)
        for worker in self.workers:
            if random.random() < faults.worker_crashes:
                self.note(f"{worker.name} crashes")
                worker.crash()
            elif random.random() < faults.worker_drains:
                self.note(f"{worker.name} drains")
                worker.drain()
        self.clock.after(1.0, self._weather)

    def _trouble(self, server: SimServer, faults: Faults, random: Random) -> None:
        connections = list(self.network.connections.values())
        if connections and random.random() < faults.cuts:
            random.choice(connections).cut("cut")
        if random.random() < faults.server_crashes:
            server.crash_next = True
            self.note("the server will crash")
        elif random.random() < faults.server_stops and not server.is_stopping:
            self.note("the server stops")
            server.stop()
            self.clock.after(20.0, lambda: server.is_up and server.exit())
        elif random.random() < faults.dispatch_restarts:
            self.note("dispatch restarts")
            server.start_dispatch()
        elif random.random() < faults.pager_restarts:
            server.restart_pager()
        if random.random() < faults.wall_jumps:
            jump = random.choice((-1, 1)) * random.choice((2.0, 3_600.0, 400 * 86_400.0))
            self.note(f"the wall clock jumps by {jump:.0f} s")
            self.clock.wall_shift += jump
        if random.random() < faults.cancels:
            self._cancel(server)
        if random.random() < faults.cordons:
            worker = random.choice(self.workers).name
            is_drained = worker in server.farm.registry.cordons
            self._command(
                m.CmdUndrain(request=1, worker=worker)
                if is_drained
                else m.CmdDrain(request=1, worker=worker, reason="simulated")
            )

    def _cancel(self, server: SimServer) -> None:
        targets = sorted(server.farm.feeder.nodes)
        targets += [c.submission for c in self.clients if c.submission]
        if targets:
            self._command(m.CmdCancel(request=1, targets=[self.random.choice(targets)]))

    def _command(self, message: m.Message) -> None:
        connection = self.network.connect(lambda _: None, lambda _: None)
        if connection.is_up:
            connection.to_server([encode(m.CmdHello(versions=(1, 1))), encode(message)])

    def _heal(self) -> None:
        self.note("healing")
        self.stormy = False
        calm = Faults(failures=0.0)
        self.faults = self.network.faults = calm
        server = self.network.server
        if server is not None:
            server.faults, server.crash_next = calm, False
        self._undrain()
        self.healed_at = self.clock.now

    def _undrain(self) -> None:
        """Once a second, since a drain may still be on its way."""
        server = self.network.server
        if server is not None and not server.is_stopping:
            for worker in list(server.farm.registry.cordons):
                self._command(m.CmdUndrain(request=1, worker=worker))
        self.clock.after(1.0, self._undrain)

    # -- the end -----------------------------------------------------------------------------------

    def _is_done(self) -> bool:
        server = self.network.server
        if server is None or server.deferred or server.inbox:
            return False
        answered = all(c.answer is not None for c in self.clients)
        return (
            answered
            and not server.farm.feeder.nodes
            and self.clock.now > self.healed_at + QUIET_SECS
        )

    def _judge(self) -> None:
        server, watch = self.network.server, self.watch
        stuck = sorted(server.farm.feeder.nodes)[:3]
        what = f"liveness: {len(server.farm.feeder.nodes)} jobs left, e.g. {stuck}"
        watch.demand(self._is_done(), what, *stuck)
        watch.demand(not watch.open, "open claims at the end", *list(watch.open)[:3])
        farm = server.farm
        farm.check()
        for job_id in self.accepted:
            record = server.ledger.job(job_id, 0.0)
            watch.demand(record is not None, "I2: an accepted job is lost", job_id)
            watch.demand(record.status in TERMINAL, f"I2: {record.status} at the end", job_id)
        counts = {s: n for s, n in farm.feeder.counts.items() if n}
        watch.demand(counts == server.ledger.counts(), f"counts {counts} {server.ledger.counts()}")
        watch.demand(not watch.missing_offers(server), "I8: an offer is owed")
        watch.clusters.judge(server)
        self._check_leaks(farm)

    def _check_leaks(self, farm: Any) -> None:
        assigner = farm.assigner
        left = {
            "claims": assigner.claims, "open builds": assigner._open_builds,
            "orphans": assigner._orphans, "declines": assigner._declines,
            "awaited": farm.feeder._graph.awaited,
            "recent": farm.feeder._graph.recent,
            "admissions": farm.admissions._sent, "waiting": farm.commands._waiting,
            "held reports": farm.reports._held, "clusters": farm.coordinator.clusters,
            "attempts": farm.coordinator.attempts, "kept": assigner.kept,
        }  # fmt: skip
        leaked = {name: what for name, what in left.items() if what}
        self.watch.demand(not leaked, f"leaked: {str(leaked)[:500]}")


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def simulate(preset: str, seed: int) -> list[str]:
    """Runs one seed and returns its trace; raises `Violation`."""
    return World(preset, seed).run().trace
