"""Cluster jobs by behaviour: the cores with a real ledger. Numbers are those of the behaviours."""

from __future__ import annotations

from random import Random

import pytest

from tests.server.cluster_harness import Clusters, evaluation, member
from tests.server.farm_harness import job
from transport import messages as m


@pytest.fixture
def farm(tmp_path):
    farm = Clusters(tmp_path)
    yield farm
    farm.ledger.close()


def statuses(farm, *names: str) -> list[str]:
    return [farm.status(name) for name in names]


# -- placement ---------------------------------------------------------------------------------


def test_two_members_start_together_after_both_accepted(farm):  # 129
    farm.join("v", "w", zone="a")
    farm.submit_cluster("a", "b")
    farm.idle("v")
    assert farm.last("v", m.AssignJob) is None
    farm.idle("w")
    seats = [farm.seat(peer).cluster for peer in ("v", "w")]
    assert seats[0].attempt == seats[1].attempt
    assert {(s.role, s.index) for s in seats} == {("node", 0), ("node", 1)}
    assert seats[0].hold_secs == 40.0
    farm.accept("v")
    assert farm.last("v", m.StartCluster) is None
    farm.accept("w")
    [started] = farm.all_told("v", m.StartCluster)
    assert started == farm.last("w", m.StartCluster)
    assert started.attempt == seats[0].attempt
    assert {(r.role, r.index, r.worker_id, r.endpoint) for r in started.roster} == {
        ("node", seats[0].index, "v", "v:9000"), ("node", seats[1].index, "w", "w:9000"),
    }  # fmt: skip


def test_without_a_full_placement_it_waits_and_single_jobs_run(farm):  # 130
    farm.join("v", "w")
    farm.submit_cluster("a", "b", "c")
    farm.idle("v", "w")
    assert farm.open_rows() == 0
    farm.submit(job("single"))
    assert farm.request("v").job.name == "single"
    farm.join("x", "y")
    farm.idle("x", "y")
    assert {farm.seat(peer).job.name for peer in ("w", "x", "y")} == {"a", "b", "c"}


def test_a_member_is_no_answer_to_a_single_request(farm):  # 46
    farm.join("v")
    farm.submit_cluster("a", "b")
    assert farm.request("v") is None
    assert farm.status("a") == "Queued"


def test_two_kinds_of_one_worker_are_no_two_seats(farm):  # 131
    farm.join("v")
    farm.submit_cluster(member("a"), m.SubmittedMember(role="e", evaluation=evaluation("e")))
    farm.idle("v")
    farm.idle("v", kind="eval")
    assert farm.open_rows() == 0
    farm.join("w")
    farm.idle("w", kind="eval")
    assert farm.seat("v").job.name == "a"
    assert isinstance(farm.seat("w").job, m.EvalJob)


def test_a_pinned_member_sits_on_its_worker_or_waits(farm):  # 132
    farm.join("v", "w")
    farm.submit_cluster(member("a", pin="x"), "b")
    farm.idle("v", "w")
    assert farm.open_rows() == 0
    farm.join("x")
    farm.idle("x")
    assert farm.seat("x").job.name == "a"


@pytest.mark.parametrize(
    ("zones", "same_zone", "placed_on"),
    [
        ({"u": "a", "v": "b", "w": "b"}, True, {"v", "w"}),
        ({"u": "a", "v": "b"}, True, set()),
        ({"u": None, "v": None}, True, {"u", "v"}),
        ({"u": None, "v": "a"}, True, set()),
        ({"u": "a", "v": "b"}, False, {"u", "v"}),
    ],
)
def test_zones(farm, zones, same_zone, placed_on):  # 133
    for name, zone in zones.items():
        farm.join(name, zone=zone)
    farm.submit_cluster("a", "b", same_zone=same_zone)
    farm.idle(*zones)
    assert {name for name in zones if farm.last(name, m.AssignJob)} == placed_on


def test_the_zone_with_fewer_missing_bytes_wins(farm):  # 134
    for name, zone in (("u", "a"), ("v", "a"), ("w", "b"), ("x", "b")):
        farm.join(name, zone=zone)
    farm.submit_cluster("a", "b", same_zone=True)
    for name, size in (("u", 10**9), ("v", 10**9), ("w", 10**6), ("x", 10**6)):
        farm.score_sizes(name, {"a": size, "b": size})
    ask_at_once(farm, "u", "v", "w", "x")
    assert {n for n in "uvwx" if farm.last(n, m.AssignJob)} == {"w", "x"}


def test_a_seat_that_was_not_reported_is_the_dearest(farm):  # 134
    farm.join("u", "v", "w")
    farm.submit_cluster("a", "b")
    for name in ("u", "v"):
        farm.score_sizes(name, {"a": 10**12, "b": 10**12})
    farm.wait(15.5)
    ask_at_once(farm, "u", "v", "w")
    assert farm.open_rows() == 0  # `w` may still report
    farm.wait(5)
    assert {n for n in "uvw" if farm.last(n, m.AssignJob)} == {"u", "v"}


def ask_at_once(farm, *peers: str) -> None:
    """All of them ask before anything is decided."""
    for peer in peers:
        farm.receive(peer, m.RequestJob(kind="build"))
    farm.settle()


def test_an_idle_slot_is_a_seat_for_25_s(farm):  # 123
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    farm.idle("v")
    farm.wait(26)
    farm.idle("w")
    assert farm.open_rows() == 0
    farm.idle("v")
    assert farm.open_rows() == 2


def test_a_seat_taken_between_plan_and_commit_takes_nothing(farm):  # 138
    farm.join("v", "w")
    farm.idle("v", "w")
    farm.submit(job("single"), clusters=[farm.cluster("a", "b")])
    for name in ("v", "w"):
        farm.score_sizes(name, {})
    coordinator = farm.farm.coordinator
    [plan] = coordinator.planner.plans(coordinator.clusters.values(), farm.now)
    assert farm.request("w").job.name == "single"
    assert coordinator.take(plan, farm.now) == []
    assert coordinator.attempts == {}
    assert farm.open_rows() == 1


def test_a_seat_that_drains_between_plan_and_commit_takes_nothing(farm):  # 158
    farm.join("v", "w")
    farm.idle("v", "w")
    farm.submit_cluster("a", "b")
    for name in ("v", "w"):
        farm.score_sizes(name, {})
    coordinator = farm.farm.coordinator
    [plan] = coordinator.planner.plans(coordinator.clusters.values(), farm.now)
    farm.send("w", m.Draining())
    assert coordinator.take(plan, farm.now) == []
    farm.wait(20)
    assert farm.open_rows() == 0  # nor is it one later


def test_a_seat_that_drains_while_the_rows_are_written_is_not_told(farm):  # 158
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.defers = True
    farm.idle("v", "w")
    farm.send("w", m.Draining())
    farm.commit_deferred()
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert farm.last("v", m.AssignJob) is None
    assert (farm.open_rows(), statuses(farm, "a", "b")) == (0, ["Queued", "Queued"])


def test_a_worker_is_a_seat_for_one_cluster_in_a_pass(farm):
    farm.join("u", "v", "w", slots=2)
    farm.submit(clusters=[farm.cluster("a", "b"), farm.cluster("c", "d")])
    for name in ("u", "v", "w"):
        farm.score_sizes(name, {})
    ask_at_once(farm, "u", "v", "w")
    assert farm.open_rows() == 2
    farm.idle("u", "v", "w")  # each has a slot left
    assert farm.open_rows() == 4


def test_prioritized_clusters_come_first_then_the_oldest(farm):
    farm.join("v", "w")
    first = farm.submit_cluster("a", "b")
    farm.now += 1
    second = farm.submit_cluster("c", "d")
    farm.now += 1
    third = farm.submit_cluster("e", "f", prioritized=True)
    farm.idle("v", "w")
    assert farm.attempts(third) == [(False, None)]
    assert farm.attempts(first) == farm.attempts(second) == []
    farm.accept("v", "w")
    for peer in ("v", "w"):
        farm.complete(peer, farm.seat(peer))
    farm.idle("v", "w")
    assert farm.attempts(first) == [(False, None)]
    assert farm.attempts(second) == []


def test_a_member_that_stops_being_startable_keeps_the_others_back(farm):  # 159
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    entry = farm.farm.assigner.pool.leave(farm.ids["a"])
    farm.idle("v", "w")
    assert farm.open_rows() == 0
    assert farm.request("v") is None
    farm.farm.assigner.enter(entry)
    farm.idle("v", "w")
    assert farm.open_rows() == 2


def test_a_member_waits_for_its_inputs_and_the_others_for_it(farm):
    farm.join("v", "w")
    farm.submit(job("input"), clusters=[farm.cluster("a", member("b", needs=("input",)))])
    assert statuses(farm, "a", "b") == ["Queued", "Created"]
    given = farm.request("v")
    assert given.job.name == "input"
    farm.complete("v", given)
    farm.idle("v", "w")
    assert {farm.seat(peer).job.name for peer in ("v", "w")} == {"a", "b"}


# -- before the start --------------------------------------------------------------------------


def test_one_decline_frees_all_and_costs_no_budget(farm):  # 135
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=1)
    farm.idle("v", "w")
    farm.accept("v")
    farm.answer("w", farm.seat("w"), accepted=False)
    assert farm.last("v", m.AbortCluster).attempt == farm.seat("v").cluster.attempt
    assert farm.last("v", m.StartCluster) is None
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert (farm.cluster_status(cluster_id), farm.budget(cluster_id)) == ("Queued", 1)
    assert (farm.open_rows(), statuses(farm, "a", "b")) == (0, ["Queued", "Queued"])
    for _ in range(5):
        farm.idle("v", "w")
        farm.wait(5)
    assert len(farm.attempts(cluster_id)) == 1
    farm.wait(5.5)
    assert len(farm.attempts(cluster_id)) == 2  # the tick after 30 s


def test_one_that_never_answers_fails_the_prepare(farm):  # 136
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.wait(29.5)
    assert farm.attempts(cluster_id) == [(False, None)]  # and no `answer-timeout` meanwhile
    farm.wait(1)
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert farm.last("v", m.AbortCluster) is not None
    assert farm.open_rows() == 0
    # A late answer finds a closed attempt.
    farm.forget_told_but(m.AssignJob)
    farm.accept("w")
    assert farm.last("w", m.AbortCluster).attempt == farm.seat("w").cluster.attempt
    assert farm.last("w", m.StartCluster) is None


def test_all_accepted_just_before_the_deadline_start(farm):  # 137
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.wait(29.9, step=29.9)
    farm.defers = True
    farm.accept("w")
    farm.wait(5)
    farm.commit_deferred()
    assert farm.last("w", m.StartCluster) is not None
    assert farm.attempts(cluster_id) == [(True, None)]


def test_a_held_members_failure_never_touches_its_job(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    [recorded] = farm.fail("v", farm.seat("v"), "Permanent")[-1:]
    assert isinstance(recorded, m.Recorded)
    assert farm.last("w", m.AbortCluster) is not None
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert statuses(farm, "a", "b") == ["Queued", "Queued"]


@pytest.mark.parametrize("how", ["lost", "drains", "goodbye", "drained"])
def test_a_held_members_worker_goes(farm, how):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("w")
    match how:
        case "lost":
            farm.lose("w")
        case "drains":
            farm.send("w", m.Draining())
        case "goodbye":
            farm.send("w", m.Goodbye())
        case "drained":
            farm.send("c", m.CmdHello(versions=(1, 1)), m.CmdDrain(request=1, worker="w"))
    assert farm.last("v", m.AbortCluster) is not None
    assert farm.attempts(cluster_id) == [(False, "PrepareFailed")]
    assert farm.open_rows() == 0


def test_held_members_are_never_resumed(farm):
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    held = farm.seat("v")
    farm.lose("v")
    ref = m.ClaimRef(held.job_id, held.assignment_id)
    [ack] = [a for a in farm.worker("v", peer="v2", running=(ref,)) if isinstance(a, m.InitAck)]
    assert ack.resumed == []


# -- verdicts ----------------------------------------------------------------------------------


def test_members_that_all_complete_complete_the_cluster(farm):  # 145
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.run("v", "w")
    assert farm.cluster_status(cluster_id) == "Running"
    farm.complete("v", farm.seat("v"))
    assert farm.cluster_status(cluster_id) == "Running"
    assert farm.status(farm.seat("v").job.name) == "Building"
    assert farm.last("v", m.Recorded) is not None
    assert farm.open_rows() == 1
    farm.complete("w", farm.seat("w"))
    assert statuses(farm, "a", "b") == ["Completed", "Completed"]
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.attempts(cluster_id) == [(True, "Succeeded")]
    assert farm.open_rows() == 0


def primary_and_companion(farm, **more):
    """Two running members; returns the cluster and the peers of primary and companion."""
    farm.join("v", "w")
    cluster_id = farm.submit_cluster(member("main", "main", primary=True), "side", **more)
    farm.run("v", "w")
    if farm.seat("v").job.name == "main":
        return cluster_id, "v", "w"
    return cluster_id, "w", "v"


def test_the_primarys_success_is_the_clusters(farm):  # 144
    cluster_id, main, side = primary_and_companion(farm)
    farm.complete(main, farm.seat(main))
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.last(side, m.AbortCluster) is not None
    assert farm.last(main, m.AbortCluster) is None
    assert farm.status("side") == "Building"  # until its worker says so
    farm.fail(side, farm.seat(side), "Aborted")
    assert statuses(farm, "main", "side") == ["Completed", "Aborted"]
    assert farm.attempts(cluster_id) == [(True, "Succeeded")]


def test_a_companion_that_is_done_first_waits_for_the_primary(farm):
    cluster_id, main, side = primary_and_companion(farm)
    farm.complete(side, farm.seat(side))
    assert farm.cluster_status(cluster_id) == "Running"
    farm.complete(main, farm.seat(main))
    assert statuses(farm, "main", "side") == ["Completed", "Completed"]


@pytest.mark.parametrize("late", ["Completed", "Permanent", "Aborted"])
def test_a_report_after_the_verdict_is_settled_by_it(farm, late):  # 150
    cluster_id, main, side = primary_and_companion(farm)
    farm.complete(main, farm.seat(main))
    given = farm.seat(side)
    told = farm.complete(side, given) if late == "Completed" else farm.fail(side, given, late)
    assert isinstance(told[-1], m.Recorded)
    assert farm.status("side") == "Aborted"
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.open_rows() == 0


def test_a_failure_with_budget_brings_all_back(farm):  # 146
    farm.join("u", "v", "w")
    cluster_id = farm.submit_cluster("a", "b", "c", retry_budget=1)
    farm.run("u", "v", "w")
    done = farm.seat("u").job.name
    farm.complete("u", farm.seat("u"))
    farm.fail("v", farm.seat("v"), "Permanent")
    assert (farm.cluster_status(cluster_id), farm.budget(cluster_id)) == ("Queued", 0)
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.status(done) == "Queued"
    assert farm.last("w", m.AbortCluster) is not None
    assert farm.last("u", m.AbortCluster) is None
    farm.fail("w", farm.seat("w"), "Aborted")
    assert statuses(farm, "a", "b", "c") == ["Queued"] * 3
    farm.wait(25)
    farm.idle("u", "v", "w")
    assert farm.open_rows() == 0  # not within 30 s
    farm.forget_told()
    farm.wait(10)
    farm.run("u", "v", "w")
    for peer in ("u", "v", "w"):
        farm.complete(peer, farm.seat(peer))
    assert farm.cluster_status(cluster_id) == "Completed"
    assert statuses(farm, "a", "b", "c") == ["Completed"] * 3


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("Transient", "Failed"), ("InputsUnavailable", "Failed"), ("Permanent", "Failed"),
        ("Timeout", "TimedOut"), ("Canceled", "Failed"), ("Aborted", "Failed"),
    ],
)  # fmt: skip
def test_a_failure_without_budget_fails_the_cluster(farm, kind, status):  # 147
    farm.join("u", "v", "w")
    cluster_id = farm.submit_cluster("a", "b", "c")
    farm.run("u", "v", "w")
    names = [farm.seat(peer).job.name for peer in ("u", "v", "w")]
    farm.complete("u", farm.seat("u"))
    farm.fail("v", farm.seat("v"), kind)
    assert farm.cluster_status(cluster_id) == "Failed"
    farm.fail("w", farm.seat("w"), "Aborted")
    assert statuses(farm, *names) == ["Completed", status, "Aborted"]
    assert farm.attempts(cluster_id) == [(True, "Failed")]


def test_a_lost_worker_takes_the_attempt_along_and_others_get_the_members(farm):  # 148
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=1)
    farm.run("v", "w")
    farm.lose("w")
    assert farm.attempts(cluster_id) == [(True, None)]  # it may come back
    farm.wait(31)
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.last("v", m.AbortCluster) is not None
    farm.fail("v", farm.seat("v"), "Aborted")
    farm.join("x")
    farm.wait(31)
    assert farm.request("x") is None  # not singly
    farm.forget_told()
    farm.run("v", "x")
    assert len(farm.attempts(cluster_id)) == 2


def test_a_running_member_survives_its_workers_reconnect(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.run("v", "w")
    given = farm.seat("w")
    farm.lose("w")
    farm.wait(10)
    ref = m.ClaimRef(given.job_id, given.assignment_id)
    [ack] = [a for a in farm.worker("w", peer="w2", running=(ref,)) if isinstance(a, m.InitAck)]
    assert ack.resumed == [given.assignment_id]
    farm.complete("w2", given)
    farm.complete("v", farm.seat("v"))
    assert farm.cluster_status(cluster_id) == "Completed"


def test_a_report_before_the_start_is_committed_waits_for_it(farm):  # 151
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.defers = True
    farm.accept("w")
    name = farm.seat("v").job.name
    farm.fail("v", farm.seat("v"), "Permanent")
    assert farm.cluster_status(cluster_id) == "Queued"
    farm.commit_deferred()
    assert farm.cluster_status(cluster_id) == "Failed"
    assert farm.attempts(cluster_id) == [(True, "Failed")]
    assert farm.status(name) == "Failed"
    # The other one held its seat, so it has nothing to report.
    assert farm.last("w", m.StartCluster) is None
    assert farm.last("w", m.AbortCluster) is not None
    assert sorted(statuses(farm, "a", "b")) == ["Aborted", "Failed"]
    assert farm.open_rows() == 0


def test_a_verdict_that_was_not_written_is_written_again(farm):  # 152
    cluster_id, main, _ = primary_and_companion(farm)
    farm.fail_commits = 2
    farm.complete(main, farm.seat(main))
    assert farm.cluster_status(cluster_id) == "Running"
    farm.wait(4)
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.attempts(cluster_id) == [(True, "Succeeded")]


def test_rows_that_were_not_written_leave_everything_as_it_was(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.fail_commits = 1
    farm.idle("v", "w")
    assert farm.last("v", m.AssignJob) is None
    assert (farm.attempts(cluster_id), farm.farm.assigner.claims) == ([], {})
    farm.wait(6)
    farm.idle("v", "w")
    assert farm.attempts(cluster_id) == [(False, None)]


def test_a_start_that_was_not_written_is_written_again(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.fail_commits = 1
    farm.accept("w")
    assert farm.last("w", m.StartCluster) is None
    farm.wait(2)
    assert farm.last("w", m.StartCluster) is not None
    assert farm.cluster_status(cluster_id) == "Running"


def test_a_survivor_that_never_reports_is_forgotten(farm):  # 153
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b", retry_budget=1)
    farm.run("v", "w")
    survivor = farm.seat("w").job.name
    farm.fail("v", farm.seat("v"), "Transient")
    alive(farm, 590, "v", "w")
    assert farm.status(survivor) == "Building"
    alive(farm, 20, "v", "w")
    assert statuses(farm, "a", "b") == ["Queued", "Queued"]
    farm.forget_told()
    farm.run("v", "w")
    assert farm.cluster_status(cluster_id) == "Running"


def alive(farm, secs: float, *peers: str) -> None:
    """Time passes, and these workers are heard of."""
    for _ in range(int(secs // 10)):
        farm.wait(10, step=5)
        for peer in peers:
            farm.send(peer, m.WorkerMetrics())


def test_a_member_that_can_never_start_fails_the_cluster(farm):
    farm.join("v")
    farm.submit(job("input"), clusters=[farm.cluster("a", member("b", needs=("input",)))])
    farm.fail("v", farm.request("v"), "Permanent")
    assert statuses(farm, "input", "a", "b") == ["Failed", "Aborted", "DependencyFailed"]
    [(status,)] = farm.rows("SELECT status FROM cluster_job")
    assert status == "Failed"


def test_an_evaluation_is_a_member_and_goes_on_after_the_verdict(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", m.SubmittedMember(role="e", evaluation=evaluation("e")))
    farm.idle("v")
    farm.idle("w", kind="eval")
    farm.accept("v", "w")
    farm.complete("v", farm.seat("v"))
    given = farm.seat("w")
    x = m.Derivation(**{f: getattr(job("x"), f) for f in m.Derivation.__struct_fields__})
    farm.send("w", m.JobUpdate(given.job_id, given.assignment_id, m.EvalResult([x], [], [])))
    farm.complete("w", given)
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.ledger.job("e", 0.0).status == "Building"
    farm.complete("v", farm.request("v"))
    assert farm.ledger.job("e", 0.0).status == "Completed"


# -- cancelling --------------------------------------------------------------------------------


def cancel(farm, *targets: str) -> m.CmdCancelReply:
    [reply] = [
        a
        for a in farm.send("c", m.CmdHello(versions=(1, 1)),
                           m.CmdCancel(request=1, targets=list(targets)))
        if isinstance(a, m.CmdCancelReply)
    ]  # fmt: skip
    return reply


def test_a_waiting_cluster_is_cancelled_with_a_member(farm):
    cluster_id = farm.submit_cluster("a", "b", retry_budget=3)
    assert cancel(farm, farm.ids["a"]).aborted == [farm.ids["a"]]
    assert farm.cluster_status(cluster_id) == "Aborted"
    assert statuses(farm, "a", "b") == ["Aborted", "Aborted"]


def test_a_held_cluster_is_cancelled(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    cancel(farm, farm.ids["a"])
    assert farm.attempts(cluster_id) == [(False, "Aborted")]
    assert farm.cluster_status(cluster_id) == "Aborted"
    for peer in ("v", "w"):
        assert farm.last(peer, m.AbortCluster) is not None
    assert statuses(farm, "a", "b") == ["Aborted", "Aborted"]
    assert farm.open_rows() == 0


def test_a_cancelled_evaluation_aborts_the_cluster_even_with_budget(farm):  # 149
    farm.join("v", "w")
    cluster_id = farm.submit_cluster(
        "a", m.SubmittedMember(role="e", evaluation=evaluation("e")), retry_budget=5
    )
    farm.idle("v")
    farm.idle("w", kind="eval")
    farm.accept("v", "w")
    reply = cancel(farm, "e")
    assert reply.requested == ["e"]
    assert (farm.cluster_status(cluster_id), farm.budget(cluster_id)) == ("Aborted", 5)
    assert farm.attempts(cluster_id) == [(True, "Aborted")]
    for peer in ("v", "w"):
        assert farm.last(peer, m.AbortCluster) is not None
        farm.fail(peer, farm.seat(peer), "Aborted")
    assert farm.status("a") == "Aborted"
    assert farm.ledger.job("e", 0.0).status == "Aborted"


@pytest.mark.parametrize("phase", ["opening", "starting"])
def test_a_cancel_meets_rows_on_their_way(farm, phase):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    if phase == "opening":
        farm.defers = True
        farm.idle("v", "w")
    else:
        farm.idle("v", "w")
        farm.accept("v")
        farm.defers = True
        farm.accept("w")
    farm.receive("c", m.CmdHello(versions=(1, 1)),
                 m.CmdCancel(request=1, targets=[farm.ids["a"]]))  # fmt: skip
    farm.settle()
    farm.commit_deferred()
    assert farm.attempts(cluster_id) == [(phase == "starting", "Aborted")]
    assert farm.cluster_status(cluster_id) == "Aborted"
    assert statuses(farm, "a", "b") == ["Aborted", "Aborted"]
    assert farm.open_rows() == 0
    assert farm.last("v", m.StartCluster) is None


# -- signals -----------------------------------------------------------------------------------


def test_signals_go_to_the_member_named_or_to_all_others(farm):  # 154
    farm.join("u", "v", "w", "x")
    farm.submit_cluster("a", "b", "c")
    farm.idle("u", "v", "w")
    attempt = farm.seat("u").cluster.attempt
    farm.send("u", m.ClusterSignal(attempt, b"early"))
    farm.accept("u", "v", "w")
    index = {peer: farm.seat(peer).cluster.index for peer in ("u", "v", "w")}
    farm.send("x", m.ClusterSignal(attempt, b"stranger"))
    farm.send("u", m.ClusterSignal("r-unknown", b"unknown"))
    farm.send("u", m.ClusterSignal(attempt, b"self", to=m.MemberRef("node", index["u"])))
    farm.send("u", m.ClusterSignal(attempt, b"nobody", to=m.MemberRef("node", 7)))
    assert not any(farm.all_told(peer, m.ClusterSignal) for peer in ("u", "v", "w", "x"))
    farm.send("u", m.ClusterSignal(attempt, b"one", to=m.MemberRef("node", index["v"])))
    farm.send("u", m.ClusterSignal(attempt, b"all"))
    told = farm.all_told("v", m.ClusterSignal)
    assert [signal.payload for signal in told] == [b"one", b"all"]
    assert told[0].sender == m.MemberRef("node", index["u"])
    assert [s.payload for s in farm.all_told("w", m.ClusterSignal)] == [b"all"]
    assert farm.all_told("u", m.ClusterSignal) == []


def test_an_ended_member_speaks_and_hears_no_more(farm):
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    farm.run("v", "w")
    attempt = farm.seat("v").cluster.attempt
    farm.complete("v", farm.seat("v"))
    farm.send("v", m.ClusterSignal(attempt, b"from the dead"))
    farm.send("w", m.ClusterSignal(attempt, b"to the dead"))
    assert not farm.all_told("v", m.ClusterSignal) + farm.all_told("w", m.ClusterSignal)


# -- reservations ------------------------------------------------------------------------------


def starving(farm, *, slots: int = 1, **more) -> str:
    """A cluster of two that single jobs starve on `v` and `w`, 600 s later."""
    farm.join("v", "w", slots=slots)
    cluster_id = farm.submit_cluster("a", "b", **more)
    farm.submit(*(job(f"long-{n}") for n in range(2)))
    for peer in ("v", "w"):
        farm.given = {**getattr(farm, "given", {}), peer: farm.request(peer)}
    alive(farm, 610, "v", "w")
    return cluster_id


def test_a_starving_cluster_gets_its_seats_kept(farm):  # 155
    cluster_id = starving(farm)
    farm.submit(job("more"), evaluations=[evaluation("e")])
    farm.complete("v", farm.given["v"])
    assert farm.request("v") is None  # its seat is kept
    assert farm.request("v", "eval") is not None  # other kinds go on
    assert farm.attempts(cluster_id) == []
    farm.complete("w", farm.given["w"])
    farm.idle("w")
    assert farm.attempts(cluster_id) == [(False, None)]
    farm.accept("v", "w")
    for peer in ("v", "w"):
        farm.complete(peer, farm.seat(peer))
    assert farm.request("v").job.name == "more"  # nothing is kept any more


@pytest.mark.parametrize("cause", ["lost", "cancelled", "time", "incapable", "drains"])
def test_a_reservation_ends(farm, cause):  # 156, 157
    starving(farm)
    farm.submit(job("more", system="builtin"))
    assert farm.farm.assigner.kept == {("v", "build"), ("w", "build")}
    match cause:
        case "lost":
            farm.lose("w")
        case "cancelled":
            cancel(farm, farm.ids["a"])
        case "time":
            alive(farm, 1780, "v", "w")
            assert farm.farm.assigner.kept
            alive(farm, 20, "v", "w")
        case "incapable":
            farm.send("w", m.WorkerCapabilities(["riscv64-linux"], [], 1))
        case "drains":
            farm.send("w", m.Draining())
    assert farm.farm.assigner.kept == set()
    farm.complete("v", farm.given["v"])
    assert farm.request("v").job.name == "more"


def test_one_reservation_at_a_time(farm):  # 156
    first = starving(farm)
    farm.join("x", "y")
    farm.submit(job("long-x"), job("long-y"))
    for peer in ("x", "y"):
        assert farm.request(peer) is not None
    second = farm.submit_cluster("c", "d")
    alive(farm, 620, "v", "w", "x", "y")
    assert farm.farm.coordinator.planner.reservation.cluster_id == first
    alive(farm, 1300, "v", "w", "x", "y")
    assert farm.farm.coordinator.planner.reservation.cluster_id == second


def test_seats_kept_for_one_cluster_are_none_for_another(farm):
    first = starving(farm)
    second = farm.submit_cluster("c", "d")
    farm.complete("v", farm.given["v"])
    farm.idle("v")
    farm.join("x")
    farm.idle("x")
    # The cluster that waited takes what is there; the other one gets no kept seat.
    assert farm.attempts(first) == [(False, None)]
    assert farm.attempts(second) == []
    farm.complete("w", farm.given["w"])


def test_two_clusters_for_the_same_seats_in_any_order(tmp_path):  # FIELD 49
    for seed in range(40):
        folder = tmp_path / str(seed)
        folder.mkdir()
        two_clusters_race(Clusters(folder), Random(seed))


def two_clusters_race(farm: Clusters, random: Random) -> None:
    """One has all four seats and the other none, at any moment."""
    peers = ["t", "u", "v", "w"]
    farm.join(*peers)
    farm.submit(clusters=[farm.cluster(*"abcd"), farm.cluster(*"efgh")])
    ended = 0
    for _ in range(400):
        peer = random.choice(peers)
        given = farm.last(peer, m.AssignJob)
        match random.choice(("ask", "accept", "complete")):
            case "ask" if farm.farm.assigner.open_builds(peer) == 0:
                farm.idle(peer)
            case "accept" if given is not None:
                farm.answer(peer, given, accepted=True)
            case "complete" if farm.last(peer, m.StartCluster) is not None:
                farm.complete(peer, given)
                del farm.answers[peer.encode()]
        assert len(farm.farm.coordinator.attempts) <= 1
        farm.wait(0.1)
        ended = 2 - len(farm.farm.coordinator.clusters)
        if ended == 2:
            break
    assert ended == 2
    assert farm.rows("SELECT DISTINCT outcome FROM cluster_attempt") == [("Succeeded",)]
    assert statuses(farm, *"abcdefgh") == ["Completed"] * 8
    farm.ledger.close()
