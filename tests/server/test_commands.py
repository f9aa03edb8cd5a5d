"""What clients ask, over the cores of a server."""

from __future__ import annotations

import pytest

from actors.ledger.port import Answer, Query
from actors.server.effects import StopRequested
from actors.server.farm import COMMAND_SILENCE_SECS
from tests.server.farm_harness import BOTH, Harness, job
from transport import messages as m
from transport.codec import encode
from transport.interface import Incoming


def ask(farm: Harness, message: m.Message, peer: str = "client") -> m.Message:
    """The last answer to one request."""
    return farm.send(peer, message)[-1]


@pytest.fixture
def farm(make_farm) -> Harness:
    harness = make_farm()
    harness.send("client", m.CmdHello(versions=(1, 1)))
    return harness


# -- the connection ----------------------------------------------------------------------------


def test_a_client_that_only_looks_at_the_status_is_not_forgotten(farm):
    for _ in range(4):
        farm.wait(COMMAND_SILENCE_SECS / 2, step=10)
        farm.send("client", m.CmdStatus(request=1))
        assert farm.farm.out.shell_requests.pop() == (b"client", m.CmdStatus(request=1))


def test_a_silent_client_is_forgotten_and_told_so_when_it_comes_back(farm):
    farm.wait(COMMAND_SILENCE_SECS + 10, step=10)
    answer = ask(farm, m.CmdWait(request=1))
    assert isinstance(answer, m.Reject)
    farm.send("client", m.CmdHello(versions=(1, 1)))
    assert isinstance(ask(farm, m.CmdWait(request=1)), m.CmdWaitReply)


@pytest.mark.parametrize(
    "message", [m.RequestJob(kind="build"), m.RequestJobList(), m.Draining(), m.Goodbye()]
)
def test_a_workers_message_on_a_clients_connection_is_refused(farm, message):
    answer = ask(farm, message)
    assert (answer.code, answer.reason) == (400, "no session")


def test_a_worker_is_no_client(farm):
    farm.worker("w")
    for message in (m.CmdHello(versions=(1, 1)), m.CmdStatus(request=1)):
        answer = ask(farm, message, "w")
        assert (type(answer), answer.code) == (m.Error, 400)
    assert not farm.farm.out.shell_requests


# -- names -------------------------------------------------------------------------------------


@pytest.fixture
def named(farm) -> Harness:
    farm.worker("w")
    farm.submit(job("done", job_id="j-done"), job("live", job_id="j-live"),
                job("x", job_id="y1"), job("z", job_id="y2"))  # fmt: skip
    farm.complete("w", farm.request("w"))
    assert farm.status("done") == "Completed"
    return farm


@pytest.mark.parametrize("target", ["j-live", "j-l", "/nix/store/live.drv", "live"])
def test_a_job_goes_by_id_prefix_derivation_or_name(named, target):
    assert ask(named, m.CmdCancel(request=1, targets=[target])).aborted == ["j-live"]


@pytest.mark.parametrize("target", ["j-done", "j-d", "/nix/store/done.drv", "done"])
def test_a_job_that_has_ended_is_found_and_stays_as_it_is(named, target):
    reply = ask(named, m.CmdCancel(request=1, targets=[target]))
    assert (reply.aborted, reply.requested, reply.unchanged) == ([], [], ["j-done"])
    assert named.status("done") == "Completed"


@pytest.mark.parametrize("target", ["y", "nothing", "", "%", "'"])
def test_what_fits_none_or_several_is_refused_and_nothing_of_the_request_is_done(named, target):
    refused = ask(named, m.CmdCancel(request=1, targets=["j-live", target]))
    assert (type(refused), refused.code) == (m.CmdError, 2)
    assert named.status("live") == "Queued"


def test_a_target_that_is_named_twice_counts_once(named):
    reply = ask(named, m.CmdCancel(request=1, targets=["live", "j-live", "live"]))
    assert reply.aborted == ["j-live"]


# -- waiting and lists -------------------------------------------------------------------------


def test_waiting_counts_what_is_open_failed_and_unknown(farm):
    farm.worker("w", slots=2)
    farm.submit(job("good"), job("bad"), job("open"))
    first, second = farm.request("w"), farm.request("w")
    farm.complete("w", first)
    farm.fail("w", second, "Permanent")
    ids = [farm.ids[n] for n in ("good", "bad", "open")]
    reply = ask(farm, m.CmdWait(request=1, jobs=[*ids, *ids, "nope"]))
    assert (reply.open, reply.failed, reply.unknown) == (2, 2, ["nope"])
    assert ask(farm, m.CmdWait(request=1, jobs=ids[2:])).open == 1
    everything = ask(farm, m.CmdWait(request=1))
    assert (everything.open, everything.failed) == (1, 1)


def test_jobs_come_in_pages_in_id_order_of_the_status_asked_for(farm):
    farm.submit(*(job(f"n{n}", job_id=f"j{n}") for n in range(7)), job("late", "n0", job_id="k"))
    ids, after = [], None
    while True:
        page = ask(farm, m.CmdJobs(request=1, limit=3, after=after, status="Queued"))
        ids.append([line["job_id"] for line in page.jobs])
        if page.next is None:
            break
        after = page.next
    assert ids == [["j0", "j1", "j2"], ["j3", "j4", "j5"], ["j6"]]
    assert ask(farm, m.CmdJobs(request=1, status="Odd")).jobs == []


# -- priority and drains -----------------------------------------------------------------------


def test_a_job_that_is_prioritized_while_it_waits_goes_first(farm):
    farm.worker("w")
    farm.submit(job("a"), job("b"), job("c"))
    assert isinstance(ask(farm, m.CmdPrioritize(request=1, targets=["b", "c"])), m.CmdDone)
    ask(farm, m.CmdPrioritize(request=1, targets=["b"], prioritized=False))
    assert farm.request("w").job.name == "c"


def test_a_pending_job_that_is_submitted_again_as_prioritized_goes_first(farm):
    farm.worker("w")
    farm.submit(job("a"), job("b"))
    farm.submit(job("b", prioritized=True))
    assert farm.request("w").job.name == "b"


def test_priority_outlives_the_server(farm):
    farm.submit(job("a"), job("b"))
    ask(farm, m.CmdPrioritize(request=1, targets=["b"]))
    farm.restart()
    farm.worker("w")
    assert farm.request("w").job.name == "b"


def test_only_a_drained_worker_can_be_undrained(farm):
    refused = ask(farm, m.CmdUndrain(request=1, worker="w"))
    assert (type(refused), refused.code) == (m.CmdError, 1)
    ask(farm, m.CmdDrain(request=1, worker="w", reason="disk"))
    farm.worker("w")
    [shown] = farm.farm.status(farm.now)["workers"]
    assert (shown["state"], shown["drain_reason"]) == ("draining", "disk")
    assert isinstance(ask(farm, m.CmdUndrain(request=1, worker="w")), m.CmdDone)


# -- cancelling --------------------------------------------------------------------------------


def test_of_a_graph_that_is_cancelled_nothing_is_assigned_afterwards(farm):  # report 3
    workers = [f"w{n}" for n in range(4)]
    for name in workers:
        farm.worker(name, can=BOTH)
    submitted = farm.submit(*(job(f"j{n}") for n in range(3_000)), job("other"))
    running = [farm.request(name) for name in workers]
    mine = [i for path, i in submitted.jobs.items() if "other" not in path]
    reply = ask(farm, m.CmdCancel(request=2, targets=mine))
    assert len(reply.aborted) == 3_000 - 4
    assert sorted(reply.requested) == sorted(g.job_id for g in running)
    for name, given in zip(workers, running, strict=True):
        [abort] = [a for a in farm.answers[name.encode()] if isinstance(a, m.AbortJob)]
        assert abort.assignment_id == given.assignment_id
        farm.fail(name, given, "Aborted")
    given = [farm.request(name) for name in workers]
    assert [g.job.name for g in given if g] == ["other"]
    assert farm.ledger.counts() == {"Aborted": 3_000, "Building": 1}


def test_a_cancelled_job_that_completes_first_is_completed(farm):
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    ask(farm, m.CmdCancel(request=1, targets=["a"]))
    farm.complete("w", given)
    assert (farm.status("a"), farm.outcomes("a")) == ("Completed", ["Completed"])


@pytest.mark.parametrize("kind", ["Transient", "Permanent", "Canceled", "InputsUnavailable"])
def test_a_cancelled_job_is_aborted_however_its_worker_gives_it_back(farm, kind):
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    ask(farm, m.CmdCancel(request=1, targets=["a"]))
    farm.fail("w", given, kind)
    assert farm.status("a") == "Aborted"


def test_a_cancelled_job_whose_worker_is_lost_is_aborted_and_not_repeated(farm):
    farm.worker("w")
    farm.submit(job("a"), job("b", "a"))
    farm.request("w")
    ask(farm, m.CmdCancel(request=1, targets=["a"]))
    farm.lose("w")
    farm.wait(31, step=1)
    assert (farm.status("a"), farm.status("b")) == ("Aborted", "DependencyFailed")


def test_cancelling_what_waits_for_a_retry_ends_it(farm):
    farm.worker("w")
    farm.submit(job("a"))
    farm.fail("w", farm.request("w"), "Transient")
    assert ask(farm, m.CmdCancel(request=1, targets=["a"])).aborted == [farm.ids["a"]]
    farm.wait(31, step=1)
    assert farm.request("w") is None


# -- bounds ------------------------------------------------------------------------------------


def test_a_full_ledger_queue_refuses_the_request_and_nothing_else(farm):
    farm.farm.refuse_query(Query("foreign", "foreign_changes"), farm.now)
    farm.farm.receive(_frame(m.CmdJobs(request=7)), farm.now)
    [query], farm.farm.out.queries = farm.farm.out.queries, []
    farm.farm.refuse_query(query, farm.now)
    farm.wait(0.5)
    refused = farm.answers[b"client"][-1]
    assert (refused.request, refused.code) == (7, 1)
    assert isinstance(ask(farm, m.CmdJobs(request=8)), m.CmdJobsReply)


def test_a_ledger_that_cannot_be_read_is_said_in_one_line(farm):
    farm.farm.receive(_frame(m.CmdJobs(request=7)), farm.now)
    [query], farm.farm.out.queries = farm.farm.out.queries, []
    farm.take(_failed_answer(query.token))
    refused = farm.answers[b"client"][-1]
    assert (refused.code, "disk I/O" in refused.message) == (1, True)
    farm.take(_failed_answer(query.token))  # a second answer is nobody's
    assert farm.answers[b"client"][-1] is refused


def _frame(message: m.Message) -> Incoming:
    return Incoming(b"client", [encode(message)], None)


def _failed_answer(token: str) -> Answer:
    return Answer(token, None, "disk I/O error")


# -- faults ------------------------------------------------------------------------------------


def test_a_stopping_server_says_that_it_is_worth_another_try(farm):  # chaos, seed 1
    farm.take(StopRequested())
    refused = ask(farm, m.CmdSubmit(request=1, is_final=True, jobs=[job("a")]))
    assert (refused.code, refused.message) == (1, "the server is stopping: submit later")


def test_actors_can_be_killed_only_with_chaos(make_farm):
    kill = m.CmdKillActor(request=3, actor="pager")
    harness = make_farm()
    harness.send("client", m.CmdHello(versions=(1, 1)))
    answer = ask(harness, kill)
    assert (type(answer), answer.code) == (m.Error, 400)
    assert "CmdKillActor" in answer.message
    assert not harness.farm.out.shell_requests
    harness = make_farm(chaos=True)
    assert ask(harness, kill).reason == "no session: say CmdHello first"
    harness.send("client", m.CmdHello(versions=(1, 1)))
    harness.send("client", kill)
    assert harness.farm.out.shell_requests == [(b"client", kill)]
    harness.worker("w")
    answer = ask(harness, kill, "w")
    assert (type(answer), answer.code) == (m.Error, 400)
    assert len(harness.farm.out.shell_requests) == 1
