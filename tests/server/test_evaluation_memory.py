"""What an evaluation knows of its builds survives dispatch and the server."""

from __future__ import annotations

import pytest

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
