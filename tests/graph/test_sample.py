from __future__ import annotations

from actors.graph.order import check
from actors.graph.sample import BIG_FEATURE, sample_graph


def test_the_sample_is_whole_and_in_order():
    jobs = sample_graph("x86_64-linux")
    checked = check(jobs)
    assert list(checked.jobs) == jobs
    assert not checked.unknown_inputs
    assert 50 <= len(jobs) <= 70


def test_the_last_build_needs_every_other():
    jobs = {job.drv_path: job for job in sample_graph("x86_64-linux")}
    root = next(reversed(jobs))
    needed, pending = set(), [root]
    while pending:
        drv = pending.pop()
        if drv not in needed:
            needed.add(drv)
            pending += jobs[drv].input_drvs
    assert needed == set(jobs)


def test_the_sample_exercises_what_graphs_have():
    jobs = sample_graph("aarch64-linux", "/tmp/history")
    assert {job.system for job in jobs} == {"aarch64-linux", "builtin"}
    assert [job.name for job in jobs if job.required_features == [BIG_FEATURE]]
    assert all(job.env["history"] == "/tmp/history" for job in jobs)
    assert all(job.env["out"] == job.outputs["out"] for job in jobs)
