"""Clusters through the ends of servers and of dispatch, and beside other servers."""

from __future__ import annotations

import pytest

from actors.server.effects import Neighbours, StopRequested
from tests.server.cluster_harness import Clusters, member
from tests.server.farm_harness import job
from transport import messages as m


@pytest.fixture
def farm(tmp_path):
    farm = Clusters(tmp_path)
    yield farm
    farm.ledger.close()


def statuses(farm, *names: str) -> list[str]:
    return [farm.status(name) for name in names]


def ref(given: m.AssignJob) -> m.ClaimRef:
    return m.ClaimRef(given.job_id, given.assignment_id)


def come_back(farm, peer: str, *running: m.AssignJob) -> m.InitAck:
    """The worker opens a session with what it still runs; returns the acknowledgement."""
    answers = farm.worker(peer, running=tuple(map(ref, running)))
    [ack] = [a for a in answers if isinstance(a, m.InitAck)]
    return ack


@pytest.fixture
def running(farm):
    """A running cluster of two; (cluster, seat of v, seat of w)."""
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=1)
    farm.run("v", "w")
    return cluster_id, farm.seat("v"), farm.seat("w")


@pytest.mark.parametrize("accepted", [(), ("v",)])
def test_unstarted_attempts_of_a_dead_server_are_closed_at_the_start(farm, accepted):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept(*accepted)
    farm.restart()
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert farm.cluster_status(cluster_id) == "Queued"
    assert (farm.open_rows(), statuses(farm, "a", "b")) == (0, ["Queued", "Queued"])
    farm.join("v", "w")
    farm.idle("v", "w")
    assert farm.open_rows() == 0  # a retry waits, whoever tries
    farm.wait(31)
    farm.run("v", "w")
    assert farm.cluster_status(cluster_id) == "Running"


def test_a_started_attempt_goes_on_with_its_workers(farm, running):
    cluster_id, of_v, of_w = running
    farm.complete("v", of_v)
    farm.restart()
    assert farm.attempts(cluster_id) == [(True, None)]
    assert farm.status(of_v.job.name) == "Building"  # reported, waits for the other
    assert come_back(farm, "w", of_w).resumed == [of_w.assignment_id]
    assert farm.last("w", m.StartCluster) is None
    farm.complete("w", of_w)
    assert statuses(farm, "a", "b") == ["Completed", "Completed"]
    assert farm.cluster_status(cluster_id) == "Completed"


def test_a_member_whose_worker_stays_away_is_lost(farm, running):
    cluster_id, _, of_w = running
    farm.restart()
    come_back(farm, "w", of_w)
    farm.wait(100)
    farm.send("w", m.WorkerMetrics())
    farm.wait(25)
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.last("w", m.AbortCluster) is not None
    farm.fail("w", of_w, "Aborted")
    assert (farm.cluster_status(cluster_id), farm.budget(cluster_id)) == ("Queued", 0)
    assert statuses(farm, "a", "b") == ["Queued", "Queued"]


def test_a_start_that_no_member_heard_of_counts_as_lost(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=1)
    farm.idle("v", "w")
    farm.accept("v")
    farm.defers = True
    farm.accept("w")
    for batch in farm.deferred:  # committed, and then the server ends
        farm.ledger.apply(batch.writes, 0.0, 1.0)
    farm.deferred, farm.defers = [], False
    farm.restart()
    assert farm.attempts(cluster_id) == [(True, None)]
    come_back(farm, "v")  # it dropped what it held
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.budget(cluster_id) == 0


def test_a_report_before_the_verdict_was_written_decides_after_the_restart(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster(member("main", "main", primary=True), "side")
    farm.idle("v", "w")
    main, side = ("v", "w") if farm.seat("v").job.name == "main" else ("w", "v")
    farm.accept(main)
    farm.defers = True
    farm.accept(side)
    farm.fail(main, farm.seat(main), "Timeout")
    for batch in farm.deferred:
        farm.ledger.apply(batch.writes, 0.0, 1.0)
    farm.deferred, farm.defers = [], False
    farm.restart()
    assert farm.cluster_status(cluster_id) == "Failed"
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.status("main") == "TimedOut"
    come_back(farm, side)
    assert farm.status("side") == "Aborted"


@pytest.mark.parametrize("budget", [0, 1])
def test_survivors_are_told_again_and_settle_by_the_verdict(farm, budget):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=budget)
    farm.run("v", "w")
    given = farm.seat("w")
    farm.fail("v", farm.seat("v"), "Permanent")
    farm.restart()
    farm.forget_told()
    assert come_back(farm, "w", given).resumed == [given.assignment_id]
    assert farm.last("w", m.AbortCluster) is not None
    farm.fail("w", given, "Aborted")
    assert farm.status(given.job.name) == ("Queued" if budget else "Aborted")
    assert farm.cluster_status(cluster_id) == ("Queued" if budget else "Failed")


def test_a_retry_delay_outlives_the_server(farm, running):
    _, of_v, of_w = running
    farm.fail("v", of_v, "Transient")
    farm.fail("w", of_w, "Aborted")
    farm.wait(20)
    farm.restart()
    farm.join("v", "w")
    farm.idle("v", "w")
    assert farm.open_rows() == 0
    farm.wait(10.5)
    farm.idle("v", "w")
    assert farm.open_rows() == 2


def test_a_restarted_dispatch_gives_held_seats_back(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.start_dispatch()
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert farm.last("v", m.AbortCluster).attempt == farm.seat("v").cluster.attempt
    assert farm.last("w", m.AbortCluster) is not None
    assert farm.open_rows() == 0


def test_a_restarted_dispatch_keeps_what_runs(farm, running):  # 113
    cluster_id, of_v, of_w = running
    farm.forget_told()
    farm.start_dispatch()
    assert farm.attempts(cluster_id) == [(True, None)]
    assert farm.last("v", m.StartCluster).roster == farm.last("w", m.StartCluster).roster
    assert farm.last("v", m.AssignJob) is None
    farm.complete("v", of_v)
    farm.complete("w", of_w)
    assert farm.cluster_status(cluster_id) == "Completed"


def test_a_restarted_dispatch_remembers_what_was_reported(farm, running):
    cluster_id, of_v, of_w = running
    farm.complete("v", of_v)
    farm.start_dispatch()
    farm.complete("w", of_w)
    assert farm.cluster_status(cluster_id) == "Completed"
    assert statuses(farm, "a", "b") == ["Completed", "Completed"]


def test_a_stopping_server_gives_held_seats_back_and_places_nothing(farm):
    farm.join("v", "w", slots=2)
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.take(StopRequested())
    assert farm.last("v", m.AbortCluster) is not None
    assert farm.farm.handout.is_settled
    farm.wait(35)
    farm.idle("v", "w")
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]


# -- several servers ---------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path, farm):
    other = Clusters(tmp_path, prefix="other")
    other.others_alive = frozenset({farm.name})
    other.now = farm.now
    other.start_dispatch()
    farm.others_alive = frozenset({other.name})
    yield other
    other.ledger.close()


def look_around(*farms, dead: frozenset[str] = frozenset()) -> None:
    for farm in farms:
        farm.take(Neighbours(dead, farm.now, 0.0))


def test_a_cluster_of_one_server_is_placed_by_another(farm, other):
    cluster_id = farm.submit_cluster("a", "b")
    other.ids.update(farm.ids)
    look_around(other)
    other.join("x", "y")
    other.run("x", "y")
    look_around(farm)
    farm.join("v", "w")
    farm.idle("v", "w")
    assert farm.attempts(cluster_id) == [(True, None)]
    other.complete("x", other.seat("x"))
    other.complete("y", other.seat("y"))
    look_around(farm)
    assert (farm.cluster_status(cluster_id), farm.farm.coordinator.clusters) == ("Completed", {})
    assert not farm.farm.feeder.nodes


def test_two_servers_never_place_one_cluster_twice(farm, other):  # 139
    cluster_id = farm.submit_cluster("a", "b")
    other.ids.update(farm.ids)
    look_around(other)
    farm.join("v", "w")
    other.join("x", "y")
    farm.idle("v", "w")
    other.idle("x", "y")  # it has not seen yet what the first one did
    assert other.last("x", m.AssignJob) is None
    assert farm.attempts(cluster_id) == [(False, None)]
    assert farm.open_rows() == 2
    assert not other.farm.assigner.claims
    look_around(other)
    farm.accept("v", "w")
    other.wait(12)
    other.idle("x", "y")
    assert farm.open_rows() == 2


def test_half_a_claim_is_none(farm, other):  # 139
    cluster_id = farm.submit_cluster("c", "d")
    other.ids.update(farm.ids)
    look_around(other)
    # A member is taken behind the first one's back.
    other.ledger._writer.db.execute(
        "UPDATE job SET status = 'Building' WHERE id = ?", (farm.ids["d"],)
    )
    farm.join("v", "w")
    farm.idle("v", "w")
    assert farm.last("v", m.AssignJob) is None
    assert (farm.attempts(cluster_id), farm.open_rows()) == ([], 0)


def test_a_cancelled_cluster_of_another_server_is_aborted_there(farm, other):
    cluster_id = farm.submit_cluster("a", "b")
    look_around(other)
    other.ids.update(farm.ids)
    other.join("x", "y")
    other.run("x", "y")
    look_around(farm)
    farm.send("c", m.CmdHello(versions=(1, 1)),
              m.CmdCancel(request=1, targets=[farm.ids["a"]]))  # fmt: skip
    look_around(other)
    assert other.last("x", m.AbortCluster) is not None
    for peer in ("x", "y"):
        other.fail(peer, other.seat(peer), "Aborted")
    assert other.cluster_status(cluster_id) == "Aborted"
    assert statuses(other, "a", "b") == ["Aborted", "Aborted"]
    look_around(farm)
    assert not farm.farm.feeder.nodes


@pytest.mark.parametrize("started", [False, True])
def test_a_dead_servers_attempts_are_taken_over(farm, other, started):
    cluster_id = farm.submit_cluster("a", "b")
    other.ids.update(farm.ids)
    farm.join("v", "w")
    farm.idle("v", "w")
    farm.accept("v")
    if started:
        farm.accept("w")
    look_around(other)
    look_around(other, dead=frozenset({farm.name}))
    if not started:
        assert other.attempts(cluster_id) == [(False, "PrepareFailed")]
        assert (other.open_rows(), statuses(other, "a", "b")) == (0, ["Queued", "Queued"])
        return
    for peer in ("v", "w"):
        given = farm.seat(peer)
        assert come_back(other, peer, given).resumed == [given.assignment_id]
        other.complete(peer, given)
    assert other.cluster_status(cluster_id) == "Completed"
    assert statuses(other, "a", "b") == ["Completed", "Completed"]


# -- submitting again --------------------------------------------------------------------------


def test_an_open_member_is_refused_elsewhere(farm):
    farm.submit(job("a"))
    refused = farm.submit(clusters=[farm.cluster("a", "b")])
    assert isinstance(refused, m.CmdError)
    assert "already open as job" in refused.message
    assert farm.rows("SELECT count(*) FROM job") == [(1,)]
    assert farm.rows("SELECT count(*) FROM cluster_job") == [(0,)]


def test_an_ended_cluster_runs_again_whole(farm, running):
    _, of_v, of_w = running
    farm.complete("v", of_v)
    farm.complete("w", of_w)
    again = farm.submit_cluster("a", "b")
    assert statuses(farm, "a", "b") == ["Queued", "Queued"]
    farm.forget_told()
    farm.run("v", "w")
    assert farm.cluster_status(again) == "Running"


def test_a_built_member_that_something_waits_for_is_refused(farm, running):
    _, of_v, of_w = running
    farm.complete("v", of_v)
    farm.complete("w", of_w)
    farm.submit(job("user", "a"))
    refused = farm.submit(clusters=[farm.cluster("a", "b")])
    assert "user that needs it has not ended" in refused.message
    farm.complete("v", farm.request("v"))
    assert isinstance(farm.submit(clusters=[farm.cluster("a", "b")]), m.CmdSubmitted)


def test_a_member_that_ended_may_be_built_singly(farm):
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    farm.send("c", m.CmdHello(versions=(1, 1)),
              m.CmdCancel(request=1, targets=[farm.ids["a"]]))  # fmt: skip
    farm.submit(job("a"))
    assert farm.request("v").job.name == "a"


def test_a_knot_over_failed_inputs_of_the_ledger_is_refused(farm):
    farm.join("v")
    farm.submit(job("a"), job("x", "a"))
    farm.fail("v", farm.request("v"), "Permanent")
    assert statuses(farm, "a", "x") == ["Failed", "DependencyFailed"]
    refused = farm.submit(clusters=[farm.cluster("a", member("b", needs=("x",)))])
    assert "wait for each other" in refused.message
    assert statuses(farm, "a", "x") == ["Failed", "DependencyFailed"]


def test_a_taken_cluster_id_is_refused(farm):
    farm.submit_cluster("a", cluster_id="mine")
    refused = farm.submit(clusters=[farm.cluster("b", cluster_id="mine")])
    assert "'mine' is taken by another cluster" in refused.message
    assert farm.rows("SELECT count(*) FROM job") == [(1,)]


def test_what_a_dead_server_did_since_the_last_look_is_taken_over_too(farm, other):
    farm.submit(job("single"))
    farm.join("x")
    given = farm.request("x")
    cluster_id = farm.submit_cluster("a", "b")
    farm.join("v", "w")
    farm.idle("v", "w")
    farm.accept("v")
    look_around(other, dead=frozenset({farm.name}))
    other.ids.update(farm.ids)
    assert other.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert statuses(other, "single", "a", "b") == ["Building", "Queued", "Queued"]
    assert come_back(other, "x", given).resumed == [given.assignment_id]
    other.complete("x", given)
    assert other.status("single") == "Completed"
