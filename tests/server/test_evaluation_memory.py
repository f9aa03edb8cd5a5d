"""What an evaluation knows of its builds survives dispatch and the server."""

from __future__ import annotations

import pytest

from actors.server import feeder
from tests.server.farm_harness import BOTH, job
from tests.server.test_jobs import batch, graph_evaluation
from transport import messages as m


@pytest.fixture
def given(farm) -> m.AssignJob:
    """An evaluation that a worker runs; its id in the harness is `eval`."""
    farm.worker("w", can=BOTH, slots=2)
    farm.ids["eval"] = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    return farm.request("w", "eval")


def test_builds_that_failed_before_a_restart_count(farm, given):  # chaos, seed 2
    farm.send("w", batch(given, job("bad"), job("after", "bad"), job("slow")))
    farm.complete("w", given)
    for name in ("bad", "slow"):
        one = farm.request("w")
        assert one.job.name == name
        if name == "bad":
            farm.fail("w", one, "Permanent")
    farm.restart()
    farm.worker("w", running=(m.ClaimRef(job_id=one.job_id, assignment_id=one.assignment_id),))
    farm.complete("w", one)
    assert farm.status("eval") == "Failed"


def test_one_that_was_queued_again_and_completed_counts_no_more(farm, given):
    farm.send("w", batch(given, job("bad"), job("slow")))
    farm.complete("w", given)
    farm.fail("w", farm.request("w"), "Permanent")
    farm.submit(job("bad"))
    farm.restart()
    farm.worker("w")
    while (one := farm.request("w")) is not None:
        farm.complete("w", one)
    assert farm.status("eval") == "Completed"


def test_a_batch_that_was_refused_before_a_restart_counts(farm, given):
    farm.send("w", batch(given, job("slow")))
    farm.send("w", batch(given, job("same", "same")))
    farm.complete("w", given)
    slow = farm.request("w")
    farm.restart()
    farm.worker("w", running=(m.ClaimRef(job_id=slow.job_id, assignment_id=slow.assignment_id),))
    farm.complete("w", slow)
    assert farm.status("eval") == "Failed"
    assert "same" in farm.ledger.job(farm.ids["eval"], 0.0).error


# -- what another evaluation reported already ------------------------------------------------------


def ask_known(farm, given: m.AssignJob, *names: str) -> list[str]:
    paths = [f"/nix/store/{name}.drv" for name in names]
    question = m.QueryKnownDerivations(
        job_id=given.job_id, assignment_id=given.assignment_id, query_id=1, drv_paths=paths
    )
    return farm.send("w", question)[-1].known


def second_evaluation(farm) -> m.AssignJob:
    """Of the same builds; its id in the harness is `second`."""
    farm.ids["second"] = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    return farm.request("w", "eval")


@pytest.mark.parametrize("ending", ["Completed", "Failed"])
@pytest.mark.parametrize("restarts", [False, True])
def test_builds_that_another_evaluation_reported_decide_the_end_of_both(
    farm, given, ending, restarts
):
    farm.send("w", batch(given, job("top", "low"), job("low")))
    farm.complete("w", given)
    second = second_evaluation(farm)
    assert ask_known(farm, second, "top", "new") == ["/nix/store/top.drv"]
    farm.complete("w", second)
    assert (farm.status("eval"), farm.status("second")) == ("Building", "Building")
    if restarts:
        farm.restart()
        farm.worker("w")
    low = farm.request("w")
    assert low.job.name == "low"
    if ending == "Failed":
        farm.fail("w", low, "Permanent")
    else:
        farm.complete("w", low)
        assert farm.status("second") == "Building"
        farm.complete("w", farm.request("w"))
    assert (farm.status("eval"), farm.status("second")) == (ending, ending)


def test_what_a_second_evaluation_wants_outlives_the_first(farm, given):
    farm.send("w", batch(given, job("top", "low"), job("low")))
    farm.complete("w", given)
    second = second_evaluation(farm)
    ask_known(farm, second, "top")
    farm.complete("w", second)
    farm.send("client", m.CmdCancel(request=2, targets=[farm.ids["eval"]]))
    assert farm.status("eval") == "Aborted"
    farm.complete("w", farm.request("w"))
    farm.complete("w", farm.request("w"))
    assert farm.status("second") == "Completed"


def test_too_much_to_want_at_once_is_to_be_reported(farm, given, monkeypatch):
    monkeypatch.setattr(feeder, "MAX_ALSO_WANTED", 1)
    farm.send("w", batch(given, job("top", "low"), job("low")))
    farm.complete("w", given)
    second = second_evaluation(farm)
    assert ask_known(farm, second, "top") == []
    assert ask_known(farm, second, "low") == ["/nix/store/low.drv"]
    assert ask_known(farm, second, "top") == ["/nix/store/top.drv"]
