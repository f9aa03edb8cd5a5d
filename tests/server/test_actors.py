"""A whole server on the virtual clock over the loopback, its actors killed under it."""

from __future__ import annotations

import sqlite3
from collections import deque
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from actors.ledger.errors import LedgerBusy, LedgerFailed
from actors.ledger.sqlite import SqliteLedger
from actors.server.assembly import Server
from actors.server.config import ServerConfig
from actors.server.dispatch import CORES
from actors.server.policies import load_policy
from tests.server.cluster_harness import cluster
from tests.server.farm_harness import BOTH, job
from transport import loopback
from transport import messages as m
from transport.codec import Decoder, encode

ACTORS = (
    "gateway", "registry", "feeder", "assigner", "coordinator", "pager", "reaper", "ledger",
    "logbook",
)  # fmt: skip


async def at_once(function, *arguments):
    await trio.lowlevel.checkpoint()
    return function(*arguments)


class Peer:
    """A connection that sends what it is told; `Ping`s are answered."""

    def __init__(self, network: loopback.Network) -> None:
        self._dealer = network.connector().connect("loop://server")
        self._decoder = Decoder(m.SERVER_MESSAGES)
        self._inbox: deque[m.Message] = deque()

    def send(self, *messages: m.Message) -> None:
        assert self._dealer.send([encode(message) for message in messages])

    async def until(self, kind: type[m.Message], secs: float = 20.0):
        """The next message of a type; others are dropped."""
        with trio.fail_after(secs):
            while True:
                while self._inbox:
                    message = self._inbox.popleft()
                    if isinstance(message, m.Ping):
                        self.send(m.Pong(nonce=message.nonce))
                    elif isinstance(message, kind):
                        return message
                for frames in await self._dealer.receive():
                    self._inbox.extend(map(self._decoder.decode, frames))

    async def silence(self, kind: type[m.Message], secs: float) -> None:
        with pytest.raises(trio.TooSlowError):
            await self.until(kind, secs)

    async def open(
        self, worker: str, slots: int = 1, running: list[m.ClaimRef] | None = None
    ) -> m.InitAck:
        self.send(m.InitConnection(versions=(1, 1), id=worker, capabilities=BOTH, running=running))
        ack = await self.until(m.InitAck)
        self.send(
            m.WorkerCapabilities(
                architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=slots
            ),
            m.RequestJobList(),
        )
        return ack

    async def candidates(self) -> list[str]:
        """Answers the next list with scores; returns the ids."""
        ids: list[str] = []
        while True:
            page = await self.until(m.JobListChunk)
            ids += self.score(page.candidates)
            if page.is_final:
                return ids

    def score(self, candidates: list[m.JobCandidate]) -> list[str]:
        ids = [c.job_id for c in candidates]
        self.send(m.RequestJobChunk(scores=[m.Score(i, 0, 0, False) for i in ids]))
        return ids

    async def request(self, kind: m.Kind = "build") -> m.AssignJob:
        self.send(m.RequestJob(kind=kind))
        given = await self.until(m.AssignJob)
        self.send(m.AssignJobResponse(given.job_id, given.assignment_id, True))
        return given

    async def ask(self, request: m.Message, answer: type[m.Message]):
        self.send(request)
        return await self.until(answer)

    async def submit(self, *names: str, **more) -> m.CmdSubmitted:
        self.send(m.CmdHello(versions=(1, 1)))
        jobs = [job(name) for name in names]
        return await self.ask(
            m.CmdSubmit(request=1, is_final=True, jobs=jobs, **more), m.CmdSubmitted
        )


@pytest.fixture
def serving(tmp_path: Path):
    @asynccontextmanager
    async def serve(**options):
        network = loopback.Network()
        ledger = SqliteLedger.open(tmp_path / "ledger.sqlite3", "s", wall=trio.current_time)
        ledger.recover(())
        server = Server(
            ServerConfig(state_dir=tmp_path, policy="simple", **options), server="s", epoch="1",
            policy=load_policy("simple"), ledger=ledger, router=network.router("loop://server"),
            wall_offset=lambda: 0.0, offload=at_once,
        )  # fmt: skip
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.run)
                await server.dispatch.started.wait()
                yield server, network
                nursery.cancel_scope.cancel()
        finally:
            ledger.close()

    return serve


def restarts(server: Server, actor: str) -> int:
    return server.supervisor.intensity.restarts.get(actor, 0)


@pytest.mark.parametrize("actor", ACTORS)
async def test_whoever_is_killed_sessions_and_running_jobs_go_on(
    serving, actor, autojump_clock
):  # 113
    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a", "b")
        await worker.open("w", slots=2)
        assert len(await worker.candidates()) == 2
        first = await worker.request()
        await trio.sleep(0.1)
        server.kill(actor)
        await trio.sleep(1.0)
        assert restarts(server, actor) == 1
        if actor in CORES:
            worker.score((await worker.until(m.JobOffer)).candidates)  # scored anew
        second = await worker.request()
        assert {first.job.name, second.job.name} == {"a", "b"}
        for given in (first, second):
            worker.send(m.JobCompleted(given.job_id, given.assignment_id))
            assert (await worker.until(m.Recorded)).assignment_id == given.assignment_id
        reply = await client.ask(m.CmdWait(request=3), m.CmdWaitReply)
        assert (reply.open, reply.failed) == (0, 0)


async def test_after_a_restart_of_the_pager_every_pending_job_is_offered_again(
    serving, autojump_clock
):
    async with serving() as (server, network):
        client, worker, silent = Peer(network), Peer(network), Peer(network)
        await client.submit("a", "b", "c")
        await worker.open("w")
        listed = await worker.candidates()
        silent.send(m.InitConnection(versions=(1, 1), id="v", capabilities=BOTH))
        server.kill("pager")
        offer = await worker.until(m.JobOffer)
        assert sorted(c.job_id for c in offer.candidates) == sorted(listed)
        await worker.silence(m.JobOffer, 10.0)
        await silent.silence(m.JobOffer, 1.0)


async def test_an_evaluation_is_not_handed_out_twice_by_a_new_assigner(
    serving, autojump_clock
):  # report 1
    async with serving() as (server, network):
        client, first, second = Peer(network), Peer(network), Peer(network)
        evaluation = m.SubmittedEvaluation(source=m.EvalSource(kind="graph-file", ref="g"))
        await client.submit(evaluations=[evaluation])
        await first.open("w1")
        given = await first.request("eval")
        await second.open("w2")
        await trio.sleep(0.1)
        server.kill("assigner")
        for _ in range(3):
            first.send(m.WorkerMetrics())
            second.send(m.RequestJob(kind="eval"))
            await second.silence(m.AssignJob, 5.5)
        first.send(m.JobCompleted(given.job_id, given.assignment_id))
        assert await first.until(m.Recorded)
        assert (await client.ask(m.CmdWait(request=2), m.CmdWaitReply)).open == 0


@pytest.mark.parametrize("actor", ["assigner", "pager"])
async def test_a_server_that_stops_assigns_nothing_whatever_is_restarted(
    serving, actor, autojump_clock
):  # 119
    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a", "b")
        await worker.open("w", slots=2)
        await worker.candidates()
        await worker.request()
        server.stop()
        await worker.until(m.Draining)
        server.kill(actor)
        await trio.sleep(1.0)
        worker.send(m.RequestJobList(), m.RequestJob(kind="build"))
        await worker.silence(m.AssignJob, 6.0)
        late = Peer(network)
        late.send(m.InitConnection(versions=(1, 1), id="v", capabilities=BOTH))
        assert (await late.until(m.Reject)).code == 403
        with trio.fail_after(10):
            while not server.dispatch.is_settled:
                await trio.sleep(0.1)


async def test_no_question_about_a_log_ends_the_logbook(serving, autojump_clock):
    async with serving() as (server, network):
        client = Peer(network)
        answer = await client.submit("a")
        [job_id] = answer.jobs.values()
        for offset in (0, 2**62, 2**63 - 1):
            reply = await client.ask(
                m.CmdLogs(request=2, job=job_id, offset=offset), m.CmdLogsReply
            )
            assert (reply.data, reply.offset) == (b"", offset)
        assert restarts(server, "logbook") == 0


async def test_the_coordinator_is_killed_while_seats_are_held_and_while_members_run(
    serving, autojump_clock
):
    async with serving() as (server, network):
        client, *workers = (Peer(network) for _ in range(3))
        for name, worker in zip("vw", workers, strict=True):
            await worker.open(name)
        told = await client.submit(clusters=[cluster("a", "b")])
        for worker in workers:
            worker.score((await worker.until(m.JobOffer)).candidates)
            worker.send(m.RequestJob(kind="build"))
        held = [await worker.until(m.AssignJob) for worker in workers]
        workers[0].send(m.AssignJobResponse(held[0].job_id, held[0].assignment_id, True))
        await trio.sleep(0.1)
        server.kill("coordinator")
        for worker in workers:
            assert (await worker.until(m.AbortCluster)).attempt == held[0].cluster.attempt
        assert restarts(server, "coordinator") == 1

        await trio.sleep(31)
        for worker in workers:
            worker.score((await worker.until(m.JobOffer)).candidates)
            worker.send(m.RequestJob(kind="build"))
        seats = [await worker.until(m.AssignJob) for worker in workers]
        for worker, seat in zip(workers, seats, strict=True):
            worker.send(m.AssignJobResponse(seat.job_id, seat.assignment_id, True))
        for worker in workers:
            await worker.until(m.StartCluster)
        server.kill("coordinator")
        for worker, seat in zip(workers, seats, strict=True):
            # In case the first one was not sent.
            assert (await worker.until(m.StartCluster)).attempt == seat.cluster.attempt
            worker.send(m.JobCompleted(seat.job_id, seat.assignment_id))
            await worker.until(m.Recorded)
        request = m.CmdCluster(request=4, cluster=told.clusters[0])
        shown = (await client.ask(request, m.CmdClusterReply)).cluster
        assert shown["status"] == "Completed"
        assert [a["outcome"] for a in shown["history"]] == ["PrepareFailed", "Succeeded"]


# -- hanging, and health ---------------------------------------------------------------------------


async def hang(*_):
    await trio.sleep_forever()


def hang_pager(server, patch):
    patch.setattr(server.pager_shell, "_take_events", hang)
    server.world.to_pager.send_nowait([])  # what the pager waits for now is the last it takes


def hang_reaper(server, patch):
    patch.setattr("actors.server.shells.SWEEP_SECS", 1e9)


def hang_logbook(server, patch):
    patch.setattr(server.world.logbook._waiting, "head", hang)
    server.kill("logbook")


def hang_commits(server, patch):
    patch.setattr(server.world.port.deferred, "head", hang)
    server.kill("ledger")


def hang_queries(server, patch):
    patch.setattr(server.world.port.queries, "head", hang)
    server.kill("ledger")


def hang_socket(server, patch):
    patch.setattr(server.dispatch, "_read_socket", hang)
    server.kill("gateway")


def hang_inbox(server, patch):
    patch.setattr(server.dispatch, "_read_inbox", hang)
    server.kill("gateway")


def hang_clock(server, patch):
    patch.setattr(server.dispatch, "_watch_clock", hang)
    server.kill("gateway")


HANGS = {
    "pager": hang_pager, "reaper": hang_reaper, "logbook": hang_logbook, "ledger": hang_commits,
    "ledger's queries": hang_queries, "gateway": hang_socket, "gateway's inbox": hang_inbox,
    "gateway's clock": hang_clock,
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
async def test_an_actor_that_hangs_is_found_and_health_never_says_ok_meanwhile(
    serving, name, autojump_clock, monkeypatch
):  # report: an actor that never returns
    actor = name.partition("'")[0]
    async with serving() as (server, network):
        client = Peer(network)
        await client.submit("a")
        assert (await client.ask(m.CmdHealth(request=2), m.CmdHealthReply)).problems == []
        with monkeypatch.context() as patch:
            HANGS[name](server, patch)
            await trio.sleep(1.0)
            before = restarts(server, actor)
            client.send(m.CmdHealth(request=3))
            if name in ("ledger's queries", "gateway's inbox"):
                await client.silence(m.CmdHealthReply, 5.0)  # which says enough
            else:
                [problem] = (await client.until(m.CmdHealthReply)).problems
                assert actor in problem
            await trio.sleep(2.0)
        with trio.fail_after(15):
            while restarts(server, actor) == before:
                await trio.sleep(0.1)
        await trio.sleep(1.0)
        assert restarts(server, actor) == before + 1
        asker = Peer(network)
        asker.send(m.CmdHello(versions=(1, 1)))
        assert (await asker.ask(m.CmdHealth(request=4), m.CmdHealthReply)).problems == []


async def test_health_is_not_ok_while_the_ledger_refuses_writes(
    serving, autojump_clock, monkeypatch
):
    async with serving() as (server, network):
        client = Peer(network)
        client.send(m.CmdHello(versions=(1, 1)))
        ledger = server.world.port.ledger
        with monkeypatch.context() as patch:
            patch.setattr(ledger._writer, "db", FullDisk(ledger._writer.db))
            [problem] = (await client.ask(m.CmdHealth(request=1), m.CmdHealthReply)).problems
        assert "database or disk is full" in problem
        assert "ledger.sqlite3" in problem
        assert (await client.ask(m.CmdHealth(request=2), m.CmdHealthReply)).problems == []
        server.stop()
        [problem] = (await client.ask(m.CmdHealth(request=3), m.CmdHealthReply)).problems
        assert problem == "the server is stopping"


class FullDisk:
    """A connection whose every update finds the disk full."""

    def __init__(self, db):
        self._db = db

    def __getattr__(self, name):
        return getattr(self._db, name)

    def execute(self, sql, *arguments):
        if sql.startswith("UPDATE"):
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_FULL, "SQLITE_FULL"
            raise error
        return self._db.execute(sql, *arguments)


async def test_the_status_tells_restarts_and_queues_of_every_actor(serving, autojump_clock):
    async with serving() as (server, network):
        client = Peer(network)
        client.send(m.CmdHello(versions=(1, 1)))
        for actor in ACTORS:
            server.kill(actor)
            await trio.sleep(1.0)
        told = (await client.ask(m.CmdStatus(request=1), m.CmdStatusReply)).status["server"]
        assert told["actors"].keys() == {*ACTORS, "health"}
        assert {name: told["actors"][name]["restarts"] for name in ACTORS} == dict.fromkeys(
            ACTORS, 1
        )
        assert all(actor["queue"] >= 0 for actor in told["actors"].values())


async def test_what_the_ledger_did_not_take_before_a_restart_is_reported_again(
    serving, autojump_clock, monkeypatch
):
    def fail(*_):
        raise LedgerFailed("disk full")

    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a")
        await worker.open("w")
        await worker.candidates()
        given = await worker.request()
        await trio.sleep(0.1)
        monkeypatch.setattr(server.world.port.ledger, "apply", fail)
        worker.send(m.JobCompleted(given.job_id, given.assignment_id))
        await trio.sleep(0.1)
        server.kill("feeder")
        monkeypatch.undo()
        assert (await worker.until(m.Reject)).code == 400
        again = Peer(network)
        claim = m.ClaimRef(given.job_id, given.assignment_id)
        assert (await again.open("w", running=[claim])).resumed == [given.assignment_id]
        again.send(m.JobCompleted(given.job_id, given.assignment_id))
        await again.until(m.Recorded)
        reply = await client.ask(m.CmdWait(request=3), m.CmdWaitReply)
        assert (reply.open, reply.failed) == (0, 0)


async def test_what_came_with_a_message_that_dispatch_fails_over_is_reported_again_once(
    serving, autojump_clock, monkeypatch
):
    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a")
        await worker.open("w")
        await worker.candidates()
        given = await worker.request()
        await trio.sleep(0.1)

        def fail(*_):
            raise ValueError("a bug")

        for life in range(2):
            server.dispatch._farm.assigner.score = fail
            worker.send(
                m.RequestJobChunk(scores=[]), m.JobCompleted(given.job_id, given.assignment_id)
            )
            await trio.sleep(0.5)
            if life:
                break
            assert (await worker.until(m.Reject)).code == 400
            worker = Peer(network)
            await worker.open("w", running=[m.ClaimRef(given.job_id, given.assignment_id)])
            await worker.candidates()
        # The same again: the session goes on, lest the two fail each other for ever.
        await worker.silence(m.Reject, 30.0)
        assert restarts(server, "gateway") + restarts(server, "assigner") == 2


@pytest.mark.parametrize("outcome", ["committed", "failed"])
async def test_what_a_dead_dispatch_had_deferred_is_nothing_to_its_successor(
    serving, autojump_clock, monkeypatch, outcome
):  # chaos, seed 102
    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a")
        await worker.open("w")
        await worker.candidates()
        given = await worker.request()
        await trio.sleep(0.1)
        ledger = server.world.port.ledger
        apply, calls = ledger.apply, []

        def locked_and_killed(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                server.kill("feeder")
                raise LedgerBusy("locked")
            monkeypatch.undo()
            if outcome == "failed":
                raise LedgerFailed("disk full")
            return apply(*arguments)

        monkeypatch.setattr(ledger, "apply", locked_and_killed)
        worker.send(m.JobCompleted(given.job_id, given.assignment_id))
        await trio.sleep(1.0)
        assert len(calls) == 2
        assert restarts(server, "feeder") == 1
        assert restarts(server, "gateway") == 0
        if outcome == "failed":
            await worker.until(m.Reject)
            worker = Peer(network)
            await worker.open("w", running=[m.ClaimRef(given.job_id, given.assignment_id)])
            worker.send(m.JobCompleted(given.job_id, given.assignment_id))
            await worker.until(m.Recorded)
        reply = await client.ask(m.CmdWait(request=3), m.CmdWaitReply)
        assert (reply.open, reply.failed) == (0, 0)


@pytest.mark.parametrize("actor", ACTORS)
async def test_a_client_may_kill_actors_of_a_server_with_chaos(serving, autojump_clock, actor):
    async with serving(chaos=True) as (server, network):
        client = Peer(network)
        client.send(m.CmdHello(versions=(1, 1)))
        assert await client.ask(m.CmdKillActor(request=1, actor=actor), m.CmdDone)
        await trio.sleep(1.0)
        assert restarts(server, actor) == 1
        refused = await client.ask(m.CmdKillActor(request=2, actor="nobody"), m.CmdError)
        assert (refused.code, refused.message) == (2, "no actor 'nobody' runs now")


async def test_a_ledger_that_takes_nothing_is_said_once_and_waited_for(
    serving, autojump_clock, monkeypatch, caplog
):  # chaos
    def fail(*_):
        raise LedgerFailed("ledger.sqlite3: database or disk is full (SQLITE_FULL)")

    caplog.set_level("INFO", "headrace.dispatch")
    async with serving() as (server, network):
        client, worker = Peer(network), Peer(network)
        await client.submit("a", "b")
        await worker.open("w", slots=2)
        await worker.candidates()
        given = await worker.request()
        await trio.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(server.world.port.ledger, "apply", fail)
            worker.send(m.JobCompleted(given.job_id, given.assignment_id))
            for _ in range(3):
                worker.send(m.RequestJob(kind="build"))
                await worker.silence(m.AssignJob, 5.0)
        await worker.until(m.Recorded)
        worker.send(m.RequestJobList())
        assert len(await worker.candidates()) == 1
        second = await worker.request()
        worker.send(m.JobCompleted(second.job_id, second.assignment_id))
        await worker.until(m.Recorded)
    begun = "the ledger does not take writes, nothing is assigned until it does: "
    cause = "ledger.sqlite3: database or disk is full (SQLITE_FULL)"
    assert caplog.messages == [begun + cause, "the ledger takes writes again"]
