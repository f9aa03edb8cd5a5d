"""The shape of the hot path, counted and not timed: what an offer and an assignment cost must not
grow with the workers that are there, nor with what is pending.

A whole server runs on the virtual clock over the loopback, with its real ledger, pager and policy.
Counted are the rows that rules look at, what is encoded, transactions, messages sent, calls that
leave the loop, and steps of the server's tasks, of which every hop between actors is at least one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import cbor2
import msgspec
import pytest
import trio
import trio.testing

from actors.ledger.sqlite import SqliteLedger
from actors.server.assembly import Server
from actors.server.config import ServerConfig
from actors.server.policies import POLICIES
from actors.server.scoring import Columns, Extremes, Policy
from tests.server.farm_harness import BUILD, job
from transport import loopback
from transport import messages as m

WORKERS = (1, 10, 50)
PENDING = (1_000, 10_000)
CYCLES = 20
SLACK_STEPS = 8
STEPS_A_CYCLE = 12
"""Of the server's tasks, from a request to its job's end: reading and settling twice, the pager's
two, the fsync's, and what Trio takes to wake them. It was 11 when this was written."""
BLOCK_ROWS = 8_192
"""A request looks at one block of the pool, when no other can hold anything better."""
PART = 1_000
_dumps = cbor2.dumps


def frame(message: m.Message) -> bytes:
    """Encoded by a peer, and so not counted."""
    return _dumps(msgspec.to_builtins(message, builtin_types=(bytes,)))


REQUEST = frame(m.RequestJob(kind="build"))


class Meter(trio.abc.Instrument):
    """Counts what a server does; as a rule of its policy, rows too."""

    name = "meter"
    description = "0, and the rows it was asked for are counted"

    def __init__(self) -> None:
        self.tally: Counter[str] = Counter()
        self._observer = trio.lowlevel.current_task()

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """What is counted until the block ends."""
        before, found = self.tally.copy(), Counter[str]()
        yield found
        found.update(self.tally)
        found.subtract(before)

    # A rule.

    def score(self, view: Columns) -> float:
        self.tally["rows"] += len(view.ticks)
        return 0.0

    def veto(self, view: Columns) -> None:
        return None

    def best(self, extremes: Extremes) -> float:
        return 0.0

    # What is called in the place of others.

    def dumps(self, value: Any, **options: Any) -> bytes:
        encoded = _dumps(value, **options)
        self.tally["encodings"] += 1
        self.tally["encoded bytes"] += len(encoded)
        self.tally["encoded candidates"] += encoded.count(b"output_paths")
        return encoded

    def statement(self, sql: str) -> None:
        self.tally["commits"] += sql.lstrip().upper().startswith("COMMIT")

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.tally["steps"] += task is not self._observer

    async def offload(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.tally["calls off the loop"] += 1
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    def sending(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(peer: bytes, frames: list[bytes]) -> Any:
            self.tally["messages"] += 1
            return send(peer, frames)

        return counted


class Peer:
    """A connection; frames come and go as bytes."""

    def __init__(self, network: loopback.Network) -> None:
        self._dealer = network.connector().connect("loop://server")
        self._inbox: list[bytes] = []

    def send(self, *frames: bytes) -> None:
        assert self._dealer.send(list(frames))

    async def until(self, kind: type[m.Message]) -> bytes:
        """The next frame of a type; others are dropped."""
        start = b"dtype" + _dumps(kind.__name__)
        with trio.fail_after(20):
            while True:
                while self._inbox:
                    found = self._inbox.pop(0)
                    if found.startswith(start, 1):
                        return found
                for frames in await self._dealer.receive():
                    self._inbox += frames

    async def round_trip(self) -> None:
        """Until the server has taken everything sent so far."""
        self.send(frame(m.Ping(nonce=1)))
        await self.until(m.Pong)

    async def join(self, worker: str) -> None:
        told = m.WorkerCapabilities(
            architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=4
        )
        self.send(frame(m.InitConnection(versions=(1, 1), id=worker, capabilities=BUILD)))
        await self.until(m.InitAck)
        self.send(frame(told), frame(m.RequestJobList()))
        await self.until(m.JobListChunk)

    async def submit(self, count: int) -> list[str]:
        """Returns the ids of independent jobs."""
        jobs = [job(f"job{n}") for n in range(count)]
        parts = [jobs[at : at + PART] for at in range(0, count, PART)]
        self.send(frame(m.CmdHello(versions=(1, 1))))
        for part in parts:
            self.send(frame(m.CmdSubmit(request=1, is_final=part is parts[-1], jobs=part)))
        ids: list[str] = []
        while len(ids) < count:
            ids += cbor2.loads(await self.until(m.CmdSubmitted))["jobs"].values()
        return ids

    async def take_offers(self, count: int) -> None:
        while count > 0:
            count -= (await self.until(m.JobOffer)).count(b"output_paths")

    def finish(self, assigned: bytes) -> None:
        """Accepts and completes."""
        given = cbor2.loads(assigned)
        ids = {"job_id": given["job_id"], "assignment_id": given["assignment_id"]}
        self.send(
            frame(m.AssignJobResponse(accepted=True, **ids)), frame(m.JobCompleted(**ids))
        )  # fmt: skip


@asynccontextmanager
async def serving(folder: Path, meter: Meter) -> AsyncIterator[loopback.Network]:
    network = loopback.Network()
    ledger = SqliteLedger.open(folder / "ledger.sqlite3", "s", wall=trio.current_time)
    ledger.recover(())
    router = network.router("loop://server")
    router.send = meter.sending(router.send)
    simple = POLICIES["simple"]
    server = Server(
        ServerConfig(state_dir=folder), server="s", epoch="1", ledger=ledger, router=router,
        policy=Policy("counted", "as simple", (*simple.rules, meter)),
        wall_offset=lambda: 0.0, offload=meter.offload,
    )  # fmt: skip
    trio.lowlevel.add_instrument(meter)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(server.run)
            await server.dispatch.started.wait()
            ledger._writer.db.set_trace_callback(meter.statement)
            yield network
            nursery.cancel_scope.cancel()
    finally:
        trio.lowlevel.remove_instrument(meter)
        ledger.close()


async def run_farm(folder: Path, workers: int, pending: int) -> dict[str, Counter[str]]:
    """What was counted while jobs were offered, lists repeated, jobs assigned one by one, and a
    job to every worker at once."""
    meter = Meter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cbor2, "dumps", meter.dumps)
        async with serving(folder, meter) as network:
            crew = [Peer(network) for _ in range(workers)]
            for number, peer in enumerate(crew):
                await peer.join(f"w{number:02}")
            with meter.counted() as offering:
                ids = await Peer(network).submit(pending)
                for peer in crew:
                    await peer.take_offers(pending)
            with meter.counted() as listing:
                for peer in crew:
                    peer.send(frame(m.RequestJobList()))
                    await peer.until(m.JobListChunk)
                    await peer.round_trip()
            scores = [m.Score(i, 0, 0, outputs_present=False) for i in ids]
            pages = [
                frame(m.RequestJobChunk(scores=scores[at : at + PART]))
                for at in range(0, pending, PART)
            ]
            for peer in crew:
                peer.send(*pages)
                await peer.round_trip()
            one = crew[0]
            with meter.counted() as assigning:
                for _ in range(CYCLES):
                    one.send(REQUEST)
                    one.finish(await one.until(m.AssignJob))
                    await one.until(m.Recorded)
            with meter.counted() as at_once:
                for peer in crew:
                    peer.send(REQUEST)
                given = [await peer.until(m.AssignJob) for peer in crew]
            with meter.counted() as ending:
                for peer, assigned in zip(crew, given, strict=True):
                    peer.finish(assigned)
                for peer in crew:
                    await peer.until(m.Recorded)
    return {
        "offering": offering, "listing": listing, "assigning": assigning, "at once": at_once,
        "ending": ending,
    }  # fmt: skip


Farms = dict[tuple[int, int], dict[str, Counter[str]]]


@pytest.fixture(scope="module")
def farms(tmp_path_factory: pytest.TempPathFactory) -> Farms:
    """By workers and pending jobs."""
    return {
        (workers, pending): trio.run(
            run_farm, tmp_path_factory.mktemp("farm"), workers, pending,
            clock=trio.testing.MockClock(autojump_threshold=0),
        )
        for workers in WORKERS for pending in PENDING
    }  # fmt: skip


def grown(found: Counter[str], base: Counter[str], times: int = 1) -> dict[str, tuple[int, int]]:
    """What is more than so many times that of the base, but for what chance adds: the order of
    tasks is Trio's, and costs a step or two."""
    return {
        what: (count, times * base[what])
        for what, count in found.items()
        if count > 1.05 * times * base[what] + (SLACK_STEPS if what == "steps" else 0)
    }


def without(counts: Counter[str], *names: str) -> Counter[str]:
    return Counter({what: count for what, count in counts.items() if what not in names})


def test_a_candidate_is_encoded_once_for_all_workers_and_lists(farms):
    for (_, pending), counts in farms.items():
        assert counts["offering"]["encoded candidates"] == pending
        for phase in ("listing", "assigning", "at once", "ending"):
            assert counts[phase]["encoded candidates"] == 0, phase


@pytest.mark.parametrize("pending", PENDING)
def test_an_offer_to_many_is_one_more_message_for_each_and_nothing_else(farms, pending):
    one = farms[1, pending]
    for workers in WORKERS:
        many = farms[workers, pending]
        assert grown(without(many["offering"], "messages"), one["offering"]) == {}
        assert many["offering"]["messages"] <= workers * one["offering"]["messages"]
        assert grown(many["listing"], one["listing"], workers) == {}


@pytest.mark.parametrize("pending", PENDING)
def test_an_assignment_costs_the_same_beside_other_workers(farms, pending):
    one = farms[1, pending]["assigning"]
    assert one["rows"] > 0
    assert one["steps"] > 0
    for workers in WORKERS:
        many = farms[workers, pending]["assigning"]
        assert grown(many, one) == {}
        assert many["messages"] == 2 * CYCLES, "an `AssignJob` and a `Recorded`"
        assert many["commits"] <= 2 * CYCLES, "the claim, and the result"
        assert many["calls off the loop"] <= CYCLES, "the result's fsync"
        assert many["steps"] <= STEPS_A_CYCLE * CYCLES


@pytest.mark.parametrize("workers", WORKERS)
def test_an_assignment_costs_the_same_beside_more_jobs(farms, workers):
    few, many = (farms[workers, pending]["assigning"] for pending in PENDING)
    assert grown(without(many, "rows"), few) == {}
    assert many["rows"] <= CYCLES * BLOCK_ROWS


@pytest.mark.parametrize("pending", PENDING)
def test_what_comes_at_once_is_one_transaction_and_one_turn(farms, pending):
    one = farms[1, pending]
    of_each = ("rows", "encodings", "encoded bytes", "messages")
    for workers in WORKERS:
        many = farms[workers, pending]
        for phase in ("at once", "ending"):
            assert many[phase]["commits"] == 1, phase
            assert grown(without(many[phase], *of_each), one[phase]) == {}, phase
            assert grown(without(many[phase], "steps"), one[phase], workers) == {}, phase
