"""What is built under chaos, and that what is foretold of it is so."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from actors.graph.files import read_submission
from actors.graph.order import check
from bin.chaos.workload import Batch, Workload, _Graph, is_right

SYSTEM = "x86_64-linux"


def batches(seed: int, count: int, workers: int = 3) -> list[Batch]:
    workload = Workload(seed, SYSTEM, "/graphs", workers)
    return [workload.next_batch() for _ in range(count)]


def test_a_seed_decides_all():
    assert batches(1, 20) == batches(1, 20)
    assert batches(1, 20) != batches(2, 20)


def test_one_worker_gets_no_clusters():
    assert any(batch.clusters for batch in batches(1, 60, workers=2))
    assert not any(batch.clusters for batch in batches(1, 60, workers=1))


def test_all_kinds_come_and_each_is_a_graph_that_can_be_built():
    many = batches(3, 60)
    assert len({b.name for b in many}) == 60
    endings = {e.ending for b in many for e in b.builds.values()}
    assert endings == {"Completed", "Failed", "DependencyFailed"}
    assert {e for b in many for e in b.endings.values()} == {"Completed", "Failed"}
    for batch in many:
        jobs = batch.jobs
        for name, content in batch.files.items():
            [ref] = batch.endings
            assert ref == f"/graphs/{name}"
            jobs = read_submission(content, name).jobs
        assert {j.drv_path for j in check(jobs).jobs} == set(batch.builds)
        for cluster in batch.clusters:
            assert cluster.cluster_id == batch.name
            members = {member.job for member in cluster.members}
            assert len(members) == 2
            assert members < set(batch.builds)
    assert any(batch.clusters for batch in many)
    outputs = [e.output for b in many for e in b.builds.values()]
    assert len(outputs) == len(set(outputs))


def test_an_evaluation_fails_with_its_builds():
    for batch in batches(4, 60):
        if batch.endings:
            failing = any(e.ending != "Completed" for e in batch.builds.values())
            assert list(batch.endings.values()) == ["Failed" if failing else "Completed"]


@pytest.fixture
def build(tmp_path):
    """Runs the builder of a job with its store in a folder; returns code and output."""

    def run(job):
        def here(text: str) -> str:
            return text.replace("/nix/store", str(tmp_path))

        env = {name: here(value) for name, value in job.env.items()}
        env["out"] = here(job.outputs["out"])
        argv = [job.builder, *map(here, job.args)]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done, Path(here(job.outputs["out"]))

    return run


def test_builders_write_what_is_foretold(build):
    graph = _Graph(SYSTEM, "g")
    graph.add("a", 0)
    graph.add("b", 0, chatter=1_000)
    graph.add("c", 0, ["a", "b"])
    graph.add("bad", 0, ["c"], fails=True)
    graph.add("after", 0, ["bad"])
    batch = graph.batch()
    for job in batch.jobs[:3]:
        done, path = build(job)
        assert done.returncode == 0, done.stderr
        assert is_right(path.read_text(), batch.builds[job.drv_path])
    assert len(build(batch.jobs[1])[0].stdout) > 1_000
    assert build(batch.jobs[3])[0].returncode == 7
    assert [e.ending for e in batch.builds.values()][3:] == ["Failed", "DependencyFailed"]


def test_an_output_of_two_runs_or_half_a_run_or_other_inputs_is_wrong():
    graph = _Graph(SYSTEM, "g")
    graph.add("a", 0)
    [expected] = graph.batch().builds.values()
    digest = expected.digest
    assert is_right(f"begin 1\n{digest}\nend 1\n", expected)
    for text in (
        "", f"begin 1\n{digest}\nend 2\n", f"begin 1\n{digest}\n", f"begin 1\n{digest}\nend 1",
        f"begin 1\n{'0' * 64}\nend 1\n", f"begin 1\nbegin 2\n{digest}\nend 1\n",
        f"begin 1\n{digest}\nend 1\nend 2\n",
    ):  # fmt: skip
        assert not is_right(text, expected), text


def test_graph_files_are_json():
    for batch in batches(5, 30):
        for content in batch.files.values():
            assert json.loads(content)["jobs"]
