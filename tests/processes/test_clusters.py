"""Clusters with real server and worker processes, the server killed in each phase."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.processes.conftest import FarmOfProcesses, build, drv, until

pytestmark = pytest.mark.processes


def cluster(*names: str, script: str, **more: Any) -> dict[str, Any]:
    members = [{"role": "node", "job": build(name, script)} for name in names]
    return {"cluster_id": "k", "members": members, **more}


def statuses(farm: FarmOfProcesses) -> dict[str, str]:
    return {name: job["status"] for name, job in farm.jobs().items()}


def attempts(farm: FarmOfProcesses) -> list[tuple[bool, str | None]]:
    sql = "SELECT started_at IS NOT NULL, outcome FROM cluster_attempt ORDER BY created_at, id"
    return [(bool(started), outcome) for started, outcome in farm.rows(sql)]


def start_workers(farm: FarmOfProcesses, *names: str, slots: int = 1):
    workers = [farm.worker(name, slots=slots) for name in names]
    until(lambda: len(farm.json("status")["workers"]) == len(names), "workers are there")
    return workers


# Each waits until all of them are there: sequential starts would never end.
TOGETHER = (
    "echo > {dir}/$name; while [ $(ls {dir} | wc -l) -lt 3 ]; do sleep 0.05; done; echo > $out"
)


def test_three_jobs_that_wait_for_each_other(farm, tmp_path: Path):
    farm.server()
    start_workers(farm, "u", "v", "w")
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    names = ("a", "b", "c")
    jobs = [build(name, TOGETHER.format(dir=meeting)) for name in names]
    for job in jobs:
        job["env"]["name"] = job["name"]
    single = build("after", "echo > $out", *names)
    members = [{"role": "node", "job": drv(name)} for name in names]
    told = farm.submit(*jobs, single, clusters=[{"cluster_id": "k", "members": members}])
    assert told["clusters"] == ["k"]
    assert farm.run("wait", "--timeout", "60").returncode == 0
    assert set(statuses(farm).values()) == {"Completed"}
    assert attempts(farm) == [(True, "Succeeded")]
    shown = farm.json("cluster", "show", "k")
    assert {seat["worker"] for seat in shown["history"][0]["seats"]} == {"u", "v", "w"}


def test_the_server_is_killed_while_a_cluster_runs(farm, tmp_path: Path):
    server = farm.server()
    start_workers(farm, "v", "w")
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo > $out"
    farm.submit(clusters=[cluster("a", "b", script=wait)])
    until(lambda: attempts(farm) == [(True, None)], "the cluster runs")
    server.send_signal(signal.SIGKILL)
    server.wait()
    farm.server()
    gate.touch()
    assert farm.run("wait", "--timeout", "60").returncode == 0
    assert attempts(farm) == [(True, "Succeeded")]


def test_the_server_is_killed_while_seats_are_held(farm):
    server = farm.server("--cluster-prepare-timeout", "300", "--tick", "1")
    held, stuck = start_workers(farm, "v", "w")
    # Long enough for the attempt to be seen: one of the two does not answer.
    until(lambda: all(w["idle"] for w in farm.json("status")["workers"]), "both asked")
    stuck.send_signal(signal.SIGSTOP)
    try:
        farm.submit(clusters=[cluster("a", "b", script="echo > $out", retry_budget=0)])
        until(lambda: attempts(farm) == [(False, None)], "seats are held", 40)
        server.send_signal(signal.SIGKILL)
        server.wait()
        farm.server("--cluster-retry-delay", "1", "--tick", "1")
        # Before the ready file is written.
        assert attempts(farm) == [(False, "PrepareFailed")]
        assert farm.rows("SELECT count(*) FROM dispatched_job WHERE closed_at IS NULL") == [(0,)]
    finally:
        stuck.send_signal(signal.SIGCONT)
    assert farm.run("wait", "--timeout", "60").returncode == 0
    assert attempts(farm)[-1] == (True, "Succeeded")
    assert held.poll() is None


def test_a_cluster_is_cancelled_and_its_processes_end(farm):
    farm.server()
    start_workers(farm, "v", "w")
    farm.submit(clusters=[cluster("a", "b", script="sleep 600")])
    until(lambda: attempts(farm) == [(True, None)], "the cluster runs")
    assert len(farm.json("cluster", "cancel", "k")["requested"]) == 2
    until(lambda: statuses(farm) == {"a": "Aborted", "b": "Aborted"}, "both were aborted")
    assert farm.json("cluster", "list")[0]["status"] == "Aborted"


def test_a_lost_worker_makes_another_attempt_elsewhere(farm, tmp_path: Path):
    farm.server("--cluster-retry-delay", "0", "--reconnect-grace", "1")
    v, _ = start_workers(farm, "v", "w")
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.05; done; echo > $out"
    farm.submit(clusters=[cluster("a", "b", script=wait, retry_budget=1)])
    until(lambda: attempts(farm) == [(True, None)], "the cluster runs")
    v.send_signal(signal.SIGKILL)
    v.wait()
    farm.worker("x", slots=1)
    until(lambda: attempts(farm) == [(True, "Failed"), (True, None)], "tried again", 60)
    gate.touch()
    assert farm.run("wait", "--timeout", "60").returncode == 0
    shown = farm.json("cluster", "show", "k")
    assert (shown["status"], shown["retry_budget"]) == ("Completed", 0)
    assert {seat["worker"] for seat in shown["history"][1]["seats"]} == {"w", "x"}
