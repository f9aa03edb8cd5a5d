"""A farm of real processes does the main job: everything once, in order, with the right end."""

from __future__ import annotations

import json
import signal

import pytest

from tests.processes.conftest import build, until

pytestmark = pytest.mark.processes


def test_a_graph_is_built_in_order_by_two_workers(farm):
    farm.server()
    farm.worker("w1")
    farm.worker("w2")
    layers = [[f"l{i}-{n}" for n in range(6)] for i in range(4)]
    jobs = [
        build(name, "echo built > $out", *(layers[i - 1] if i else ()))
        for i, layer in enumerate(layers)
        for name in layer
    ]
    farm.submit(*jobs)
    assert farm.run("wait").returncode == 0
    assert {job["status"] for job in farm.jobs().values()} == {"Completed"}
    assert_once_and_in_order(farm, 24)


def test_a_failure_takes_what_needs_it_along_and_nothing_else(farm):
    farm.server()
    farm.worker("w1")
    farm.submit(
        build("bad", "echo this went wrong >&2; exit 3"),
        build("after", "echo > $out", "bad"),
        build("later", "echo > $out", "after"),
        build("other"),
    )
    assert farm.run("wait").returncode == 1
    status = {name: job["status"] for name, job in farm.jobs().items()}
    assert status == {
        "bad": "Failed", "after": "DependencyFailed", "later": "DependencyFailed",
        "other": "Completed",
    }  # fmt: skip
    assert "this went wrong" in farm.run("logs", "bad").stdout
    # Submitted again, it is queued again together with what failed for its sake.
    farm.submit(build("bad", "exit 3"))
    until(lambda: farm.jobs()["bad"]["attempts"] == 1, "bad failed again")
    assert len(farm.rows("select 1 from dispatched_job where outcome = 'Failed'")) == 2


def test_time_limits_end_a_build_and_its_children(farm):
    farm.server()
    farm.worker("w1")
    farm.submit(
        build("slow", "sleep 300 & sleep 300", timeout_secs=1),
        build("silent", "sleep 300 & sleep 300", max_silent_secs=1),
    )
    assert farm.run("wait", "--timeout", "30").returncode == 1
    assert {job["status"] for job in farm.jobs().values()} == {"TimedOut"}


def test_a_cancelled_build_is_stopped_and_its_slot_is_free(farm):
    farm.server()
    farm.worker("w1", slots=1)
    farm.submit(build("long", "sleep 300"), build("after", "echo > $out", "long"))
    until(lambda: farm.jobs()["long"]["status"] == "Building", "long runs")
    assert farm.run("cancel", "long").returncode == 0
    until(lambda: farm.jobs()["long"]["status"] == "Aborted", "long is aborted", 5)
    assert farm.jobs()["after"]["status"] == "DependencyFailed"
    farm.submit(build("next"))
    until(lambda: farm.jobs()["next"]["status"] == "Completed", "the slot is used again", 15)


def test_an_evaluation_reads_a_graph_file_and_follows_its_builds(farm, tmp_path):
    names = [f"e{n}" for n in range(120)]
    chain = [build(n, "echo > $out", *names[max(0, i - 1) : i]) for i, n in enumerate(names)]
    graph = {"jobs": chain}
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(graph))
    bad.write_text(json.dumps({"jobs": [build("broken", "exit 1"), build("fine")]}))
    farm.server()
    farm.worker("w1")
    source = {"kind": "graph-file", "ref": str(good)}
    answer = farm.submit(evaluations=[{"job_id": "good", "source": source}])
    assert answer["evaluations"] == ["good"]
    assert farm.run("wait", "good").returncode == 0
    jobs = farm.json("jobs")
    assert [j["status"] for j in jobs if j["kind"] == "eval"] == ["Completed"]
    assert sum(j["kind"] == "build" and j["status"] == "Completed" for j in jobs) == 120
    source = {"kind": "graph-file", "ref": str(bad)}
    farm.submit(evaluations=[{"job_id": "bad", "source": source}])
    assert farm.run("wait", "bad").returncode == 1
    status = {j["job_id"]: j["status"] for j in farm.json("jobs")}
    assert status["bad"] == "Failed"
    assert farm.jobs()["fine"]["status"] == "Completed"


def test_a_running_build_survives_the_end_of_its_server(farm):
    first = farm.server()
    farm.worker("w1")
    farm.submit(build("long", "sleep 4; echo > $out"))
    running = until(lambda: farm.json("status")["running"], "long runs")
    first.send_signal(signal.SIGTERM)
    assert first.wait(timeout=20) == 0
    farm.server()
    assert farm.run("wait").returncode == 0
    rows = farm.rows("select id, outcome from dispatched_job")
    assert rows == [(running[0]["assignment_id"], "Completed")]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_the_jobs_of_a_worker_that_ends_go_to_another(farm, signal_number):
    farm.server("--reconnect-grace", "1")
    leaving = farm.worker("leaving")
    farm.submit(build("long", "sleep 2; echo > $out"))
    until(lambda: farm.json("status")["running"], "long runs")
    farm.worker("staying")
    leaving.send_signal(signal_number)
    leaving.wait(timeout=10)
    assert farm.run("wait").returncode == 0
    job = farm.jobs()["long"]
    assert (job["status"], job["worker"]) == ("Completed", "staying")


def test_everything_is_built_once_while_servers_and_workers_are_killed(farm):
    options = ("--reconnect-grace", "1", "--heartbeat-timeout", "5", "--tick", "0.5")
    server = farm.server(*options)
    workers = {name: farm.worker(name) for name in ("w1", "w2")}
    names = [f"k{n}" for n in range(150)]
    farm.submit(
        *(build(n, "sleep 0.05; echo > $out", *names[max(0, i - 7) : i : 3])
          for i, n in enumerate(names))
    )  # fmt: skip
    for name in ("w1", "w2", "w1"):
        before = farm.json("status")["jobs"]["completed"]
        until(lambda b=before: farm.json("status")["jobs"]["completed"] > b, "progress", 60)
        server.kill()
        server = farm.server(*options)
        workers[name].kill()
        workers[name] = farm.worker(name)
    assert farm.run("wait").returncode == 0
    assert_once_and_in_order(farm, 150)


def test_what_builds_took_is_remembered_by_the_next_server(farm):
    server = farm.server()
    farm.worker("w1", slots=1)
    farm.submit(build("first", "sleep 0.3; echo > $out", pname="thing"))
    assert farm.run("wait", "--timeout", "60").returncode == 0
    farm.submit(build("long", "exec sleep 300", pname="other", prioritized=True))
    until(lambda: farm.jobs()["long"]["status"] == "Building", "the slot is taken")
    [second] = farm.submit(build("second", pname="thing"))["jobs"].values()

    def estimate() -> float | None:
        """Of the build that waits, once its worker is here and has scored it."""
        told = farm.json("explain", second)
        for worker in told["workers"]:
            if worker["rules"] and not worker["vetoes"]:
                return worker["rules"]["estimated-time"]
        return None

    before = until(estimate, "the worker has scored it")
    assert before <= 3600 - 0.3
    server.kill()
    server.wait()
    farm.server()
    assert until(estimate, "the worker is back") == pytest.approx(before, abs=1e-6)


def test_two_servers_share_a_ledger_and_never_assign_a_job_twice(farm):
    farm.server("--tick", "0.2", listen="tcp://127.0.0.1:0")
    farm.worker("w1")
    farm.submit(*(build(f"first{n}") for n in range(40)))
    farm.server("--tick", "0.2", listen="tcp://127.0.0.1:0")
    farm.worker("w2")
    farm.submit(*(build(f"second{n}", "echo > $out", f"first{n}") for n in range(40)))
    assert farm.run("wait").returncode == 0
    assert_once_and_in_order(farm, 80)


def test_with_curve_only_the_keys_that_are_listed_get_in(farm):
    own = str(farm.folder / "own")
    assert farm.run("keygen", own).returncode == 0
    state = farm.folder / "state"
    state.mkdir()
    (state / "authorized_keys").write_text((farm.folder / "own.pub").read_text())
    farm.server("--curve")
    keys = ("--server-key", str(state / "server.pub"), "--key", own)
    farm.worker("w1", *keys)
    until(lambda: '"w1"' in farm.run("status", "--json", *keys).stdout, "the worker is there")
    refused = ("--connect-timeout", "2")
    assert farm.run("status", "--once", *refused).returncode == 3
    stranger = farm.run("status", "--once", "--server-key", str(state / "server.pub"), *refused)
    assert stranger.returncode in (3, 4)
    assert len(stranger.stderr.splitlines()) == 1


def test_a_bad_list_of_keys_is_said_in_one_line(farm):
    state = farm.folder / "state"
    state.mkdir()
    (state / "authorized_keys").write_text("anna\n")
    refused = farm.run(
        "server", "--listen", "tcp://127.0.0.1:0", "--state-dir", str(state), "--curve"
    )
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert line.startswith("headrace: ")
    assert "authorized_keys, line 1: 'anna' is not a Z85 public key" in line


def test_an_address_in_use_is_said_in_one_line(farm):
    farm.server()
    second = farm.run("server", "--listen", farm.endpoint, "--state-dir", str(farm.folder / "b"))
    assert second.returncode == 2
    [line] = second.stderr.splitlines()
    assert farm.endpoint in line
    assert "in use" in line


def test_an_unknown_input_refuses_the_file_and_says_what_to_do(farm):
    farm.server()
    jobs = json.dumps({"jobs": [build("lonely", "echo > $out", "nobody"), build("fine")]})
    refused = farm.run("submit", "-", stdin=jobs)
    assert refused.returncode == 2
    [line] = refused.stderr.splitlines()
    assert "nobody.drv" in line
    assert "--assume-inputs-built" in line
    assert farm.json("jobs") == []
    assert farm.run("submit", "-", "--assume-inputs-built", stdin=jobs).returncode == 0
    assert {j["status"] for j in farm.jobs().values()} == {"Queued"}


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "layout", "count"),
    [("firefox-20.09", "2.18", 1_138), ("release-small-20.09-4systems", "4", 7_120)],
)
def test_real_graphs_are_drained(farm, expand, unpack, tmp_path, name, layout, count):
    graph = json.loads(unpack(f"{name}.json.gz"))
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(expand.layout(graph, layout, "/nix/store")))
    farm.server()
    farm.worker("w1")
    farm.worker("w2")
    answer = farm.json("submit", str(file))
    assert len(answer["jobs"]) == count == len(graph["drvs"])
    edges = sum(len({i if isinstance(i, int) else i[0] for i in d.get("i", ())})
                for d in graph["drvs"])  # fmt: skip
    assert farm.rows("select count(*) from dependency") == [(edges,)]
    assert farm.run("wait", seconds=300).returncode == 0
    assert_once_and_in_order(farm, count)


def assert_once_and_in_order(farm, count: int) -> None:
    """Every job completed, once, and after all of its inputs."""
    completed = "select count(*), count(distinct job) from dispatched_job where outcome='Completed'"
    assert farm.rows(completed) == [(count, count)]
    assert farm.rows("select status, count(*) from job group by status") == [("Completed", count)]
    assert farm.rows("select count(*) from dispatched_job where closed_at is null") == [(0,)]
    ran = dict(farm.rows(
        "select j.seq, r.claimed_at from job j join dispatched_job r on r.job = j.id"
        " where r.outcome = 'Completed'"
    ))  # fmt: skip
    built = dict(farm.rows(
        "select d.seq, r.closed_at from dispatched_job r join job j on j.id = r.job"
        " join drv d on d.path = j.drv_path where r.outcome = 'Completed'"
    ))  # fmt: skip
    edges = farm.rows("select job, needs from dependency")
    assert not [(job, needs) for job, needs in edges if ran[job] < built[needs]]
