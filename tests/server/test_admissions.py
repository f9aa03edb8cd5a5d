"""The way of new jobs into the graph: whole or not at all, and nobody waits for a large one."""

from __future__ import annotations

import pytest

from actors.server import admissions
from actors.server.admissions import MAX_OPEN_SUBMISSIONS
from tests.server.farm_harness import BOTH, Harness, job
from transport import messages as m


def part(*jobs: m.SubmittedJob, request: int = 1, final: bool = False, **more) -> m.CmdSubmit:
    return m.CmdSubmit(request=request, is_final=final, jobs=list(jobs), **more)


def send(farm: Harness, *parts: m.CmdSubmit, peer: str = "client") -> list[m.Message]:
    return farm.send(peer, m.CmdHello(versions=(1, 1)), *parts)[1:]


def names(farm: Harness) -> list[str]:
    """What the ledger holds."""
    return sorted(info.name for info in farm.ledger.jobs_page(None, None, 1000))


# -- parts -------------------------------------------------------------------------------------


def test_parts_are_one_submission_in_any_order_of_jobs(farm):
    assert send(farm, part(job("b", "a"))) == []
    assert names(farm) == []
    [answer] = send(farm, part(job("a"), final=True))
    assert sorted(answer.jobs) == ["/nix/store/a.drv", "/nix/store/b.drv"]
    assert names(farm) == ["a", "b"]


def test_submissions_of_one_client_and_of_several_are_kept_apart(farm):
    send(farm, part(job("a")), part(job("b"), request=2))
    send(farm, part(job("c")), peer="other")
    [second] = send(farm, part(request=2, final=True))
    assert list(second.jobs) == ["/nix/store/b.drv"]
    assert names(farm) == ["b"]
    [other] = send(farm, part(final=True), peer="other")
    assert list(other.jobs) == ["/nix/store/c.drv"]


def test_parts_of_a_client_that_is_gone_are_forgotten(farm):
    send(farm, part(job("a")))
    farm.lose("client")
    farm.gone.clear()
    send(farm, part(job("b"), final=True))
    assert names(farm) == ["b"]


def test_of_a_submission_that_is_too_large_no_part_is_taken(farm, monkeypatch):
    monkeypatch.setattr(admissions, "MAX_JOBS", 3)
    parts = [part(job(f"a{n}"), job(f"b{n}")) for n in range(3)]
    [refused] = send(farm, *parts, part(job("last"), final=True))
    assert (type(refused), refused.code) == (m.CmdError, 2)
    assert names(farm) == []
    [answer] = send(farm, part(job("fine"), final=True))
    assert isinstance(answer, m.CmdSubmitted)
    [refused] = send(farm, part(*(job(f"c{n}") for n in range(4)), final=True))
    assert refused.code == 2
    send(farm, part(job("fine too"), final=True))
    assert names(farm) == ["fine", "fine too"]


def test_the_oldest_of_too_many_open_submissions_is_refused_whole(farm):
    send(farm, part(job("first")), peer="oldest")
    for n in range(MAX_OPEN_SUBMISSIONS):
        send(farm, part(job(f"j{n}")), peer=f"p{n}")
    refused = farm.answers[b"oldest"][-1]
    assert (type(refused), refused.code) == (m.CmdError, 1)
    assert send(farm, part(job("second"), final=True), peer="oldest") == []
    assert names(farm) == []
    [answer] = send(farm, part(job("again"), final=True), peer="oldest")
    assert isinstance(answer, m.CmdSubmitted)


def test_all_open_submissions_together_are_bounded(farm, monkeypatch):
    monkeypatch.setattr(admissions, "MAX_JOBS", 5)
    send(farm, part(*(job(f"a{n}") for n in range(4))))
    [refused] = send(farm, part(job("b"), job("c")), peer="other")
    assert (refused.code, "try again" in refused.message) == (1, True)
    [answer] = send(farm, part(final=True))
    assert len(answer.jobs) == 4


# -- whole or not at all -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jobs", "says"),
    [
        ([job("a", "b"), job("b", "a")], "cycle"),
        ([job("a", "a")], "a.drv"),
        ([job("a", "nowhere")], "nowhere.drv"),
        ([job("a", job_id="x"), job("b", job_id="x")], "x"),
        ([job("a"), job("a", system="other")], "a.drv"),
    ],
)
def test_a_graph_with_one_fault_changes_nothing(farm, jobs, says):
    [refused] = send(farm, part(job("fine"), *jobs, final=True))
    assert (type(refused), refused.code) == (m.CmdError, 2)
    assert says in refused.message
    assert "\n" not in refused.message
    assert names(farm) == []
    assert not farm.farm.feeder.nodes


def test_a_job_id_that_the_ledger_holds_for_another_job_is_refused(farm):
    send(farm, part(job("a", job_id="x"), final=True))
    [refused] = send(farm, part(job("b", job_id="x"), final=True))
    assert refused.code == 2
    assert names(farm) == ["a"]


def test_an_evaluation_may_not_bear_the_id_of_a_build(farm):
    evaluation = m.SubmittedEvaluation(source=m.EvalSource(kind="graph-file", ref="g"), job_id="x")
    [refused] = send(farm, part(job("a", job_id="x"), evaluations=[evaluation], final=True))
    assert (refused.code, "x" in refused.message) == (2, True)
    [refused] = send(farm, part(evaluations=[evaluation, evaluation], final=True))
    assert refused.code == 2
    assert names(farm) == []


def test_a_full_ledger_queue_refuses_and_nothing_is_left(farm):
    farm.auto_admit = False
    send(farm, part(job("a"), final=True))
    [request], farm.farm.out.admissions = farm.farm.out.admissions, []
    farm.farm.refuse_admission(request, farm.now)
    farm.auto_admit = True
    farm.wait(0.5)
    assert farm.answers[b"client"][-1].code == 1
    [answer] = send(farm, part(job("a"), final=True))
    assert isinstance(answer, m.CmdSubmitted)


def test_inputs_taken_as_built_are_no_obstacle(farm):
    farm.worker("w")
    send(farm, part(job("a", "elsewhere"), final=True, assume_inputs_built=True))
    assert farm.request("w").job.name == "a"


# -- known jobs --------------------------------------------------------------------------------


def test_the_second_to_submit_a_build_is_told_the_id_of_the_first(farm):
    farm.worker("w")
    [first] = send(farm, part(job("a", job_id="theirs"), final=True))
    [second] = send(farm, part(job("a", job_id="mine"), job("b", "a"), final=True))
    assert first.jobs["/nix/store/a.drv"] == second.jobs["/nix/store/a.drv"] == "theirs"
    assert farm.request("w").job.name == "a"


def test_an_input_that_is_built_while_its_dependent_is_admitted_counts_as_built(farm):
    farm.worker("w", slots=2)
    send(farm, part(job("a"), job("bad"), final=True))
    first, second = farm.request("w"), farm.request("w")
    given = {g.job.name: g for g in (first, second)}
    farm.auto_admit = False
    send(farm, part(job("b", "a"), job("c", "bad"), final=True))
    [request], farm.farm.out.admissions = farm.farm.out.admissions, []
    draft = request.draft()
    admitted = farm.ledger.admit(draft, 0.0)  # it saw both inputs still open
    farm.complete("w", given["a"])
    farm.fail("w", given["bad"], "Permanent")
    farm.take(admissions.AdmissionTaken(request.token, request.sender, draft, admitted))
    farm.ids |= {info.name: info.job_id for info in farm.ledger.jobs_page(None, None, 10)}
    assert (farm.status("b"), farm.status("c")) == ("Queued", "DependencyFailed")
    assert [p.path for p in farm.request("w").job.required_paths] == ["/nix/store/a"]


# -- large ones --------------------------------------------------------------------------------


def test_requests_are_served_while_a_large_submission_is_merged(farm):
    farm.worker("w")
    farm.submit(job("small"))
    farm.score_all("w")
    farm.auto_admit = False
    send(farm, part(*(job(f"j{n:04}") for n in range(2_000)), final=True))
    [request], farm.farm.out.admissions = farm.farm.out.admissions, []
    draft = request.draft()
    admitted = farm.ledger.admit(draft, 0.0)
    core = farm.farm
    core.take(admissions.AdmissionTaken(request.token, request.sender, draft, admitted), farm.now)
    chunks = 0
    while core.admissions.merging:
        assert core.deadline <= farm.now, "the next pass comes soon"
        before = len(core.feeder.nodes)
        core.expire(farm.now)
        assert len(core.feeder.nodes) - before <= admissions.MERGE_CHUNK
        chunks += 1
        if chunks == 2:
            session = core.sessions.by_worker["w"]
            claim = core.assigner.request(session, "build", farm.now)
            assert claim is not None
            core.handout.claim(claim)
            assert core.feeder.nodes[claim.job_id].name == "small"
    assert chunks == 2_000 // admissions.MERGE_CHUNK
    farm.wait(0.5)
    [given] = [a for a in farm.answers[b"w"] if isinstance(a, m.AssignJob)]
    assert given.job.name == "small"


def test_a_long_answer_comes_in_parts_and_only_the_last_is_final(farm, monkeypatch):
    monkeypatch.setattr(admissions, "ANSWER_CHUNK", 3)
    evaluation = m.SubmittedEvaluation(source=m.EvalSource(kind="graph-file", ref="g"))
    answers = send(
        farm, part(*(job(f"j{n}") for n in range(7)), evaluations=[evaluation], final=True)
    )
    assert [len(a.jobs) for a in answers] == [3, 3, 1]
    assert [a.is_final for a in answers] == [False, False, True]
    assert [len(a.evaluations) for a in answers] == [0, 0, 1]
    assert len({a.submission for a in answers}) == 1


def test_an_empty_submission_is_answered(farm):
    [answer] = send(farm, part(final=True))
    assert (answer.jobs, answer.is_final) == ({}, True)


# -- evaluations -------------------------------------------------------------------------------


@pytest.fixture
def evaluating(farm) -> tuple[Harness, m.AssignJob]:
    farm.worker("w", can=BOTH)
    evaluation = m.SubmittedEvaluation(
        source=m.EvalSource(kind="graph-file", ref="g"), job_id="eval"
    )
    send(farm, part(evaluations=[evaluation], final=True))
    farm.ids["eval"] = "eval"
    return farm, farm.request("w", "eval")


def report(given: m.AssignJob, *jobs: m.SubmittedJob) -> m.JobUpdate:
    derivations = [
        m.Derivation(**{f: getattr(j, f) for f in m.Derivation.__struct_fields__}) for j in jobs
    ]
    update = m.EvalResult(derivations=derivations, warnings=[], errors=[])
    return m.JobUpdate(job_id=given.job_id, assignment_id=given.assignment_id, update=update)


def test_a_completion_waits_until_all_that_was_reported_is_durable(evaluating):
    farm, given = evaluating
    farm.auto_admit = False
    farm.send("w", report(given, job("a")))
    assert farm.complete("w", given) == []
    assert farm.outcomes("eval") == [None]
    farm.auto_admit = True
    farm.wait(0.5)
    assert isinstance(farm.answers[b"w"][-1], m.Recorded)
    assert (farm.status("eval"), farm.outcomes("eval")) == ("Building", ["Completed"])


@pytest.mark.parametrize("is_back", [True, False])
def test_a_completion_that_waits_counts_though_its_connection_is_lost(evaluating, is_back):
    farm, given = evaluating
    claim = farm.farm.assigner.claims["eval"]
    claim.reported = m.Score("eval", 3, 5, False)
    farm.auto_admit = False
    farm.send("w", report(given, job("a")))
    farm.send("w", m.JobCompleted(job_id="eval", assignment_id=given.assignment_id,
                                  spans=[m.Span("prefetch", 0, 500)]))  # fmt: skip
    farm.lose("w")
    if is_back:
        ref = m.ClaimRef("eval", given.assignment_id)
        assert farm.worker("w", peer="again", can=BOTH, running=(ref,))[0].resumed
    farm.auto_admit = True
    farm.wait(0.5)
    assert (farm.status("eval"), farm.outcomes("eval")) == ("Building", ["Completed"])


def test_a_batch_that_cannot_be_taken_fails_the_evaluation_and_says_why(evaluating):
    farm, given = evaluating
    farm.send("w", report(given, job("a"), job("b", "b")))
    farm.complete("w", given)
    assert farm.status("eval") == "Failed"
    _, errors = farm.ledger.messages_of("eval")
    assert len(errors) == 1
    assert "b.drv" in errors[0]


def test_batches_of_a_cancelled_evaluation_leave_nothing_behind(evaluating):
    farm, given = evaluating
    farm.auto_admit = False
    farm.send("w", report(given, job("a"), job("b", "a")))
    farm.send("client", m.CmdCancel(request=2, targets=["eval"]))
    farm.fail("w", given, "Aborted")
    farm.auto_admit = True
    farm.wait(0.5)
    assert farm.status("eval") == "Aborted"
    assert farm.request("w") is None
    assert not farm.farm.feeder.nodes
