from __future__ import annotations

import pytest
import trio

from bin.client import Client, connect, connected, steady
from bin.errors import CommandError, ServerUnreachable
from transport import messages as m
from transport.interface import ConnectionLost

HERE = "tcp://127.0.0.1:7420"
DONE = m.CmdDone(request=0, message="done")
DRAIN = m.CmdDrain(request=0, worker="w")


@pytest.fixture
async def client(server):
    made = await connect(server, HERE, 1)
    yield made
    made.close()


async def test_a_request_gets_its_answer(server, client):
    server.on(m.CmdDrain, DONE)
    assert (await client.ask(DRAIN, m.CmdDone)).message == "done"
    assert (await client.ask(DRAIN, m.CmdDone)).message == "done"
    assert [r.request for r in server.requests] == [1, 2]


async def test_late_answers_and_pings_are_told_apart(server, client):
    def answer(message):
        server.dealers[0].push(m.CmdDone(request=77, message="late"))
        return [m.Ping(nonce=5), m.Draining(), DONE]

    server.on(m.CmdDrain, answer)
    assert (await client.ask(DRAIN, m.CmdDone)).message == "done"
    assert server.requests[-1] == m.Pong(nonce=5)


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (4, 4), (500, 1)])
async def test_a_refusal_keeps_its_code(server, client, code, exit_code):
    server.on(m.CmdDrain, m.CmdError(request=0, code=code, message="no such worker"))
    with pytest.raises(CommandError, match="no such worker") as error:
        await client.ask(DRAIN, m.CmdDone)
    assert error.value.code == exit_code


async def test_an_error_of_the_protocol(server, client):
    server.on(m.CmdDrain, m.Error(code=400, message="CmdDrain: worker: too long"))
    with pytest.raises(CommandError, match="worker: too long"):
        await client.ask(DRAIN, m.CmdDone)


async def test_a_server_that_is_silent(autojump_clock, server, client):
    with pytest.raises(ServerUnreachable, match=f"no answer from {HERE} within 30 s"):
        await client.ask(DRAIN, m.CmdDone)


async def test_a_full_connection_is_tried_again(autojump_clock, server, client):
    server.on(m.CmdDrain, DONE)
    server.full = 3
    assert (await client.ask(DRAIN, m.CmdDone)).message == "done"


async def test_a_full_connection_for_ever(autojump_clock, server, client):
    server.full = 10**9
    with pytest.raises(ServerUnreachable, match="no answer"):
        await client.ask(DRAIN, m.CmdDone)


async def test_what_is_no_headrace_server(server, client):
    server.dealers[0].push_raw(b"HTTP/1.1 400 Bad Request")
    with pytest.raises(CommandError, match="is it a headrace server") as error:
        await client.ask(DRAIN, m.CmdDone)
    assert error.value.code == 3


# -- connecting ------------------------------------------------------------------------------


async def test_nobody_there(autojump_clock, server):
    server.down = 10**9
    start = trio.current_time()
    with pytest.raises(ServerUnreachable) as error:
        await connect(server, HERE, 5)
    assert str(error.value) == (
        "cannot reach a server at tcp://127.0.0.1:7420: connection reset by peer; start one with "
        "`headrace server`, or say where it is with --server or HEADRACE_SERVER"
    )
    assert error.value.code == 3
    assert trio.current_time() - start == 5
    assert all(dealer.closed for dealer in server.dealers)


async def test_somebody_who_says_nothing(autojump_clock, server):
    server.greeting = None
    with pytest.raises(ServerUnreachable, match="no answer"):
        await connect(server, HERE, 5)
    assert server.dealers[0].closed


async def test_a_server_that_is_just_starting(autojump_clock, server):
    server.down = 3
    client = await connect(server, HERE, 5)
    assert len(server.dealers) == 4
    client.close()


@pytest.mark.parametrize(
    "refusal",
    [
        m.Reject(code=403, reason="unknown key"),
        m.CmdError(request=0, code=4, message="unknown key"),
    ],
)
async def test_a_refused_client_does_not_insist(server, refusal):
    server.greeting = refusal
    with pytest.raises(CommandError, match="unknown key") as error:
        await connect(server, HERE, 5)
    assert error.value.code == 4
    assert len(server.dealers) == 1


async def test_a_connection_lost_within_a_block(server, cut):
    server.on(m.CmdDrain, lambda _: [cut])
    with pytest.raises(ServerUnreachable, match="was lost: connection reset"):
        async with connected(server, HERE, 1) as client:
            await client.ask(DRAIN, m.CmdDone)
    assert server.dealers[0].closed


# -- submitting ------------------------------------------------------------------------------


def part(is_final: bool) -> m.CmdSubmit:
    return m.CmdSubmit(request=0, is_final=is_final)


async def test_parts_have_one_number_and_one_answer(server, client):
    def answer(message):
        if not message.is_final:
            return []
        return [
            m.CmdSubmitted(request=0, is_final=False, submission="s", jobs={"/a": "1"}),
            m.CmdSubmitted(
                request=0, is_final=True, submission="s", jobs={"/b": "2"}, evaluations=["e"]
            ),
        ]

    server.on(m.CmdSubmit, answer)
    whole = await client.submit([part(False), part(True)])
    assert (whole.submission, whole.jobs, whole.evaluations) == ("s", {"/a": "1", "/b": "2"}, ["e"])
    assert [r.request for r in server.requests] == [1, 1]


async def test_a_submission_refused(server, client):
    server.on(m.CmdSubmit, m.CmdError(request=0, code=2, message="/a needs /b: -r was forgotten"))
    with pytest.raises(CommandError, match="-r was forgotten"):
        await client.submit([part(True)])


async def test_a_submission_cut_off(server, client, cut):
    server.on(m.CmdSubmit, lambda _: [cut])
    with pytest.raises(ServerUnreachable, match="submit the file again"):
        await client.submit([part(True)])


async def test_a_job_that_no_frame_holds(server, client):
    job = m.SubmittedJob(
        drv_path="/nix/store/big.drv", name="big", system="s", required_features=[],
        outputs={"out": "/o"}, input_drvs=[], input_srcs=[], args=["x" * 2**20] * 9,
    )  # fmt: skip
    with pytest.raises(CommandError, match=r"/nix/store/big\.drv: \d+ bytes, more than"):
        await client.submit([m.CmdSubmit(request=0, is_final=True, jobs=[job])])
    assert server.requests == []


# -- across restarts -------------------------------------------------------------------------


async def test_a_steady_client_outlives_its_server(autojump_clock, server, cut):
    server.on(m.CmdStatus, lambda _: [cut], m.CmdStatusReply(request=0, status={"a": 1}))
    notes: list[str] = []
    async with steady(server, HERE, 1, notes.append) as asker:
        server.down = 20
        reply = await asker.ask(m.CmdStatus(request=0), m.CmdStatusReply)
    assert reply.status == {"a": 1}
    assert notes == [
        "the server is gone (connection reset by peer); waiting for it",
        "the server at tcp://127.0.0.1:7420 is back",
    ]
    assert all(dealer.closed for dealer in server.dealers)


async def test_a_server_that_never_comes_back(autojump_clock, server, cut):
    server.on(m.CmdStatus, lambda _: [cut])
    async with steady(server, HERE, 1, lambda _: None) as asker:
        server.down = 10**9
        with pytest.raises(ServerUnreachable, match="cannot reach a server"):
            await asker.ask(m.CmdStatus(request=0), m.CmdStatusReply)


async def test_a_session_that_a_restarted_server_does_not_know(server):
    server.on(
        m.CmdStatus,
        m.Reject(code=400, reason="no session: say CmdHello first"),
        m.CmdStatusReply(request=0, status={}),
    )
    async with steady(server, HERE, 1, lambda _: None) as asker:
        assert (await asker.ask(m.CmdStatus(request=0), m.CmdStatusReply)).status == {}
    assert len(server.dealers) == 2


async def test_greeting_reports_a_lost_connection(server):
    server.greeting = None
    dealer = server.connect(HERE)
    dealer.cut()
    with pytest.raises(ConnectionLost):
        await Client(dealer, HERE).greet()
