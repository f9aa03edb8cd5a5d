"""Cluster jobs by behaviour: the cores with a real ledger. Numbers are those of the behaviours."""

from __future__ import annotations

import pytest

from tests.server.cluster_harness import Clusters
from transport import messages as m


@pytest.fixture
def farm(tmp_path):
    farm = Clusters(tmp_path)
    yield farm
    farm.ledger.close()


def test_two_members_start_together_after_both_accepted(farm):  # 129
    farm.join("v", "w")
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
    assert {(r.role, r.index, r.worker_id) for r in started.roster} == {
        ("node", seats[0].index, "v"), ("node", seats[1].index, "w"),
    }  # fmt: skip


def test_members_that_all_complete_complete_the_cluster(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.run("v", "w")
    assert farm.cluster_status(cluster_id) == "Running"
    farm.complete("v", farm.seat("v"))
    assert farm.cluster_status(cluster_id) == "Running"  # 145
    assert farm.status(farm.seat("v").job.name) == "Building"
    assert farm.last("v", m.Recorded) is not None
    farm.complete("w", farm.seat("w"))
    assert (farm.status("a"), farm.status("b")) == ("Completed", "Completed")
    assert farm.cluster_status(cluster_id) == "Completed"
    assert farm.attempts(cluster_id) == [(True, "Succeeded")]
    assert farm.open_rows() == 0
