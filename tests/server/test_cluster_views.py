"""What people see of clusters: reasons, the status, `headrace cluster`."""

from __future__ import annotations

import pytest

from tests.server.cluster_harness import Clusters, member
from tests.server.farm_harness import job
from transport import messages as m


@pytest.fixture
def farm(tmp_path):
    farm = Clusters(tmp_path)
    yield farm
    farm.ledger.close()


def ask(farm, request, kind):
    answers = farm.send("c", m.CmdHello(versions=(1, 1)), request)
    [answer] = [a for a in answers if isinstance(a, kind)]
    return answer


def explain(farm, name: str) -> dict:
    request = m.CmdExplain(request=1, job=farm.ids[name])
    return ask(farm, request, m.CmdExplainReply).explanation


def why(farm, name: str) -> str:
    reason = explain(farm, name)["reason"]
    assert reason["code"] == "cluster"
    return reason["text"]


def show(farm, target: str) -> dict:
    return ask(farm, m.CmdCluster(request=1, cluster=target), m.CmdClusterReply).cluster


def test_more_members_than_seats_that_exist(farm):  # FIELD 52
    farm.join("u", "v", "w", "x")
    farm.submit_cluster("a", "b", "c", "d", "e")
    farm.idle("u", "v", "w", "x")
    assert why(farm, "a") == "5 needed, 4 exist"
    assert farm.open_rows() == 0


def test_fewer_idle_than_needed_in_the_best_zone(farm):
    farm.join("t", "u", "v", zone="a")
    farm.join("w", "x", zone="b")
    farm.submit_cluster("a", "b", "c", same_zone=True)
    farm.submit(job("long"))
    assert farm.request("v") is not None
    farm.idle("t", "u", "w")
    reason = explain(farm, "a")["reason"]
    assert reason["text"] == "3 needed, 2 idle in zone a"
    assert (reason["needed"], reason["idle"], reason["exist"], reason["zone"]) == (3, 2, 3, "a")


def test_no_zone_has_enough(farm):
    farm.join("u", zone="a")
    farm.join("v")
    farm.submit_cluster("a", "b", same_zone=True)
    assert why(farm, "a") == "2 needed, 1 exist among workers without a zone"


def test_who_has_not_reported_is_waited_for(farm):
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    for peer in ("v", "w"):
        farm.send(peer, m.RequestJob(kind="build"))
    assert why(farm, "b") == "2 needed, 2 idle; waits for v, w to report what it lacks"


def test_members_whose_inputs_are_not_built(farm):
    farm.submit(job("input"), clusters=[farm.cluster("a", member("b", "main", needs=("input",)))])
    text = "waits for 1 of 2 members whose inputs are not built: main[0]"
    assert why(farm, "a") == text
    assert explain(farm, "b")["reason"]["code"] == "inputs"


def test_held_seats_with_whom_and_for_how_long(farm):  # FIELD 52
    farm.join("v", "w")
    cluster_id = farm.submit_cluster("a", "b")
    farm.idle("v", "w")
    farm.accept("v")
    farm.wait(3)
    text = "seats are held on v, w for 3 s; waits for w to accept, 27 s left"
    assert why(farm, farm.seat("v").job.name) == text
    status = farm.farm.status(farm.now)
    running = {job["worker"]: job for job in status["running"]}
    assert (running["v"]["state"], running["w"]["state"]) == ("held", "unanswered")
    assert running["v"]["cluster"]["id"] == cluster_id
    assert running["v"]["cluster"]["hold_secs_left"] == 27.0
    assert {worker["id"]: worker["held"] for worker in status["workers"]} == {"v": 1, "w": 1}
    [shown] = status["clusters"]
    assert (shown["id"], shown["status"], shown["phase"]) == (cluster_id, "Queued", "preparing")
    assert {mb["worker"] for mb in shown["members"]} == {"v", "w"}
    farm.wait(28)
    status = farm.farm.status(farm.now)
    assert {worker["id"]: worker["held"] for worker in status["workers"]} == {"v": 0, "w": 0}
    assert why(farm, "a") == (
        "placed again in 29 s at the earliest; the last attempt: no answer in time from w"
    )


def test_one_that_reported_waits_for_the_others(farm):
    farm.join("v", "w")
    farm.submit_cluster(member("a", "x"), member("b", "y"))
    farm.run("v", "w")
    first, second = ("v", "w") if farm.seat("v").job.name == "a" else ("w", "v")
    farm.complete(first, farm.seat(first))
    assert why(farm, "a") == "reported; the verdict waits for y[0]"
    assert explain(farm, "b")["reason"] == {"code": "running", "text": f"on worker {second}"}


def test_survivors_that_have_not_stopped(farm):
    farm.join("v", "w")
    farm.submit_cluster(member("a", "x"), member("b", "y"), retry_budget=1)
    farm.run("v", "w")
    first = "v" if farm.seat("v").job.name == "a" else "w"
    farm.fail(first, farm.seat(first), "Transient")
    assert why(farm, "a") == "waits for 1 of 2 members to stop: y[0]"


def test_kept_seats_are_shown_on_both_sides(farm):
    farm.join("v", "w")
    farm.submit_cluster("a", "b")
    farm.submit(job("long"))
    given = farm.request("v")
    farm.idle("w")
    for _ in range(61):
        farm.wait(10, step=5)
        farm.idle("w")
        farm.send("v", m.WorkerMetrics())
    reason = explain(farm, "a")["reason"]
    assert reason["text"].startswith("2 needed, 1 idle; seats are kept on v, w for 179")
    assert reason["text"].endswith("s more, v still busy")
    assert {seat["worker"] for seat in reason["reservation"]["seats"]} == {"v", "w"}
    farm.submit(job("more"))
    told = explain(farm, "more")
    [of_w] = [w for w in told["workers"] if w["worker"] == "w"]
    assert (of_w["code"], of_w["why_not"]) == ("cluster", "its seat is kept for a cluster")
    farm.complete("v", given)


def test_a_cluster_with_its_attempts_and_seats(farm):
    farm.join("v", "w")
    cluster_id = farm.submit_cluster(
        member("a", "x", primary=True), member("b", "y"), retry_budget=1, cluster_id="mine"
    )
    farm.idle("v", "w")
    farm.accept("v")
    farm.answer("w", farm.seat("w"), accepted=False)
    farm.wait(31)
    farm.forget_told()
    farm.run("v", "w")
    shown = show(farm, "mi")
    assert (shown["id"], shown["status"], shown["attempts"]) == (cluster_id, "Running", 2)
    assert shown["reason"] is None
    assert [(mb["role"], mb["name"], mb["primary"], mb["status"]) for mb in shown["members"]] == [
        ("x", "a", True, "Building"), ("y", "b", False, "Building"),
    ]  # fmt: skip
    failed, running = shown["history"]
    assert failed["outcome"] == "PrepareFailed"
    assert sorted(seat["outcome"] for seat in failed["seats"]) == ["Aborted", "Declined"]
    assert failed["started_at"] is None
    assert running["started_at"] is not None
    assert {seat["worker"] for seat in running["seats"]} == {"v", "w"}


def test_the_list_in_pages_and_by_status(farm):
    for name in ("a", "b", "c"):
        farm.submit_cluster(name, cluster_id=f"k{name}")
    page = ask(farm, m.CmdClusters(request=1, limit=2), m.CmdClustersReply)
    assert ([row["id"] for row in page.clusters], page.next) == (["ka", "kb"], "kb")
    rest = ask(farm, m.CmdClusters(request=1, limit=2, after=page.next), m.CmdClustersReply)
    assert ([row["id"] for row in rest.clusters], rest.next) == (["kc"], None)
    cancelled = ask(farm, m.CmdClusterCancel(request=1, clusters=["kb"]), m.CmdCancelReply)
    assert cancelled.aborted == [farm.ids["b"]]
    aborted = ask(farm, m.CmdClusters(request=1, status="Aborted"), m.CmdClustersReply)
    assert [(row["id"], row["status"]) for row in aborted.clusters] == [("kb", "Aborted")]
    again = ask(farm, m.CmdClusterCancel(request=1, clusters=["kb"]), m.CmdCancelReply)
    assert (again.aborted, again.unchanged) == ([], ["kb"])
    statuses = {c["id"]: c["status"] for c in farm.farm.status(farm.now)["clusters"]}
    assert statuses == {"ka": "Queued", "kb": "Aborted", "kc": "Queued"}


@pytest.mark.parametrize(
    ("target", "said"),
    [("x", "no cluster 'x': `headrace cluster list` lists them"), ("k", "fits several clusters")],
)
def test_clusters_that_are_not_there(farm, target, said):
    for name in ("a", "b"):
        farm.submit_cluster(name, cluster_id=f"k{name}")
    assert said in ask(farm, m.CmdCluster(request=1, cluster=target), m.CmdError).message
    request = m.CmdClusterCancel(request=1, clusters=[target])
    assert said in ask(farm, request, m.CmdError).message


def test_a_cluster_is_cancelled_by_its_id_like_a_job(farm):
    farm.submit_cluster("a", "b", cluster_id="k")
    reply = ask(farm, m.CmdCancel(request=1, targets=["k"]), m.CmdCancelReply)
    assert sorted(reply.aborted) == sorted([farm.ids["a"], farm.ids["b"]])
    assert farm.cluster_status("k") == "Aborted"


def test_jobs_name_their_cluster(farm):
    farm.submit(job("single"), clusters=[farm.cluster("a", cluster_id="k")])
    rows = ask(farm, m.CmdJobs(request=1), m.CmdJobsReply).jobs
    assert {row["name"]: row["cluster"] for row in rows} == {"single": None, "a": "k"}


def test_a_stopped_companion_is_no_failure_to_who_waits(farm):
    farm.join("v", "w")
    farm.submit_cluster(member("main", primary=True), member("side", "side"))
    farm.run("v", "w")
    main, side = ("v", "w") if farm.seat("v").job.name == "main" else ("w", "v")
    farm.complete(main, farm.seat(main))
    farm.fail(side, farm.seat(side), "Aborted")
    ids = [farm.ids["main"], farm.ids["side"]]
    for asked in (ids, []):
        reply = ask(farm, m.CmdWait(request=1, jobs=asked), m.CmdWaitReply)
        assert (reply.open, reply.failed) == (0, 0)
    farm.submit_cluster("main", "side")  # again, and cancelled this time
    ask(farm, m.CmdCancel(request=1, targets=ids), m.CmdCancelReply)
    for asked in (ids, []):
        reply = ask(farm, m.CmdWait(request=1, jobs=asked), m.CmdWaitReply)
        assert (reply.open, reply.failed) == (0, 2)
