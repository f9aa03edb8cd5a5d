"""Scoring, requests, assignments, clusters, aborts, draining."""

from __future__ import annotations

import pytest

from actors.worker import events as e
from actors.worker.core import MAX_UNCONFIRMED, MAX_UNSCORED_PAGES, MAX_UNSENT_SIGNALS, Link
from actors.worker.executors.base import Built, Failed
from transport import messages as m

BUILT = Built({"out": m.Output(path="/nix/store/p1", nar_size=3)})


def names(messages):
    return [type(message).__name__ for message in messages]


def kinds(messages):
    return [x.kind for x in messages if isinstance(x, m.RequestJob)]


def seat(attempt="t1", hold=40.0):
    return m.ClusterSeat(attempt=attempt, role="r", index=0, hold_secs=hold)


def candidate(job_id, paths=()):
    return m.JobCandidate(
        job_id=job_id, kind="build", project="default", drv_paths=[], output_paths=[],
        required_paths=[m.RequiredPath(path=p, nar_size=s) for p, s in paths],
    )  # fmt: skip


def evaluation():
    source = m.EvalSource(kind="graph-file", ref="g.json")
    return m.EvalJob(project="default", source=source, attributes=[], timeout_secs=0)


def score(job_id):
    return m.Score(job_id=job_id, missing_count=0, missing_nar_size=0, outputs_present=False)


def offered(worker, *job_ids):
    """Offers and scores; returns what was sent after the scoring."""
    worker.receive(m.JobOffer(candidates=[candidate(j) for j in job_ids]))
    [page] = worker.did(e.ScorePage)
    return worker.step(e.Scored(page.connection, page.page, [score(j) for j in job_ids]))


# -- scoring -----------------------------------------------------------------------------


def test_every_page_of_the_list_is_answered_and_only_then_jobs_are_asked_for(driver):
    worker = driver()
    worker.connect()
    worker.receive(m.JobListChunk(candidates=[candidate("j1")], is_final=False))
    [first] = worker.did(e.ScorePage)
    worker.receive(m.JobListChunk(candidates=[candidate("j2")], is_final=True))
    [last] = worker.did(e.ScorePage)
    sent = worker.step(e.Scored(first.connection, first.page, [score("j1")]))
    assert sent == [m.RequestJobChunk(scores=[score("j1")], is_final=False)]
    sent = worker.step(e.Scored(last.connection, last.page, [score("j2")]))
    assert sent[0] == m.RequestJobChunk(scores=[score("j2")], is_final=True)
    assert sorted(kinds(sent[1:])) == ["build", "eval"]


def test_empty_final_page_gets_one_empty_final_answer(driver):  # 54
    worker = driver()
    worker.connect()
    sent = worker.receive(m.JobListChunk(candidates=[], is_final=True))
    answers = [x for x in sent if isinstance(x, m.RequestJobChunk)]
    assert answers == [m.RequestJobChunk(scores=[], is_final=True)]


def test_candidate_offered_twice_is_answered_twice(driver):  # 51
    worker = driver()
    worker.serve()
    for _ in range(2):
        assert offered(worker, "j1")[0].scores == [score("j1")]


def test_offer_while_slots_are_free_asks_once_a_free_kind(driver):  # 52
    worker = driver(builds=3, evals=1)
    worker.serve()
    assert sorted(kinds(offered(worker, "j9"))) == ["build", "eval"]


def test_offer_while_full_asks_for_nothing(driver):  # 52
    worker = driver(builds=1, evals=1)
    worker.serve()
    worker.assign(1)
    worker.assign(2, job=evaluation())
    assert names(offered(worker, "j9")) == ["RequestJobChunk"]


def test_stuck_store_is_answered_for_as_if_it_were_empty(driver):
    worker = driver()
    worker.serve()
    page = m.JobOffer(candidates=[candidate("j1", [("/nix/store/a", 5), ("/nix/store/b", None)])])
    for _ in range(MAX_UNSCORED_PAGES):
        assert worker.receive(page) == []
    sent = worker.receive(page)
    assert sent[0].scores == [m.Score("j1", 2, 5, False)]
    assert not worker.did(e.ScorePage)


def test_scores_of_an_unknown_page_are_ignored(driver):
    worker = driver()
    worker.serve()
    assert worker.step(e.Scored(worker.connection, 99, [])) == []


# -- requests ----------------------------------------------------------------------------


def test_idle_worker_asks_once_a_free_kind_every_10_s(driver):  # 125
    worker = driver(jitter=0.3)
    worker.serve()
    assert kinds(worker.wait_alive(3)) == ["build", "eval"]
    for _ in range(3):
        assert kinds(worker.wait_alive(9)) == []
        assert kinds(worker.wait_alive(1)) == ["build", "eval"]


def test_full_worker_asks_for_nothing(driver):  # 125
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.assign(2, job=evaluation())
    assert kinds(worker.wait_alive(30)) == []


def test_missed_rounds_merge_into_one(driver):
    worker = driver()
    worker.serve()
    worker.now += 100
    assert kinds(worker.step(e.Tick())) == ["build", "eval"]
    assert worker.core.deadline > worker.now


def test_assignment_with_slots_left_asks_again_at_once(driver):  # 126
    worker = driver(builds=2)
    worker.serve()
    assert names(worker.assign(1)) == ["AssignJobResponse", "JobUpdate", "RequestJob"]
    assert names(worker.assign(2)) == ["AssignJobResponse", "JobUpdate"]


def test_report_and_next_request_leave_in_one_step(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    sent = worker.finish(1, BUILT)
    assert names(sent) == ["JobUpdate", "JobCompleted", "RequestJob"]
    assert sent[0].update.outputs["out"].nar_size == 3


def test_nothing_is_asked_for_while_the_server_stops(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.receive(m.Draining())
    assert kinds(worker.finish(1, BUILT)) == []
    assert kinds(offered(worker, "j9")) == []
    assert kinds(worker.wait_alive(20)) == []
    worker.lose()
    assert len(kinds(worker.serve(resumed=["a1"]))) == 2


def test_kinds_that_the_server_does_not_grant_are_not_asked_for(driver):
    worker = driver()
    granted = m.Capabilities(fetch=False, eval=False, build=True)
    assert kinds(worker.serve(capabilities=granted)) == ["build"]


def test_kind_without_slots_is_not_asked_for(driver):
    assert kinds(driver(evals=0).serve()) == ["build"]


def test_server_that_confirms_nothing_is_asked_for_nothing(driver):
    worker = driver()
    worker.serve()
    for number in range(MAX_UNCONFIRMED):
        worker.assign(number)
        sent = worker.finish(number, BUILT)
    assert kinds(sent) == []
    worker.receive(m.Recorded(job_id="j1", assignment_id="a1"))
    assert "build" in kinds(worker.wait_alive(10))


# -- assignments -------------------------------------------------------------------------


def test_accepted_build_starts_and_says_building(driver):
    worker = driver()
    worker.serve()
    sent = worker.assign(1)
    assert sent[0] == m.AssignJobResponse("j1", "a1", accepted=True)
    assert sent[1] == m.JobUpdate("j1", "a1", m.Building())
    [start] = worker.did(e.StartJob)
    assert start.assignment.assignment_id == "a1"


def test_full_kind_declines_and_leaves_running_work_alone(driver):  # 97
    worker = driver()
    worker.serve()
    worker.assign(1)
    assert worker.assign(2) == [m.AssignJobResponse("j2", "a2", False, "no free build slot")]
    assert worker.effects == [e.Send(worker.sent()[0])]
    assert worker.assign(3, job=evaluation())[0].accepted


def test_draining_worker_declines_with_a_reason(driver):  # 96, FIELD 42
    worker = driver(builds=2)
    worker.serve()
    worker.assign(1)
    worker.step(e.DrainRequested())
    assert worker.assign(2) == [m.AssignJobResponse("j2", "a2", False, "worker draining")]


def test_new_claim_of_a_job_that_still_runs_ends_the_old_run(driver):
    worker = driver(builds=2)
    worker.serve()
    worker.assign(1)
    [answer] = worker.receive(m.AssignJob("j1", "a2", worker_job("p1")))
    assert not answer.accepted
    assert worker.did(e.StopJob) == [e.StopJob("a1")]
    assert names(worker.finish(1)) == ["RequestJob"]


def worker_job(name):
    return m.BuildJob(
        project="default", drv_path=f"/nix/store/{name}.drv", name=name,
        outputs={"out": f"/nix/store/{name}"}, required_paths=[], timeout_secs=0,
        requirement=m.Requirement("x86_64-linux", []), max_silent_secs=0,
    )  # fmt: skip


def test_updates_carry_the_claim_and_progress_is_passed_once_a_second(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, job=evaluation())
    assert worker.step(e.EvalAdvanced("a1", 5)) == [m.EvalProgress("j1", "a1", 5)]
    worker.now += 0.9
    assert worker.step(e.EvalAdvanced("a1", 6)) == []
    worker.now += 0.1
    assert worker.step(e.EvalAdvanced("a1", 7)) == [m.EvalProgress("j1", "a1", 7)]
    [progress] = worker.step(e.BuildAdvanced("a1", "prefetch", paths_done=1, paths_total=2))
    assert progress == m.BuildProgress("j1", "a1", "prefetch", paths_done=1, paths_total=2)


# -- aborts ------------------------------------------------------------------------------


def test_abort_stops_and_reports_aborted_once_nothing_runs(driver):  # 105
    worker = driver()
    worker.serve()
    worker.assign(1)
    assert worker.receive(m.AbortJob("j1", "a1", "canceled by ann")) == []
    assert worker.did(e.StopJob) == [e.StopJob("a1")]
    sent = worker.finish(1)
    assert sent == [
        m.JobFailed("j1", "a1", "canceled by ann", "Aborted"),
        m.RequestJob(kind="build"),
    ]


def test_abort_of_an_unknown_job_is_ignored(driver):  # 105
    worker = driver()
    worker.serve()
    worker.receive(m.AbortJob("j1", "a1", "x"))
    assert worker.effects == []


def test_abort_under_an_old_claim_is_ignored(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.receive(m.AbortJob("j1", "a0", "x"))
    assert worker.effects == []


def test_aborted_job_that_had_just_ended_is_aborted_all_the_same(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.receive(m.AbortJob("j1", "a1", "x"))
    assert names(worker.finish(1, BUILT))[0] == "JobFailed"


# -- clusters ----------------------------------------------------------------------------


def test_held_member_runs_at_the_start_and_not_before(driver):
    worker = driver()
    worker.serve()
    assert worker.assign(1, seat=seat()) == [m.AssignJobResponse("j1", "a1", accepted=True)]
    assert not worker.did(e.StartJob)
    sent = worker.receive(m.StartCluster(attempt="t1", roster=[]))
    assert names(sent) == ["JobUpdate"]
    assert len(worker.did(e.StartJob)) == 1


@pytest.mark.parametrize("late", [0.0, 0.05])
def test_hold_without_a_start_frees_the_slot_and_a_late_start_runs_nothing(driver, late):
    # 140, FIELD 51
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat(hold=4))
    worker.now += 4 + late
    sent = worker.receive(m.StartCluster(attempt="t1", roster=[]))
    failure = m.JobFailed("j1", "a1", "cluster start timed out", "Aborted")
    assert [x for x in sent if not isinstance(x, m.Ping)] == [failure, m.RequestJob(kind="build")]
    assert not worker.did(e.StartJob)


def test_start_just_before_the_end_of_the_hold_runs(driver):  # FIELD 51
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat(hold=4))
    worker.now += 3.95
    worker.receive(m.StartCluster(attempt="t1", roster=[]))
    assert len(worker.did(e.StartJob)) == 1
    assert "JobFailed" not in names(worker.wait(1))


def test_second_member_of_an_attempt_is_declined_and_the_hold_stays(driver):  # 141
    worker = driver(builds=2)
    worker.serve()
    worker.assign(1, seat=seat())
    [answer] = worker.assign(2, seat=seat())
    assert not answer.accepted
    worker.receive(m.StartCluster(attempt="t1", roster=[]))
    assert [s.assignment.assignment_id for s in worker.did(e.StartJob)] == ["a1"]


def test_hold_uses_a_slot_of_its_kind_only(driver):  # 142
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    assert not worker.assign(2)[0].accepted
    assert worker.assign(3, job=evaluation())[0].accepted


def test_abort_of_a_held_cluster_frees_the_slot_without_a_report(driver):  # 143
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    sent = worker.receive(m.AbortCluster(attempt="t1", reason="prepare failed"))
    assert sent == [m.RequestJob(kind="build")]


def test_abort_of_a_running_cluster_reports_aborted(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    worker.receive(m.StartCluster(attempt="t1", roster=[]))
    worker.receive(m.AbortCluster(attempt="t1", reason="companion failed"))
    sent = worker.finish(1)
    assert sent[0] == m.JobFailed("j1", "a1", "companion failed", "Aborted")


def test_single_abort_of_a_held_member_is_confirmed(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    sent = worker.receive(m.AbortJob("j1", "a1", "unanswered"))
    assert sent == [m.JobFailed("j1", "a1", "unanswered", "Aborted"), m.RequestJob(kind="build")]


# -- draining ----------------------------------------------------------------------------


def test_drain_with_two_running_jobs_and_a_hold(driver):  # 120
    worker = driver(builds=3)
    worker.serve()
    worker.assign(1)
    worker.assign(2)
    worker.assign(3, seat=seat())
    sent = worker.step(e.DrainRequested())
    assert sent == [m.Draining(), m.JobFailed("j3", "a3", "worker draining", "Aborted")]
    assert worker.did(e.StopJob) == [e.StopJob("a1"), e.StopJob("a2")]
    assert worker.finish(1) == [m.JobFailed("j1", "a1", "worker draining", "Canceled")]
    assert worker.finish(2) == [m.JobFailed("j2", "a2", "worker draining", "Canceled")]
    for number in (1, 2):
        worker.receive(m.Recorded(f"j{number}", f"a{number}"))
        assert worker.effects == []
    assert worker.receive(m.Recorded("j3", "a3")) == [m.Goodbye()]
    assert worker.effects[-2:] == [e.Disconnect(), e.Exit(0)]


def test_drain_waits_for_confirmations_only_so_long(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.step(e.DrainRequested())
    worker.finish(1)
    assert "Goodbye" in names(worker.wait(1))
    assert worker.did(e.Exit) == [e.Exit(0)]


def test_job_that_was_done_before_the_drain_stopped_it_is_done(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.step(e.DrainRequested())
    assert names(worker.finish(1, BUILT)) == ["JobUpdate", "JobCompleted"]


def test_drain_while_idle_leaves_at_once(driver):  # 121
    worker = driver()
    worker.serve()
    assert worker.step(e.DrainRequested()) == [m.Draining(), m.Goodbye()]
    assert worker.did(e.Exit) == [e.Exit(0)]
    assert worker.never()


def test_drain_before_the_first_connect_never_connects(driver):  # 122
    worker = driver()
    worker.now -= 1
    worker.step(e.DrainRequested())
    assert worker.effects == [e.Exit(0)]


def test_drain_without_a_server_stops_what_runs_and_leaves(driver):  # FIELD 25
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.lose()
    worker.step(e.DrainRequested())
    assert worker.effects == [e.StopJob("a1")]
    worker.finish(1)
    assert worker.effects == [e.Exit(0)]


def test_drain_leaves_in_time_though_a_job_will_not_die(driver):  # FIELD 25
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.step(e.DrainRequested(130))
    started = worker.now
    sent = worker.wait(5)
    assert names(sent)[-1] == "Goodbye"
    assert worker.did(e.Exit) == [e.Exit(130)]
    assert worker.never()
    assert started + 5 == worker.now


def test_connection_lost_while_draining_is_not_made_again(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    worker.step(e.DrainRequested())
    worker.lose()
    assert worker.wait(3) == []
    worker.finish(1)
    assert worker.effects == [e.Exit(0)]


def test_failures_are_reported_as_they_are(driver):
    worker = driver()
    worker.serve()
    worker.assign(1)
    failed = Failed("InputsUnavailable", "not there", missing_paths=["/nix/store/x"])
    assert worker.finish(1, failed)[0] == m.JobFailed(
        "j1", "a1", "not there", "InputsUnavailable", missing_paths=["/nix/store/x"]
    )
    assert worker.core.link is Link.SERVING


# -- signals of cluster members ------------------------------------------------------------


def test_signals_of_a_running_member_go_both_ways(driver):
    worker = driver()
    worker.serve()
    roster = [m.RosterEntry("r", 0, "w", primary=True)]
    lead = m.MemberRef("lead", 0)
    worker.assign(1, seat=seat())
    worker.receive(m.ClusterSignal("t1", b"early", None, lead))
    assert not worker.did(e.DeliverSignal)  # nothing runs yet
    worker.receive(m.StartCluster(attempt="t1", roster=roster))
    assert worker.did(e.StartJob)[-1].roster == roster
    worker.receive(m.ClusterSignal("t1", b"hi", None, lead))
    assert worker.did(e.DeliverSignal) == [e.DeliverSignal("a1", lead, b"hi")]
    worker.receive(m.ClusterSignal("t2", b"not ours", None, lead))
    assert not worker.did(e.DeliverSignal)
    assert worker.step(e.SignalSent("a1", lead, b"x")) == [m.ClusterSignal("t1", b"x", lead)]


def test_signals_wait_for_a_session_and_never_without_bound(driver):
    worker = driver()
    worker.serve()
    worker.assign(1, seat=seat())
    worker.receive(m.StartCluster(attempt="t1", roster=[]))
    worker.lose()
    for number in range(MAX_UNSENT_SIGNALS + 3):
        assert worker.step(e.SignalSent("a1", None, b"%d" % number)) == []
    worker.wait(2)
    sent = [x for x in worker.serve(resumed=["a1"]) if isinstance(x, m.ClusterSignal)]
    assert [x.payload for x in sent] == [b"%d" % n for n in range(MAX_UNSENT_SIGNALS)]
