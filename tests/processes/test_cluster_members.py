"""The example of docs/cluster-members.md on real processes: three members meet by signals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes.conftest import until

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "cluster-rendezvous"


def submission(tag: str) -> str:
    """What `make.py` prints."""
    return subprocess.run(
        [sys.executable, str(EXAMPLE / "make.py"), tag], capture_output=True, text=True, check=True
    ).stdout


def test_three_processes_exchange_their_ports_and_add_up_numbers(farm):
    farm.server("--tick", "0.5")
    for name in ("w1", "w2", "w3"):
        farm.worker(name, "--endpoint", "127.0.0.1", slots=1)
    answer = farm.json("submit", "-", stdin=submission("first"))
    [cluster] = answer["clusters"]
    assert len(answer["jobs"]) == 3
    until(lambda: farm.json("cluster", "show", cluster)["status"] == "Completed", "it ends", 60)
    jobs = farm.jobs()
    assert jobs["sum-lead"]["status"] == "Completed"
    assert len({job["worker"] for job in jobs.values()}) == 3
    [lead] = [d for d in json.loads(submission("first"))["clusters"][0]["members"] if
              d["role"] == "lead"]  # fmt: skip
    output = farm.folder / "store" / lead["job"]["outputs"]["out"].rpartition("/")[2]
    assert output.read_text() == f"{sum(range(1_000_000))}\n"
    log = farm.run("logs", jobs["sum-lead"]["job_id"]).stdout
    assert "('lead', 0) met [('helper', 0), ('helper', 1)]" in log


def test_a_cluster_waits_for_machines_and_says_so(farm):
    farm.server("--tick", "0.5")
    farm.worker("w1", slots=4)
    answer = farm.json("submit", "-", stdin=submission("second"))
    job = next(iter(answer["jobs"].values()))
    reason = until(
        lambda: (r := farm.json("explain", job)["reason"])["code"] == "cluster" and r, "it waits"
    )
    assert "3 needed" in reason["text"]
    farm.worker("w2")
    farm.worker("w3")
    [cluster] = answer["clusters"]
    until(lambda: farm.json("cluster", "show", cluster)["status"] == "Completed", "it ends", 60)


@pytest.mark.parametrize("loses", ["w1"])
def test_a_lost_member_takes_the_attempt_along_and_the_next_one_succeeds(farm, loses):
    farm.server("--tick", "0.5", "--reconnect-grace", "1", "--cluster-retry-delay", "0.5")
    workers = {name: farm.worker(name, slots=1) for name in ("w1", "w2", "w3")}
    made = json.loads(submission("third"))
    for member in made["clusters"][0]["members"]:
        # The first attempt hangs after the rendezvous; the second finds its mark.
        code = member["job"]["args"][2]
        mark = farm.folder / f"mark-{member['role']}-{member['job']['name']}"
        member["job"]["args"][2] = code.replace(
            "share = sum(",
            f"mark = pathlib.Path({str(mark)!r})\nif not mark.exists():\n"
            "    mark.touch()\n    import time\n    time.sleep(600)\nshare = sum(",
        )
    answer = farm.json("submit", "-", stdin=json.dumps(made))
    [cluster] = answer["clusters"]
    until(lambda: len(list(farm.folder.glob("mark-*"))) == 3, "all have met", 60)
    workers[loses].kill()
    workers[loses].wait()
    farm.worker(loses, slots=1)  # it ends what its predecessor left behind
    shown = until(
        lambda: (c := farm.json("cluster", "show", cluster))["status"] == "Completed" and c,
        "the second attempt ends", 60,
    )  # fmt: skip
    assert [attempt["outcome"] for attempt in shown["history"]] == ["Failed", "Succeeded"]
