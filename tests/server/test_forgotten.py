"""Dispatch is restarted while the ledger takes nothing: reports that it took are sent again."""

from __future__ import annotations

import pytest

from tests.server.farm_harness import BOTH, job
from tests.server.test_jobs import batch, graph_evaluation
from transport import messages as m


def come_back(farm, given: m.AssignJob) -> m.InitAck:
    """The worker was told that it has no session, and opens another, naming its report."""
    assert isinstance(farm.answers[b"w"][-1], m.Reject)
    running = (m.ClaimRef(job_id=given.job_id, assignment_id=given.assignment_id),)
    return farm.worker("w", can=BOTH, peer="w-again", running=running)[0]


def test_a_report_whose_commit_failed_is_asked_for_again(farm):
    farm.worker("w", can=BOTH)
    farm.submit(job("a"))
    given = farm.request("w")
    farm.fail_commits = 1
    farm.complete("w", given)
    assert farm.farm.handout.has_unwritten
    farm.start_dispatch(has_forgotten=True)
    ack = come_back(farm, given)
    assert ack.resumed == [given.assignment_id]
    assert isinstance(farm.complete("w-again", given)[-1], m.Recorded)
    assert (farm.status("a"), farm.outcomes("a")) == ("Completed", ["Completed"])


def test_so_is_the_end_of_an_evaluation_whose_batch_is_not_in_yet(farm):
    farm.worker("w", can=BOTH)
    farm.ids["eval"] = farm.submit(evaluations=[graph_evaluation()]).evaluations[0]
    given = farm.request("w", "eval")
    farm.auto_admit = False
    farm.send("w", batch(given, job("x")))
    farm.complete("w", given)
    assert farm.farm.handout.has_unwritten
    farm.auto_admit = True
    farm.start_dispatch(has_forgotten=True)
    assert come_back(farm, given).resumed == [given.assignment_id]
    farm.send("w-again", batch(given, job("x")))
    farm.complete("w-again", given)
    farm.complete("w-again", farm.request("w-again"))
    assert farm.status("eval") == "Completed"


@pytest.mark.parametrize("is_running", [True, False])
def test_with_all_written_sessions_go_on(farm, is_running):
    farm.worker("w", can=BOTH)
    farm.submit(job("a"))
    given = farm.request("w")
    if not is_running:
        farm.complete("w", given)
    assert not farm.farm.handout.has_unwritten
    farm.start_dispatch()
    assert not [a for a in farm.answers[b"w"] if isinstance(a, m.Reject)]
