"""The whole worker against a server played by hand, on a virtual clock."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import trio

from actors.worker.core import CoreSettings, WorkerCore
from actors.worker.executors.base import Built, Failed, score_as_missing
from actors.worker.policy import METRICS_EVERY, SETTLE
from actors.worker.shell import WorkerShell
from transport import messages as m
from transport.codec import Decoder, encode
from transport.interface import Sent
from transport.loopback import Network

ENDPOINT = "loop://server"
CAPABILITIES = m.Capabilities(fetch=False, eval=True, build=True)
ACK = m.InitAck(1, "s", CAPABILITIES, ["*"], [], [], 120.0)


class FakeExecutor:
    """Builds end when the test says so."""

    fetches = False

    def __init__(self):
        self.started = []
        self.stopped = []
        self.outcomes = {}
        self.contexts = {}
        self.score = score_as_missing

    def start(self):
        pass

    async def run_build(self, job, context):
        self.started.append(job.name)
        self.contexts[job.name] = context
        outcome_in, outcome = trio.open_memory_channel(1)
        self.outcomes[job.name] = outcome_in
        try:
            result = await outcome.receive()
        except trio.Cancelled:
            self.stopped.append(job.name)
            raise
        if isinstance(result, Exception):
            raise result
        return result

    async def run_eval(self, job, context):
        return await self.run_build(job, context)


class Server:
    """Receives frame by frame what the worker sends."""

    def __init__(self, network):
        self.network = network
        self.open()

    def open(self):
        self.router = self.network.router(ENDPOINT)
        self.decoder = Decoder(m.WORKER_MESSAGES)
        self.peer = None
        self.batches = []
        self.inbox = []

    async def next(self):
        with trio.fail_after(200):
            while not self.inbox:
                for peer, frames, _ in await self.router.receive():
                    self.peer = peer
                    batch = [self.decoder.decode(frame) for frame in frames]
                    self.batches.append(batch)
                    self.inbox += batch
        return self.inbox.pop(0)

    async def until(self, kind):
        while True:
            message = await self.next()
            if isinstance(message, kind):
                return message

    def send(self, *messages):
        assert self.router.send(self.peer, [encode(x) for x in messages]) is Sent.OK

    async def handshake(self, **changes):
        hello = await self.until(m.InitConnection)
        self.send(m.InitAck(**{f: getattr(ACK, f) for f in ACK.__struct_fields__} | changes))
        await self.until(m.RequestJobList)
        self.send(m.JobListChunk([], is_final=True))
        await self.until(m.RequestJob)
        await self.until(m.RequestJob)
        return hello

    async def resume(self, *assignment_ids):
        """The handshake of a worker that has a report to send again."""
        hello = await self.until(m.InitConnection)
        self.send(m.InitAck(1, "s2", CAPABILITIES, ["*"], [], list(assignment_ids), 120.0))
        await self.until(m.JobCompleted)
        return hello


def build(name):
    return m.BuildJob(
        "default", f"/nix/store/{name}.drv", name, {"out": f"/nix/store/{name}"},
        m.Requirement("x86_64-linux", []), [], 0, 0,
    )  # fmt: skip


def assign(number):
    return m.AssignJob(f"j{number}", f"a{number}", build(f"p{number}"))


def built(name):
    return Built({"out": m.Output(f"/nix/store/{name}", nar_size=1)})


class World:
    def __init__(self, nursery, network=None, peers_file=None, builds=2, **more):
        self.network = network or Network()
        self.executor = FakeExecutor()
        self.server = Server(self.network)
        announced = m.WorkerCapabilities(
            architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=builds
        )
        settings = CoreSettings("w", CAPABILITIES, announced, max_builds=builds, max_evals=1)
        self.core = WorkerCore(settings, lambda: 0.5, trio.current_time())
        self.shell = WorkerShell(
            self.core,
            self.executor,
            self.network.connector(),
            ENDPOINT,
            lambda peaks: m.WorkerMetrics(cpu_usage_pct=1.0, build_peak_ram_mb=dict(peaks) or None),
            peers_file,
            **more,
        )
        self.exit_code = None
        nursery.start_soon(self.run)

    async def run(self):
        self.exit_code = await self.shell.run()


# pytest-trio takes a clock only from the test's own arguments, so each test names it.
@pytest.fixture
def start(nursery):
    return lambda **fields: World(nursery, **fields)


async def at_once(function, *arguments, **_):
    await trio.lowlevel.checkpoint()
    return function(*arguments)


async def until(condition):
    with trio.fail_after(100):
        while not condition():
            await trio.sleep(0.01)


async def test_build_from_assignment_to_confirmation(autojump_clock, start):
    world = start()
    server = world.server
    await server.handshake()
    server.send(assign(1))
    assert (await server.until(m.AssignJobResponse)).accepted
    assert (await server.next()) == m.JobUpdate("j1", "a1", m.Building())
    await until(lambda: world.executor.started == ["p1"])
    await world.executor.contexts["p1"].log(b"hello\n")
    assert (await server.until(m.LogChunk)).data == b"hello\n"
    await world.executor.outcomes["p1"].send(built("p1"))
    assert isinstance((await server.until(m.JobUpdate)).update, m.BuildOutput)
    await server.until(m.JobCompleted)
    # The report and the next request travel in one ZeroMQ message.
    kinds = [type(x).__name__ for x in server.batches[-1]]
    assert kinds == ["JobUpdate", "JobCompleted", "RequestJob"]


async def test_abort_cancels_and_reports(autojump_clock, start):  # 105
    world = start()
    await world.server.handshake()
    world.server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    world.server.send(m.AbortJob("j1", "a1", "enough"))
    failed = await world.server.until(m.JobFailed)
    assert (failed.kind, failed.error) == ("Aborted", "enough")
    assert world.executor.stopped == ["p1"]


async def test_bug_of_an_executor_fails_one_job_only(autojump_clock, start):
    world = start()
    await world.server.handshake()
    world.server.send(assign(1), assign(2))
    await until(lambda: len(world.executor.started) == 2)
    await world.executor.outcomes["p1"].send(RuntimeError("boom"))
    failed = await world.server.until(m.JobFailed)
    assert failed.kind == "Transient"
    assert "RuntimeError: boom" in failed.error
    await world.executor.outcomes["p2"].send(built("p2"))
    await world.server.until(m.JobCompleted)


async def test_heartbeat_keeps_its_rhythm_and_names_peaks(autojump_clock, start):
    world = start()
    await world.server.handshake()
    world.server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    world.executor.contexts["p1"].observe_peak(70)
    world.executor.contexts["p1"].observe_peak(60)
    times = []

    async def answer():
        while len(times) < 4:
            message = await world.server.next()
            if isinstance(message, m.Ping):
                world.server.send(m.Pong(message.nonce))
            elif isinstance(message, m.WorkerMetrics):
                times.append(trio.current_time())
                assert message.build_peak_ram_mb == {"j1": 70}

    await answer()
    gaps = [b - a for a, b in pairwise(times)]
    assert all(abs(gap - 10) < 0.5 for gap in gaps), gaps


async def test_disk_is_looked_at_before_the_next_job_is_asked_for(
    autojump_clock, start
):  # FIELD 23, chaos
    troubles = [None]
    world = start(find_trouble=lambda: troubles[-1], in_thread=at_once)
    server = world.server
    await server.handshake()
    server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    troubles.append("the disk of /builds is full")
    await world.executor.outcomes["p1"].send(Failed("Transient", "no space left on the disk"))
    await server.until(m.JobFailed)
    assert server.inbox == []
    troubles.append(None)
    while not isinstance(message := await server.next(), m.RequestJob):
        assert isinstance(message, m.WorkerMetrics)
    assert message.kind in ("build", "eval")


async def test_lost_server_keeps_builds_and_reports_later(autojump_clock, start):  # FIELD 33, 43
    world = start()
    await world.server.handshake()
    world.server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    world.server.router.close()
    await trio.sleep(30)
    await world.executor.outcomes["p1"].send(built("p1"))
    world.server.open()
    hello = await world.server.resume("a1")
    assert hello.running == [m.ClaimRef("j1", "a1")]
    assert world.executor.stopped == []


async def test_link_cut_at_every_hand_over_never_ends_the_worker(autojump_clock, start):  # FIELD 33
    world = start()
    for number in range(20):
        await world.server.handshake()
        world.server.send(assign(number))
        await trio.sleep(0.0005 * (number % 5))
        world.network.cut(world.network.connections[0])
    await world.server.handshake()
    assert world.exit_code is None
    await until(lambda: len(world.executor.stopped) == len(world.executor.started))


async def test_black_hole_is_noticed_and_a_new_session_made(autojump_clock, start):
    world = start()
    await world.server.handshake()
    world.network.black_hole(world.network.connections[0])
    before = trio.current_time()
    await world.server.until(m.InitConnection)
    assert trio.current_time() - before < 15


async def test_server_that_stops_reading_ends_the_session(autojump_clock, start):  # 116
    world = start(network=Network(dealer_capacity=4))
    await world.server.handshake()
    world.server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    [connection] = world.network.connections
    began = trio.current_time()
    with trio.move_on_after(60):
        for number in range(10**6):
            await world.executor.contexts["p1"].log(b"x" * 1000)
            if number % 100 == 0:
                world.server.send(m.Pong(1))  # it still writes
            if connection.lost is not None:
                break
    assert connection.lost is not None
    assert trio.current_time() - began < 21


async def test_malformed_frame_leaves_the_session_alone(autojump_clock, start):
    world = start()
    await world.server.handshake()
    world.server.router.send(world.server.peer, [b"\xff", encode(m.Ping(3))])
    assert (await world.server.until(m.Pong)).nonce == 3


async def test_changed_peers_file_is_noticed(autojump_clock, start, tmp_path):
    peers = tmp_path / "peers"
    peers.write_text("a:one\n")
    world = start(peers_file=peers)
    await world.server.handshake()
    peers.write_text("a:two-two\n")
    await world.server.until(m.ReauthRequest)
    world.server.send(m.AuthChallenge(["a"]))
    assert (await world.server.until(m.AuthResponse)).tokens == {"a": "two-two"}


# -- the end -----------------------------------------------------------------------------


async def test_drain_stops_jobs_says_goodbye_and_exits(autojump_clock, start):  # 120
    world = start()
    await world.server.handshake()
    world.server.send(assign(1), assign(2))
    await until(lambda: len(world.executor.started) == 2)
    before = trio.current_time()
    await world.shell.drain(0)
    await world.server.until(m.Draining)
    reports = [await world.server.until(m.JobFailed) for _ in range(2)]
    assert {r.kind for r in reports} == {"Canceled"}
    await world.server.until(m.Goodbye)
    await until(lambda: world.exit_code == 0)
    assert trio.current_time() - before < 5


async def test_drain_without_a_server_is_as_quick(autojump_clock, start):  # FIELD 25
    world = start()
    await world.server.handshake()
    world.server.send(assign(1))
    await until(lambda: world.executor.started == ["p1"])
    world.server.router.close()
    await trio.sleep(1)
    before = trio.current_time()
    await world.shell.drain(130)
    await until(lambda: world.exit_code == 130)
    assert trio.current_time() - before < 5
    assert world.executor.stopped == ["p1"]


async def test_drain_before_any_server_was_reached(autojump_clock, start):  # 122
    world = start()
    world.server.router.close()
    await world.shell.drain(0)
    await until(lambda: world.exit_code == 0)
    assert world.network.connections == []


# -- scoring in a thread: the real clock --------------------------------------------------


def candidates(*job_ids):
    return [m.JobCandidate(j, "build", "default", [], [], []) for j in job_ids]


async def test_every_candidate_is_answered_and_a_broken_store_too(nursery):
    world = World(nursery)
    await world.server.handshake()
    world.server.send(m.JobOffer(candidates("j1", "j2")))
    chunk = await world.server.until(m.RequestJobChunk)
    assert [s.job_id for s in chunk.scores] == ["j1", "j2"]

    def fail(candidates):
        raise RuntimeError("no store")

    world.executor.score = fail
    world.server.send(m.JobOffer(candidates("j3")))
    chunk = await world.server.until(m.RequestJobChunk)
    assert [s.job_id for s in chunk.scores] == ["j3"]
    await world.shell.drain(0)
    await until(lambda: world.exit_code == 0)


async def test_stuck_scoring_delays_neither_pings_nor_builds_nor_the_end(nursery):  # FIELD 38
    world = World(nursery)
    release = threading.Event()

    def stuck(candidates):
        release.wait(60)
        return []

    world.executor.score = stuck
    await world.server.handshake()
    world.server.send(m.JobOffer(candidates("j1")), m.Ping(5), assign(1))
    assert (await world.server.until(m.Pong)).nonce == 5
    assert (await world.server.until(m.AssignJobResponse)).accepted
    await until(lambda: world.executor.started == ["p1"])
    await world.shell.drain(0)
    await world.server.until(m.Goodbye)
    await until(lambda: world.exit_code == 0)
    release.set()


async def reports(world, count):
    """The times of the next reports of the machine."""
    times = []
    while len(times) < count:
        message = await world.server.next()
        if isinstance(message, m.Ping):
            world.server.send(m.Pong(message.nonce))
        if isinstance(message, m.WorkerMetrics):
            times.append(trio.current_time())
    return times


@pytest.mark.parametrize(
    ("cpu_pct", "others_pct", "gaps"),
    [
        (95.0, 5.0, [METRICS_EVERY, 3 + SETTLE, METRICS_EVERY]),
        (95.0, 95.0, [METRICS_EVERY, 3 + SETTLE, METRICS_EVERY]),
        (5.0, 5.0, [METRICS_EVERY] * 3),
        (None, None, [METRICS_EVERY] * 3),
    ],
    ids=["of the jobs", "of others too", "none", "unknown"],
)
async def test_a_load_is_reported_anew_when_the_last_job_is_over(
    autojump_clock, start, nursery, cpu_pct, others_pct, gaps
):
    """A server that spares busy machines would leave the slots empty until the next report."""
    world = start()

    def read(_):
        return m.WorkerMetrics(cpu_usage_pct=cpu_pct if world.shell._jobs else others_pct)

    world.shell._read_metrics = read
    await world.server.handshake()
    world.server.send(assign(1), assign(2))
    await until(lambda: len(world.executor.started) == 2)

    async def finish():
        for name in ("p1", "p2"):
            world.executor.outcomes[name].send_nowait(built(name))
            await trio.sleep(2)

    times = await reports(world, 2)
    # The first ends 1 s after a report, the last 3 s after it.
    await trio.sleep(1)
    nursery.start_soon(finish)
    times += await reports(world, 2)
    assert [b - a for a, b in pairwise(times)] == pytest.approx(gaps, abs=0.1)
