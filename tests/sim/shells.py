"""The same farm with its real shells: Trio tasks on a virtual clock, over the loopback.

Slower than `world` by far, but here the tasks, channels, cancellation and supervision of server
and workers are the production ones too. One seed decides all, scheduling included.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import trio
import trio.testing

import actors.server.shells
from actors.ledger.port import Batch
from actors.ledger.records import TERMINAL
from actors.ledger.sqlite import SqliteLedger
from actors.server import assembly
from actors.server.assembly import Server
from actors.server.config import ServerConfig
from actors.server.pager import Pager
from actors.server.policies import load_policy
from actors.server.world import PAGER_BATCHES
from actors.worker.core import CoreSettings, WorkerCore
from actors.worker.executors.base import Built, Failed
from actors.worker.shell import WorkerShell
from tests.sim.clusters import clusters_of
from tests.sim.faults import Faults
from tests.sim.watch import Violation, Watch
from tests.sim.world import _fast_folder
from transport import loopback
from transport import messages as m
from transport.codec import Decoder, encode
from transport.interface import ConnectionLost, Sent

ENDPOINT = "loop://farm"
STORMY_SECS, HEALING_SECS = 45.0, 2_000.0
ACTORS = (
    "gateway", "registry", "feeder", "assigner", "coordinator", "pager", "reaper", "ledger",
    "logbook",
)  # fmt: skip
STORM = Faults(
    delay=(0.0005, 0.05), cuts=0.05, worker_crashes=0.04, server_crashes=0.03,
    dispatch_restarts=0.1, failures=0.1,
)  # fmt: skip


@contextmanager
def deterministic(seed: int):
    """Trio runs its tasks in an order that the seed decides. Reaches into Trio: only here."""
    run = trio._core._run
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = False


class Assassin(trio.abc.Instrument):
    """Kills an actor after some step of some task, so at any checkpoint that there is."""

    def __init__(self) -> None:
        self._steps = 0
        self._kill: Callable[[], None] | None = None

    def hire(self, steps: int, kill: Callable[[], None]) -> None:
        """To strike after so many steps of tasks from now."""
        self._steps, self._kill = steps, kill

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._kill is None:
            return
        self._steps -= 1
        if self._steps <= 0:
            kill, self._kill = self._kill, None
            kill()


class Dice:
    """An executor whose jobs take time and sometimes fail."""

    fetches = False

    def __init__(self, random: Random, faults: Callable[[], Faults]) -> None:
        self._random, self._faults = random, faults

    def start(self) -> None:
        pass

    def score(self, candidates):
        return [
            m.Score(job_id=c.job_id, missing_count=0, outputs_present=False,
                    missing_nar_size=self._random.randrange(10**8))
            for c in candidates
        ]  # fmt: skip

    async def run_build(self, job, context):
        await trio.sleep(self._random.expovariate(0.5))
        if self._random.random() < self._faults().failures:
            return Failed(self._random.choice(("Transient", "Permanent")), "simulated")
        return Built(outputs={n: m.Output(path=p) for n, p in job.outputs.items()})

    async def run_eval(self, job, context):
        raise AssertionError("no evaluations here")


class ShellWorld:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = Random(f"shells/{seed}")
        self.faults = STORM
        self.watch: Watch
        self.accepted: dict[str, str] = {}
        self.server: Server | None = None
        self.answers = 0
        self.worker_scopes: dict[str, trio.CancelScope] = {}
        self.assassin = Assassin()

    async def run(self) -> list[str]:
        """Raises `Violation`."""
        self.watch = Watch(_Now())
        self.network = loopback.Network(
            lambda _: self.random.uniform(*self.faults.delay),
            router_capacity=self.random.choice((2, 64)),
        )
        # Some farms have channels that are always full.
        assembly.PAGER_BATCHES = self.random.choice((1, 2, PAGER_BATCHES))
        with tempfile.TemporaryDirectory(prefix="headrace-sim-", dir=_fast_folder()) as folder:
            self.folder = Path(folder)
            with trio.fail_after(STORMY_SECS + HEALING_SECS):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._keep_server)
                    for n in range(3):
                        nursery.start_soon(self._keep_worker, f"w{n}", 1 + n)
                    for n in range(2):
                        nursery.start_soon(self._submit, n)
                    await self._weather()
                    self.faults = Faults(failures=0.0)
                    await self._finish()
                    nursery.cancel_scope.cancel()
        return self.watch.trace

    # -- processes ---------------------------------------------------------------------------------

    async def _keep_server(self) -> None:
        life = 0
        while True:
            life += 1
            with trio.CancelScope() as self.server_scope:
                await self._live_server(life)
            await trio.sleep(self.random.uniform(0.05, 3.0))

    async def _live_server(self, life: int) -> None:
        name = f"server-{life}"
        ledger = SqliteLedger.open(self.folder / "ledger.sqlite3", name, wall=trio.current_time)
        ledger.recover([f"server-{n}" for n in range(life)])
        router = self.network.router(ENDPOINT)
        try:
            server = Server(
                ServerConfig(state_dir=self.folder), server=name, epoch=f"{life:04d}",
                policy=load_policy("simple"), ledger=ledger, router=router,
                wall_offset=lambda: 0.0, offload=self._at_once,
            )  # fmt: skip
            if self.random.random() < 0.3:
                server.world.port.admissions._limit = server.world.port.queries._limit = 1
            self._listen_in(server, ledger, router)
            self.server = server
            await server.run()
        finally:
            self.server = None
            router.close()
            ledger.close()

    async def _keep_worker(self, name: str, slots: int) -> None:
        while True:
            announced = m.WorkerCapabilities(
                architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=slots
            )
            settings = CoreSettings(
                worker_id=name, capabilities=m.Capabilities(fetch=False, eval=False, build=True),
                announced=announced, max_builds=slots, max_evals=0,
            )  # fmt: skip
            core = WorkerCore(settings, self.random.random, trio.current_time())
            shell = WorkerShell(
                core, Dice(self.random, lambda: self.faults), self.network.connector(), ENDPOINT,
                lambda _: m.WorkerMetrics(cpu_usage_pct=5.0), in_thread=self._at_once,
            )  # fmt: skip
            with trio.CancelScope() as scope:
                self.worker_scopes[name] = scope
                await shell.run()
            await trio.sleep(self.random.uniform(0.1, 20.0))

    async def _at_once(self, function: Any, *arguments: Any, **_: Any) -> Any:
        await trio.sleep(self.random.uniform(0.0001, 0.01))
        return function(*arguments)

    async def _submit(self, number: int) -> None:
        jobs = self._graph(number)
        clusters = clusters_of(self.random, f"c{number}", jobs, [None] * 3, []) if number else []
        message = m.CmdSubmit(request=number, is_final=True, jobs=jobs, clusters=clusters)
        await trio.sleep(self.random.uniform(0, STORMY_SECS / 2))
        decoder = Decoder(m.SERVER_MESSAGES)
        while True:
            dealer = self.network.connector().connect(ENDPOINT)
            try:
                dealer.send([encode(m.CmdHello(versions=(1, 1))), encode(message)])
                with trio.move_on_after(15):
                    while True:
                        for frames in await dealer.receive():
                            for frame in frames:
                                answer = decoder.decode(frame)
                                if isinstance(answer, m.CmdSubmitted):
                                    self.accepted.update(answer.jobs)
                                    self.answers += 1
                                    return
            except ConnectionLost:
                pass
            finally:
                dealer.close()
            await trio.sleep(self.random.uniform(0.1, 1.0))

    def _graph(self, number: int) -> list[m.SubmittedJob]:
        jobs: list[m.SubmittedJob] = []
        for n in range(self.random.randint(3, 15)):
            needs = self.random.sample(range(n), min(n, self.random.choice((0, 1, 2))))
            jobs.append(
                m.SubmittedJob(
                    drv_path=f"/nix/store/s{number}-{n}.drv", name=f"s{number}-{n}",
                    system="x86_64-linux", required_features=[],
                    outputs={"out": f"/nix/store/s{number}-{n}"},
                    input_drvs=[jobs[i].drv_path for i in needs], input_srcs=[],
                )
            )  # fmt: skip
        return jobs

    # -- trouble -----------------------------------------------------------------------------------

    async def _weather(self) -> None:
        end = trio.current_time() + STORMY_SECS
        random, faults = self.random, self.faults
        while trio.current_time() < end:
            await trio.sleep(random.uniform(0.2, 1.0))
            connections = self.network.connections
            if connections and random.random() < faults.cuts:
                self.network.cut(random.choice(connections))
            if random.random() < faults.worker_crashes:
                self.worker_scopes[random.choice(sorted(self.worker_scopes))].cancel()
            if random.random() < faults.server_crashes:
                self.server_scope.cancel()
            if self.server is not None and random.random() < faults.dispatch_restarts:
                self.assassin.hire(random.randrange(200), self._kill)

    def _kill(self) -> None:
        if self.server is not None:
            actor = self.random.choice(ACTORS)
            self.watch.note(f"kill {actor}")
            self.server.kill(actor)

    async def _finish(self) -> None:
        while not self._is_done():
            await trio.sleep(1.0)
        server = self.server
        assert server is not None
        assert server.dispatch._farm is not None
        server.dispatch._farm.check()
        for job_id in self.accepted.values():
            record = server.world.port.ledger.job(job_id, 0.0)
            self.watch.demand(record is not None, "I2: an accepted job is lost", job_id)
            self.watch.demand(record.status in TERMINAL, f"I2: {record.status}", job_id)
        self.watch.demand(not self.watch.open, "open claims at the end", *self.watch.open)
        self.watch.clusters.judge(server)

    def _is_done(self) -> bool:
        farm = self.server.dispatch._farm if self.server is not None else None
        return farm is not None and self.answers == 2 and not farm.feeder.nodes

    # -- listening in ------------------------------------------------------------------------------

    def _listen_in(self, server: Server, ledger: SqliteLedger, router: Any) -> None:
        """Lets the watch see what is written, synced, sent and offered."""
        watch = self.watch
        apply, admit, send = ledger.apply, ledger.admit, router.send
        settle, turn = server.dispatch._settle, server.dispatch._turn
        seen = _Seen(server)

        def watched_apply(writes: Any, *arguments: Any) -> list[bool]:
            results = apply(writes, *arguments)
            seen.written += 1
            watch.wrote(Batch(seen.written, writes), results)
            return results

        def watched_admit(admission: Any, *arguments: Any, **options: Any) -> Any:
            admitted = admit(admission, *arguments, **options)
            watch.admitted(admission, admitted)
            return admitted

        def watched_sync() -> None:
            seen.synced = seen.written

        def watched_send(peer: bytes, frames: list[bytes]) -> Sent:
            sent: Sent = send(peer, frames)
            if sent is Sent.OK:
                watch.sends(seen, peer, frames)
            return sent

        def watched_turn(incoming: Any, events: Any) -> None:
            for message in incoming:
                watch.clusters.receives(seen, message.peer, message.frames)
            turn(incoming, events)

        def watched_settle(farm: Any, now: float) -> None:
            settle(farm, now)
            farm.check()

        class WatchedPager(Pager):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                watch.pager_started()

            def enter(self, entry: Any, fragment: bytes | None = None) -> None:
                watch.entered(entry.job_id)
                super().enter(entry, fragment)

            def request_list(self, name: str) -> None:
                watch.list_requested(name)
                super().request_list(name)

            def next_page(self, name: str) -> Any:
                page = super().next_page(name)
                if page is not None:
                    self.last = page
                return page

        send_page = server.world.outbox.send_page

        def watched_send_page(peer: bytes, frame: bytes) -> Sent:
            sent = send_page(peer, frame)
            session = server.world.sessions.by_peer.get(peer)
            pager = server.pager_shell._pager
            if sent is Sent.OK and session is not None:
                watch.offered(session.id, pager.last)
            return sent

        ledger.apply, ledger.admit, ledger.sync = watched_apply, watched_admit, watched_sync
        router.send = watched_send
        server.dispatch._settle, server.dispatch._turn = watched_settle, watched_turn
        server.world.outbox.send_page = watched_send_page
        actors.server.shells.Pager = WatchedPager


class _Seen:
    """What the watch asks of a server."""

    def __init__(self, server: Server) -> None:
        self.sessions = server.world.sessions
        self.written = 0
        self.synced = 0


class _Now:
    @property
    def now(self) -> float:
        return trio.current_time()


def simulate_shells(seed: int) -> list[str]:
    """Runs one seed on a virtual clock and returns its trace; raises `Violation`."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    try:
        with deterministic(seed):
            world = ShellWorld(seed)
            return trio.run(world.run, clock=clock, instruments=[world.assassin])
    except Exception as error:
        replay = f"python -m tests.sim --shells --seed {seed}"
        raise Violation(f"{_causes(error)}\nreplay: {replay}") from error
    finally:
        actors.server.shells.Pager = Pager
        assembly.PAGER_BATCHES = PAGER_BATCHES


def _causes(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_causes(e) for e in error.exceptions)
    return f"{type(error).__name__}: {error}"
