"""From request to result, by behaviour; numbers are those of the behaviours list."""

from __future__ import annotations

import pytest

from actors.ledger.records import ClaimRecord, OpenClaim
from actors.ledger.sqlite import SqliteLedger
from tests.server.farm_harness import BOTH, job
from transport import messages as m


def told(farm, peer: str, kind: type[m.Message]) -> list[m.Message]:
    return [a for a in farm.answers.get(peer.encode(), []) if isinstance(a, kind)]


def graph_evaluation(**more) -> m.SubmittedEvaluation:
    return m.SubmittedEvaluation(source=m.EvalSource(kind="graph-file", ref="g"), **more)


def batch(given: m.AssignJob, *jobs: m.SubmittedJob) -> m.JobUpdate:
    derivations = [
        m.Derivation(**{f: getattr(j, f) for f in m.Derivation.__struct_fields__}) for j in jobs
    ]
    update = m.EvalResult(derivations=derivations, warnings=[], errors=[])
    return m.JobUpdate(job_id=given.job_id, assignment_id=given.assignment_id, update=update)


# -- eligibility -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "features", "gets_it"),
    [
        ("x86_64-linux", [], True),  # 18
        ("i686-linux", [], True),
        ("aarch64-linux", [], False),
        ("x86_64-linux", ["kvm"], True),
        ("x86_64-linux", ["kvm", "gpu"], False),  # 19
        ("x86_64-linux", ["kvm", "kvm"], True),
        ("builtin", [], True),  # 20
        ("builtin", ["gpu"], False),  # 21
    ],
)
def test_only_what_a_worker_can_run_is_assigned(farm, system, features, gets_it):
    farm.submit(job("a", system=system, required_features=features))
    farm.worker("w", systems=("x86_64-linux", "i686-linux"), features=("kvm",))
    assert (farm.request("w") is not None) == gets_it


def test_a_worker_without_build_gets_not_even_a_builtin_job(farm):  # 22
    farm.submit(job("a", system="builtin"))
    farm.worker("w", can=m.Capabilities(fetch=True, eval=True, build=False))
    assert farm.request("w") is None


def test_no_build_before_capabilities(farm):
    farm.submit(job("a"))
    farm.send("w", m.InitConnection(versions=(1, 1), id="w", capabilities=BOTH))
    assert farm.request("w") is None


def test_dropped_and_added_systems_count_from_the_next_request_on(farm):  # 23, 24
    farm.worker("w", slots=2)
    farm.submit(job("a"), job("b"), job("c", system="riscv64-linux"))
    running = farm.request("w")
    farm.send("w", m.WorkerCapabilities(
        architectures=["riscv64-linux"], system_features=[], max_concurrent_builds=2))  # fmt: skip
    assert farm.status(running.job.name) == "Building"
    assert farm.request("w").job.name == "c"


def test_fewer_slots_abort_nothing_and_hold_back_the_next(farm):  # 25
    farm.worker("w", slots=2)
    farm.submit(job("a"), job("b"), job("c"))
    first, second = farm.request("w"), farm.request("w")
    farm.send("w", m.WorkerCapabilities(
        architectures=["x86_64-linux"], system_features=[], max_concurrent_builds=1))  # fmt: skip
    farm.complete("w", first)
    assert farm.request("w") is None
    farm.complete("w", second)
    assert farm.request("w").job.name == "c"
    assert not told(farm, "w", m.AbortJob)


def test_an_empty_zone_is_no_zone(farm):  # 26
    farm.worker("w")
    farm.send("w", m.WorkerCapabilities(
        architectures=[], system_features=[], max_concurrent_builds=1, zone="", endpoint="",
    ))  # fmt: skip
    session = farm.sessions.by_worker["w"]
    assert (session.announced.zone, session.announced.endpoint) == (None, None)


# -- assignment --------------------------------------------------------------------------------


def test_equal_totals_go_to_the_smaller_id(farm):  # 58
    farm.worker("w", slots=3)
    farm.submit(job("x", job_id="b"), job("y", job_id="a"), job("z", job_id="B"))
    assert [farm.request("w").job_id for _ in range(3)] == ["B", "a", "b"]


def test_a_build_waits_for_its_scores_or_for_four_ticks(farm):  # 62, 63
    farm.worker("w")
    farm.submit(job("a"))
    assert farm.send("w", m.RequestJob(kind="build")) == []
    farm.wait(16)
    assert farm.send("w", m.RequestJob(kind="build")) == []
    farm.wait(5)
    [given] = farm.send("w", m.RequestJob(kind="build"))
    assert given.job.name == "a"


def test_kinds_are_kept_apart_and_so_are_their_slots(farm):  # 64, 65, 67
    farm.worker("w", can=BOTH)
    farm.submit(job("a"), evaluations=[graph_evaluation()])
    assert isinstance(farm.request("w", "eval").job, m.EvalJob)
    assert farm.request("w", "eval") is None
    assert farm.request("w").job.name == "a"


def test_slots_limit_builds_whatever_is_asked(farm):  # 66, 128
    farm.worker("w", slots=2)
    farm.submit(*(job(f"j{n}") for n in range(5)))
    farm.score_all("w")
    given = farm.send("w", *[m.RequestJob(kind="build")] * 5)
    assert len(given) == 2
    farm.answer("w", given[0], accepted=True)
    farm.complete("w", given[0])
    assert len(farm.send("w", *[m.RequestJob(kind="build")] * 5)) == 1


def test_two_requests_for_one_job(farm):  # 68
    farm.worker("v")
    farm.worker("w")
    farm.submit(job("a"))
    assert farm.request("v") is not None
    assert farm.request("w") is None


def test_a_lost_race_moves_on_and_three_more_tries_are_all(farm):  # 69, 70
    farm.worker("w", slots=9)
    farm.submit(*(job(f"j{n}") for n in range(6)))
    other = SqliteLedger.open(farm.folder / "ledger.sqlite3", "other")

    def steal(*names: str) -> None:
        rows = [ClaimRecord(f"x-{n}", farm.ids[n], "v", "s", "other", 0.0) for n in names]
        assert all(other.apply([OpenClaim(row) for row in rows], 0.0, 1.0))

    steal("j0")
    assert farm.request("w").job.name == "j1"
    steal("j2", "j3", "j4", "j5")
    assert farm.request("w") is None
    assert farm.farm.handout.lost_races == 5
    other.close()


def test_a_claim_that_cannot_be_written_leaves_the_job_pending(farm):  # 71
    farm.worker("w")
    farm.submit(job("a"))
    farm.score_all("w")
    farm.fail_commits = 1
    assert farm.send("w", m.RequestJob(kind="build")) == []
    assert not farm.farm.assigner.claims
    farm.wait(1.5)
    assert farm.request("w").job.name == "a"


def test_the_prioritized_goes_before_the_one_that_starves(farm):  # 75
    farm.worker("w")
    farm.submit(job("old"))
    farm.wait(86_400, step=600)
    farm.send("w", m.Reject(code=1, reason="x"))
    farm.lose("w")
    farm.worker("w", peer="again")
    farm.submit(job("urgent", prioritized=True))
    assert farm.request("again").job.name == "urgent"


# -- answers and reports -----------------------------------------------------------------------


def test_a_decline_returns_the_job_and_spares_the_decliner_for_a_growing_while(farm):  # 86, 87
    farm.worker("w")
    farm.worker("v")
    farm.submit(job("a"))
    ids = set()
    for pause in (1.0, 2.0, 4.0):
        given = farm.request("w", accept=False)
        ids.add(given.assignment_id)
        farm.answer("w", given, accepted=False)
        assert farm.request("w", accept=False) is None
        farm.wait(pause - 0.1, step=0.1)
        assert farm.request("w", accept=False) is None
        farm.wait(0.2, step=0.1)
    assert len(ids) == 3
    assert farm.outcomes("a") == ["Declined"] * 3
    given = farm.request("v")
    assert given.job.name == "a"


def test_an_assignment_without_an_answer_counts_as_declined(farm):
    farm.worker("w")
    farm.worker("v")
    farm.submit(job("a"))
    given = farm.request("w", accept=False)
    farm.wait(9.5)
    assert farm.outcomes("a") == [None]
    farm.wait(1)
    assert farm.outcomes("a") == ["Unanswered"]
    [abort] = told(farm, "w", m.AbortJob)
    assert abort.assignment_id == given.assignment_id
    farm.answer("w", given, accepted=True)
    farm.complete("w", given)
    assert farm.status("a") == "Queued"
    assert farm.request("v").job.name == "a"


@pytest.mark.parametrize("alter", ["old", "other", "unknown"])
def test_reports_under_other_ids_change_nothing(farm, alter):  # 88, 89, 90
    farm.worker("w")
    farm.worker("v")
    farm.submit(job("a"))
    first = farm.request("w", accept=False)
    farm.answer("w", first, accepted=False)
    second = farm.request("v")
    stale = {
        "old": ("w", first),
        "other": ("w", second),
        "unknown": ("v", m.AssignJob(job_id="nope", assignment_id="x", job=first.job)),
    }[alter]
    before = farm.farm.reports.stale
    assert farm.complete(*stale) == []
    assert farm.farm.reports.stale == before + 1
    assert farm.status("a") == "Building"
    assert isinstance(farm.complete("v", second)[-1], m.Recorded)
    assert (farm.status("a"), farm.outcomes("a")) == ("Completed", ["Declined", "Completed"])


def test_a_second_completion_is_ignored(farm):  # 94, 95
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    farm.complete("w", given)
    farm.fail("w", given, "Permanent")
    assert farm.outcomes("a") == ["Completed"]
    assert farm.status("a") == "Completed"


def test_recorded_waits_for_the_fsync(farm):
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    farm.auto_sync = False
    assert not [a for a in farm.complete("w", given) if isinstance(a, m.Recorded)]
    farm.auto_sync = True
    farm.wait(0.5)
    assert told(farm, "w", m.Recorded)


def test_transient_failures_are_retried_with_backoff_three_times_in_all(farm):
    farm.worker("w")
    farm.submit(job("a"), job("b", "a"))
    for backoff in (30, 60):
        farm.fail("w", farm.request("w"), "Transient")
        assert farm.status("a") == "Queued"
        farm.wait(backoff - 1, step=1)
        assert farm.request("w") is None
        farm.wait(2, step=1)
    farm.fail("w", farm.request("w"), "Transient")
    assert (farm.status("a"), farm.status("b")) == ("Failed", "DependencyFailed")


@pytest.mark.parametrize(("kind", "ends"), [("Permanent", "Failed"), ("Timeout", "TimedOut")])
def test_final_failures_take_all_that_needs_the_job(farm, kind, ends):
    farm.worker("w")
    farm.submit(job("a"), job("b", "a"), job("c", "b"), job("other"))
    given = farm.request("w")
    farm.fail("w", given, kind)
    status = [farm.status(n) for n in ("a", "b", "c", "other")]
    assert status == [ends, "DependencyFailed", "DependencyFailed", "Queued"]


def test_canceled_by_a_draining_worker_costs_nothing(farm):  # 98
    farm.submit(job("a"))
    for n in range(7):
        farm.worker(f"w{n}")
        given = farm.request(f"w{n}")
        farm.send(f"w{n}", m.Draining())
        farm.fail(f"w{n}", given, "Canceled")
    record = farm.ledger.job(farm.ids["a"], 0.0)
    assert (record.status, record.attempts, record.losses) == ("Queued", 0, 0)


def test_a_job_that_is_lost_five_times_fails_and_says_so(farm):
    farm.submit(job("a"), job("fine"))
    for n in range(5):
        farm.worker(f"w{n}")
        assert farm.request(f"w{n}").job.name == "a"
        farm.lose(f"w{n}")
        farm.wait(31, step=1)
    record = farm.ledger.job(farm.ids["a"], 0.0)
    assert (record.status, record.losses) == ("Failed", 5)
    assert "lost 5 workers" in record.error
    assert farm.status("fine") == "Queued"


# -- abort -------------------------------------------------------------------------------------


def cancel(farm, *targets: str) -> m.CmdCancelReply:
    return farm.send("client", m.CmdCancel(request=2, targets=list(targets)))[-1]


def test_a_running_job_is_told_once_and_aborted_when_confirmed(farm):  # 100, 102
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    assert cancel(farm, farm.ids["a"]).requested == [farm.ids["a"]]
    cancel(farm, farm.ids["a"])
    assert len(told(farm, "w", m.AbortJob)) == 1
    assert farm.status("a") == "Building"
    farm.fail("w", given, "Aborted")
    assert farm.status("a") == "Aborted"


def test_an_abort_that_is_never_confirmed_frees_all_after_300_seconds(farm):  # 101
    farm.worker("w")
    farm.submit(job("a"), job("b"))
    farm.request("w")
    cancel(farm, farm.ids["a"])
    for _ in range(59):
        farm.wait(5)
        farm.send("w", m.WorkerMetrics())
    assert farm.outcomes("a") == [None]
    farm.wait(6)
    assert (farm.status("a"), farm.outcomes("a")) == ("Aborted", ["Aborted"])
    assert farm.request("w").job.name == "b"


def test_building_of_an_aborted_job_is_answered_with_abort(farm):  # 99
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    cancel(farm, farm.ids["a"])
    [again] = farm.send("w", m.JobUpdate(
        job_id=given.job_id, assignment_id=given.assignment_id, update=m.Building()))  # fmt: skip
    assert isinstance(again, m.AbortJob)


def test_a_build_that_two_wanted_goes_on_when_one_withdraws(farm):  # 43, 104
    farm.worker("w")
    first = farm.submit(job("a"), job("mine"))
    second = farm.submit(job("a"))
    assert first.jobs["/nix/store/a.drv"] == second.jobs["/nix/store/a.drv"]
    given = farm.request("w")
    assert cancel(farm, first.submission).aborted == [farm.ids["mine"]]
    farm.complete("w", given)
    assert (farm.status("a"), farm.status("mine")) == ("Completed", "Aborted")


def test_an_aborted_evaluation_takes_its_pending_builds_along(farm):  # 47
    farm.worker("w", can=BOTH, slots=2)
    evaluation = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    given = farm.request("w", "eval")
    farm.send("w", batch(given, job("x"), job("y", "x")))
    cancel(farm, evaluation)
    assert not list(farm.farm.assigner.pool)
    farm.fail("w", given, "Aborted")
    assert {j.status for j in farm.ledger.jobs_page(None, None, 10)} == {"Aborted"}


# -- loss and liveness -------------------------------------------------------------------------


def test_a_lost_worker_keeps_its_jobs_for_the_grace_and_resumes_them(farm):  # 106
    farm.worker("w", slots=2)
    farm.submit(job("a"), job("b"))
    first, second = farm.request("w"), farm.request("w")
    farm.lose("w")
    farm.wait(20)
    running = (m.ClaimRef(job_id=first.job_id, assignment_id=first.assignment_id),)
    ack = farm.worker("w", peer="w-again", running=running)[0]
    assert ack.resumed == [first.assignment_id]
    assert farm.outcomes(second.job.name) == ["Abandoned"]
    farm.complete("w-again", first)
    assert farm.status(first.job.name) == "Completed"


def test_without_a_return_they_are_pending_after_the_grace_and_at_once_after_goodbye(farm):  # 106
    farm.worker("v")
    farm.worker("w")
    farm.submit(job("a"), job("b"))
    lost, left = farm.request("v"), farm.request("w")
    farm.lose("v")
    farm.send("w", m.Goodbye())
    assert (farm.status(lost.job.name), farm.status(left.job.name)) == ("Building", "Queued")
    farm.wait(29)
    assert farm.status(lost.job.name) == "Building"
    farm.wait(2)
    assert farm.status(lost.job.name) == "Queued"


def test_silence_drops_a_worker_just_after_the_limit(farm):  # 107, 110, 111
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    farm.send("w", m.Draining())
    farm.wait(119.5)
    assert farm.status("a") == "Building"
    farm.wait(1.5)
    assert farm.status("a") == "Queued"
    assert isinstance(told(farm, "w", m.Reject)[-1], m.Reject)
    farm.complete("w", given)
    assert farm.status("a") == "Queued"


@pytest.mark.parametrize(
    "message", [m.RequestJobChunk(scores=[]), m.WorkerMetrics(), m.Pong(nonce=3), m.ReauthRequest()]
)
def test_every_message_counts_as_alive(farm, message):  # 108
    farm.worker("w")
    for _ in range(4):
        farm.wait(100, step=1)
        farm.send("w", message)
    assert "w" in farm.sessions.by_worker


def test_a_timeout_of_zero_drops_nobody(make_farm):  # 109
    farm = make_farm(heartbeat_timeout=0.0)
    assert farm.worker("w")[0].heartbeat_timeout == 0
    farm.wait(5_000, step=10)
    assert "w" in farm.sessions.by_worker


def test_silent_holders_of_claims_are_pinged(farm):
    farm.worker("w")
    farm.submit(job("a"))
    farm.wait(5)
    assert not told(farm, "w", m.Ping)
    farm.request("w")
    farm.wait(2.5)
    assert told(farm, "w", m.Ping)


def test_a_server_that_did_not_run_judges_nobody_for_it(farm):  # 112
    farm.worker("w")
    farm.now += 600
    farm.wait(1)
    farm.send("w", m.WorkerMetrics())
    farm.wait(60)
    assert "w" in farm.sessions.by_worker


def test_a_restarted_server_waits_for_the_workers_return(farm):  # 28, 30
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    farm.now += 480
    farm.restart()
    farm.worker("v")
    assert farm.request("v") is None
    running = (m.ClaimRef(job_id=given.job_id, assignment_id=given.assignment_id),)
    assert farm.worker("w", running=running)[0].resumed == [given.assignment_id]
    farm.complete("w", given)
    assert farm.outcomes("a") == ["Completed"]


def test_orphans_of_a_dead_server_end_after_the_heartbeat_timeout_without_blame(farm):
    farm.worker("w")
    farm.submit(job("a"))
    farm.request("w")
    farm.restart()
    farm.wait(119)
    assert farm.outcomes("a") == [None]
    farm.wait(2)
    record = farm.ledger.job(farm.ids["a"], 0.0)
    assert (record.status, record.losses) == ("Queued", 0)


@pytest.mark.parametrize("jump", [-400 * 86_400.0, -40.0, 3_600.0, 400 * 86_400.0])
def test_no_job_waits_longer_because_the_wall_clock_was_set(farm, jump):  # simulation: power/8
    farm.worker("w")
    farm.submit(job("a"))
    given = farm.request("w")
    farm.send("w", m.JobFailed(job_id=given.job_id, assignment_id=given.assignment_id,
                               kind="Transient", error="no"))  # fmt: skip
    farm.wait(5.0)
    farm.wall_offset += jump
    farm.restart()
    [node] = farm.farm.feeder.nodes.values()
    assert node.ready_at <= farm.now
    farm.wait(30.5)
    farm.worker("w")
    assert farm.request("w").job.name == "a"


def test_a_restarted_dispatch_keeps_sessions_and_running_jobs(farm):  # 113
    farm.worker("w", slots=2)
    farm.submit(job("a"), job("b"))
    given = farm.request("w")
    farm.start_dispatch()
    assert farm.outcomes(given.job.name) == [None]
    farm.complete("w", given)
    assert farm.status(given.job.name) == "Completed"
    assert farm.request("w") is not None


# -- draining, idle slots -----------------------------------------------------------------------


def test_a_draining_worker_reports_and_gets_nothing(farm):  # 117, 118
    farm.worker("w", slots=2)
    farm.submit(job("a"), job("b"))
    given = farm.request("w")
    farm.send("w", m.Draining())
    assert farm.request("w") is None
    assert farm.farm.assigner.idle_kinds("w", farm.now) == []
    assert isinstance(farm.complete("w", given)[-1], m.Recorded)


def test_an_operators_drain_outlives_reconnect_and_restart(farm):
    farm.submit(job("a"))
    done = farm.send("client", m.CmdDrain(request=1, worker="w", reason="disk"))[-1]
    assert isinstance(done, m.CmdDone)
    farm.worker("w")
    assert farm.request("w") is None
    farm.restart()
    farm.worker("w", peer="w2")
    assert farm.request("w2") is None
    farm.send("client", m.CmdHello(versions=(1, 1)), m.CmdUndrain(request=2, worker="w"))
    assert farm.request("w2").job.name == "a"


def test_nobody_awaits_an_input_for_a_build_that_was_cancelled(farm):  # simulation: people/68
    farm.submit(evaluations=[graph_evaluation()])
    farm.worker("w", can=BOTH)
    given = farm.request("w", "eval")
    farm.send("w", batch(given, job("a", "later"), job("b", "a", "later")))
    assert farm.farm.feeder.is_awaited("/nix/store/later.drv")
    farm.send("client", m.CmdHello(versions=(1, 1)), m.CmdCancel(request=1, targets=[given.job_id]))
    assert not farm.farm.feeder.is_awaited("/nix/store/later.drv")
    farm.fail("w", given, "Aborted")
    assert not farm.farm.feeder.nodes


def test_a_drain_that_was_lost_with_dispatch_does_not_stick_to_the_session(
    farm,
):  # simulation: clusters/23
    farm.worker("w")
    farm.submit(job("a"))
    farm.fail_commits = 1
    farm.send("client", m.CmdHello(versions=(1, 1)), m.CmdDrain(request=1, worker="w", reason="x"))
    assert not told(farm, "client", m.CmdDone)
    farm.start_dispatch()  # before the commit was tried again
    assert farm.request("w").job.name == "a"


def test_an_unanswered_request_is_an_idle_slot_for_25_seconds(farm):  # 123, 124, 127
    farm.worker("w")
    assert farm.request("w") is None
    farm.wait(24)
    assert farm.farm.assigner.idle_kinds("w", farm.now) == ["build"]
    farm.submit(job("a"))
    assert not told(farm, "w", m.AssignJob)
    farm.wait(2)
    assert farm.farm.assigner.idle_kinds("w", farm.now) == []
    farm.request("w")
    assert farm.farm.assigner.idle_kinds("w", farm.now) == []


# -- evaluations, resubmission --------------------------------------------------------------------


def test_builds_start_while_the_evaluation_runs_and_decide_its_end(farm):
    farm.worker("w", can=BOTH)
    evaluation = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    farm.ids["eval"] = evaluation
    given = farm.request("w", "eval")
    farm.send("w", batch(given, job("late", "first")))  # its input comes in a later batch
    farm.send("w", batch(given, job("first")))
    first = farm.request("w")
    assert first.job.name == "first"
    assert isinstance(farm.complete("w", given)[-1], m.Recorded)
    assert farm.status("eval") == "Building"
    farm.complete("w", first)
    last = farm.request("w")
    assert [p.path for p in last.job.required_paths] == ["/nix/store/first"]
    farm.complete("w", last)
    assert farm.status("eval") == "Completed"


@pytest.mark.parametrize(
    "jobs", [[job("a", "b"), job("b", "a")], [job("a", "never-reported")]], ids=["cycle", "missing"]
)
def test_an_evaluation_whose_builds_can_never_start_fails(farm, jobs):
    farm.worker("w", can=BOTH)
    farm.ids["eval"] = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    given = farm.request("w", "eval")
    for one in jobs:
        farm.send("w", batch(given, one))
    farm.complete("w", given)
    assert farm.status("eval") == "Failed"


def test_what_failed_is_queued_again_with_what_failed_for_its_sake(farm):
    farm.worker("w")
    farm.submit(job("a"), job("b", "a"))
    farm.fail("w", farm.request("w"), "Permanent")
    assert farm.status("b") == "DependencyFailed"
    farm.submit(job("a"))
    farm.complete("w", farm.request("w"))
    farm.complete("w", farm.request("w"))
    assert (farm.status("a"), farm.status("b")) == ("Completed", "Completed")
    assert dict(farm.farm.feeder.counts)["Completed"] == 2


def test_a_bad_submission_changes_nothing(farm):
    refused = farm.submit(job("fine"), job("a", "b"), job("b", "a"))
    assert (type(refused), refused.code) == (m.CmdError, 2)
    assert "cycle" in refused.message
    assert farm.ledger.jobs_page(None, None, 10) == []


def test_a_held_completion_that_dispatch_forgot_is_no_claim_for_ever(farm):
    farm.worker("w", can=BOTH)
    farm.ids["eval"] = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    given = farm.request("w", "eval")
    farm.auto_admit = False
    farm.send("w", batch(given, job("a")))
    assert not any(isinstance(a, m.Recorded) for a in farm.complete("w", given))
    farm.farm.out.admissions = []  # taken by the ledger, which answers nobody
    farm.auto_admit = True
    farm.start_dispatch()
    farm.wait(11)
    assert farm.status("eval") == "Queued"
    assert farm.outcomes("eval") == ["Unanswered"]
