from __future__ import annotations

import json

import pytest

from transport import messages as m

ROW = {
    "id": "k1", "status": "Queued", "members": 2, "attempt": None, "attempts": 1,
    "retry_budget": 0, "same_zone": True, "prioritized": False,
    "created_at": "2026-01-01T00:00:00.000+00:00", "ended_at": None,
}  # fmt: skip
MEMBER = {
    "role": "db\x1b", "index": 0, "primary": True, "pin": None, "job_id": "j1", "name": "a",
    "status": "Queued", "worker": None,
}  # fmt: skip
SEAT = {
    "job_id": "j1", "role": "db", "index": 0, "worker": "w1", "assignment_id": "a1",
    "closed_at": "2026-01-01T00:00:30.000+00:00", "outcome": "Declined", "error": "no room",
}  # fmt: skip
ATTEMPT = {
    "attempt": "r1", "created_at": "2026-01-01T00:00:00.000+00:00", "started_at": None,
    "finished_at": "2026-01-01T00:00:30.000+00:00", "outcome": "PrepareFailed", "seats": [SEAT],
}  # fmt: skip
SHOWN = ROW | {
    "reason": {"code": "cluster", "text": "2 needed, 1 idle in zone a"},
    "members": [MEMBER], "history": [ATTEMPT],
}  # fmt: skip


def test_list_in_pages(headrace, server):
    server.on(
        m.CmdClusters,
        m.CmdClustersReply(request=0, clusters=[ROW], next="k1"),
        m.CmdClustersReply(request=0, clusters=[ROW | {"id": "k2"}]),
    )
    code, out, _ = headrace("cluster", "list", "--status", "queued", "--json")
    assert code == 0
    assert [row["id"] for row in json.loads(out)] == ["k1", "k2"]
    assert [(r.after, r.status) for r in server.requests] == [(None, "Queued"), ("k1", "Queued")]


def test_list_for_people(headrace, server):
    server.on(m.CmdClusters, m.CmdClustersReply(request=0, clusters=[ROW]))
    header, row = headrace("cluster", "list")[1].splitlines()
    assert header.split() == ["id", "status", "members", "attempts", "retry_budget", "attempt",
                              "created_at", "ended_at"]  # fmt: skip
    assert row.split() == ["k1", "Queued", "2", "1", "0", "-", ROW["created_at"], "-"]


def test_show(headrace, server):
    server.on(m.CmdCluster, m.CmdClusterReply(request=0, cluster=SHOWN))
    code, out, _ = headrace("cluster", "show", "k")
    assert (code, server.requests[0].cluster) == (0, "k")
    assert out.splitlines() == [
        "cluster k1 is Queued, in one zone: 1 attempts, 0 retries left",
        "cluster: 2 needed, 1 idle in zone a",
        "",
        "role  index  primary  pin  job_id  name  status  worker",
        "db?   0      True     -    j1      a     Queued  -",
        "",
        "attempt r1: PrepareFailed, made 2026-01-01T00:00:00.000+00:00, started -, finished "
        + ATTEMPT["finished_at"],
        "role  index  worker  assignment_id  outcome   error",
        "db    0      w1      a1             Declined  no room",
    ]
    assert json.loads(headrace("cluster", "show", "k", "--json")[1]) == SHOWN


def test_cancel(headrace, server):
    reply = m.CmdCancelReply(request=0, aborted=["j1"], requested=["j2"], unchanged=["k2"])
    server.on(m.CmdClusterCancel, reply)
    code, out, _ = headrace("cluster", "cancel", "k1", "k2")
    assert (code, server.requests[0].clusters) == (0, ["k1", "k2"])
    assert out.splitlines() == [
        "j1 aborted",
        "j2 abort requested",
        "k2 unchanged: it has ended, or another submission wants it",
    ]
    assert json.loads(headrace("cluster", "cancel", "k1", "--json")[1])["requested"] == ["j2"]


def test_a_cluster_that_is_not_there(headrace, server):
    server.on(m.CmdCluster, m.CmdError(request=0, code=2, message="no cluster 'x'"))
    assert headrace("cluster", "show", "x") == (2, "", "headrace: no cluster 'x'\n")


def test_the_group_has_help(headrace):
    code, out, _ = headrace("cluster", "--help")
    assert code == 0
    for name in ("list", "show", "cancel"):
        assert name in out


@pytest.mark.parametrize("as_json", [False, True])
def test_submit_of_clusters(headrace, server, tmp_path, as_json):
    job = {
        "drv_path": "/nix/store/a.drv", "name": "a", "system": "builtin", "required_features": [],
        "outputs": {"out": "/nix/store/a"}, "input_drvs": [], "input_srcs": [],
    }  # fmt: skip
    file = tmp_path / "f.json"
    file.write_text(json.dumps({"clusters": [{"members": [{"role": "r", "job": job}]}]}))
    answer = m.CmdSubmitted(
        request=0, is_final=True, submission="s1", jobs={"/nix/store/a.drv": "j1"}, clusters=["k1"]
    )
    server.on(m.CmdSubmit, answer)
    code, out, _ = headrace("submit", str(file), *(["--json"] if as_json else []))
    assert code == 0
    [sent] = server.requests
    assert [j.name for j in sent.jobs] == ["a"]
    assert sent.clusters[0].members[0].job == "/nix/store/a.drv"
    if as_json:
        assert json.loads(out)["clusters"] == ["k1"]
    else:
        assert out.splitlines() == ["submitted 1 build and 1 cluster as s1", "cluster k1"]
