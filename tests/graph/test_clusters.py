from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.graph.clusters import MAX_MEMBERS, by_reference, resolve
from actors.graph.files import BadGraph, read_submission
from actors.graph.knots import find_knot


def job(name: str, *needs: str, **more) -> dict:
    return {
        "drv_path": f"/nix/store/{name}.drv", "name": name, "system": "x86_64-linux",
        "required_features": [], "outputs": {"out": f"/nix/store/{name}"},
        "input_drvs": [f"/nix/store/{n}.drv" for n in needs], "input_srcs": [], **more,
    }  # fmt: skip


EVALUATION = {"source": {"kind": "nix-file", "ref": "./default.nix"}}


def read(**top):
    submission = read_submission(json.dumps(top), "f.json")
    return resolve(submission.jobs, submission.evaluations, submission.clusters)


def refusal(**top) -> str:
    with pytest.raises(BadGraph) as error:
        read(**top)
    assert "\n" not in str(error.value)
    return str(error.value)


def one(*members: dict, jobs: tuple[dict, ...] = (), **more) -> dict:
    """A file with one cluster."""
    return {"jobs": list(jobs), "clusters": [{"members": list(members), **more}]}


def test_members_name_their_jobs_whole_or_by_reference():
    resolved = read(
        jobs=[job("a", job_id="ja"), job("b")],
        evaluations=[EVALUATION | {"job_id": "e1"}],
        clusters=[{
            "cluster_id": "k", "same_zone": True, "retry_budget": 2,
            "members": [
                {"role": "x", "job": "ja", "primary": True},
                {"role": "x", "job": "/nix/store/b.drv"},
                {"role": "y", "job": job("c"), "pin": "w1"},
                {"role": "y", "evaluation": "e1"}, {"role": "z", "evaluation": EVALUATION},
            ],
        }],
    )  # fmt: skip
    assert [j.name for j in resolved.jobs] == ["a", "b", "c"]
    [(cluster, places)] = resolved.clusters
    assert (cluster.cluster_id, cluster.same_zone, cluster.retry_budget) == ("k", True, 2)
    assert [(p.role, p.index, p.primary, p.pin, p.drv_path, p.evaluation) for p in places] == [
        ("x", 0, True, None, "/nix/store/a.drv", None),
        ("x", 1, False, None, "/nix/store/b.drv", None),
        ("y", 0, False, "w1", "/nix/store/c.drv", None),
        ("y", 1, False, None, None, 0),
        ("z", 0, False, None, None, 1),
    ]
    [sent] = by_reference(resolved)
    assert [m.job for m in sent.members][:3] == [f"/nix/store/{n}.drv" for n in "abc"]
    assert resolve(resolved.jobs, resolved.evaluations[:1], [sent]).clusters[0][1] == places


def test_indexes_as_given_and_the_others_in_the_gaps():
    resolved = read(**one(
        {"role": "r", "job": job("a")}, {"role": "r", "job": job("b"), "index": 0},
        {"role": "r", "job": job("c")}, {"role": "s", "job": job("d")},
    ))  # fmt: skip
    [(_, places)] = resolved.clusters
    assert [(p.role, p.index) for p in places] == [("r", 1), ("r", 0), ("r", 2), ("s", 0)]


A, B = {"role": "r", "job": job("a")}, {"role": "r", "job": job("b")}


@pytest.mark.parametrize(
    ("top", "message"),
    [
        (one(), "clusters[0]: field `members` is empty"),
        ({"clusters": [{}]}, "clusters[0]: object missing required field `members`"),
        ({"clusters": [{"members": {}}]}, "clusters[0]: field `members`: expected `array`"),
        ({"clusters": [3]}, "clusters[0]: expected `object`"),
        (one(A, 3), "clusters[0].members[1]: expected `object`"),
        (one(A, {"job": job("b")}), "clusters[0].members[1]: object missing required field `role`"),
        (one(A, B | {"role": ""}), "clusters[0].members[1]: field `role`"),
        (one(A, {"role": "r"}), "clusters[0].members[1]: give either field `job` or field"),
        (one(A | {"evaluation": EVALUATION}), "clusters[0].members[0]: give either field `job`"),
        (one(A, B | {"job": "b"}), "clusters[0].members[1]: field `job`: no job of the file"),
        (one(A, {"role": "r", "evaluation": "e"}),
         "clusters[0].members[1]: field `evaluation`: no evaluation of the file"),
        (one(A, B | {"job": {"name": "b"}}),
         "clusters[0].members[1]: field `job`: object missing required field `drv_path`"),
        (one(A, B | {"job": job("b", outputs={})}), "clusters[0].members[1]: field `job.outputs`"),
        (one(A | {"primary": True}, B | {"primary": True}),
         "clusters[0].members[1]: field `primary`: members[0] is it already"),
        (one(A | {"pin": "w"}, B | {"pin": "w"}),
         "clusters[0].members[1]: field `pin`: members[0] sits on worker w already"),
        (one(A | {"pin": ""}), "clusters[0].members[0]: field `pin`"),
        (one(A | {"pin": 7}), "clusters[0].members[0]: field `pin`"),
        (one(A | {"index": 0}, B | {"index": 0}),
         "clusters[0].members[1]: field `index`: role r has 0 already"),
        (one(A, B | {"index": 2}), "clusters[0].members[1]: field `index`: 2, but the 2 of role r"),
        (one(A, A), "clusters[0].members[1].job: derivation /nix/store/a.drv was already given"),
        (one(A | {"job": "/nix/store/x.drv"}, B | {"job": "/nix/store/x.drv"}, jobs=(job("x"),)),
         "clusters[0].members[1]: its job is also that of clusters[0].members[0]"),
        (one(A, B, retry_budget=-1), "clusters[0]: field `retry_budget`"),
        (one(A, B, same_zone="yes"), "clusters[0]: field `same_zone`"),
        (one(A, B | {"job": job("b", "a")}),
         "clusters[0]: members wait for each other: /nix/store/b.drv needs /nix/store/a.drv; "),
        (one(A, B | {"job": job("b", "x")}, jobs=(job("x", "a"),)),
         "/nix/store/b.drv needs /nix/store/x.drv, /nix/store/x.drv needs /nix/store/a.drv; "),
        (one(*({"role": "r", "job": job(f"n{i}")} for i in range(MAX_MEMBERS + 1))),
         "clusters[0]: field `members` has more than 256 entries"),
        ({"clusters": [{"members": [A], "cluster_id": "k"}, {"members": [B], "cluster_id": "k"}]},
         "clusters[1]: field `cluster_id` k is given twice"),
        ({"jobs": [job("x", job_id="i")], "clusters": [{"members": [
            {"role": "r", "job": job("y", job_id="i")}]}]},
         "clusters[0].members[0].job: field `job_id` i is also that of jobs[0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(top, message):
    assert message in refusal(**top)


def test_clusters_that_wait_for_each_other_are_refused():
    clusters = [
        {"members": [{"role": "r", "job": job("a")}, {"role": "r", "job": job("b", "d")}]},
        {"members": [{"role": "r", "job": job("c", "a")}, {"role": "r", "job": job("d")}]},
    ]
    assert "members wait for each other" in refusal(clusters=clusters)
    clusters[1]["members"][0]["job"] = job("c")
    assert len(read(clusters=clusters).clusters) == 2


names = st.integers(0, 9)


@given(st.sets(st.tuples(names, names)), st.dictionaries(names, st.sampled_from("xyz")))
def test_a_knot_is_a_cycle_of_the_graph_of_groups(edges, groups):
    needs: dict[int, list[int]] = {}
    for low, high in edges:
        if low != high:  # towards smaller numbers, so that there is no cycle without groups
            needs.setdefault(max(low, high), []).append(min(low, high))
    knot = find_knot(needs, groups)

    def key(n: int) -> object:
        return groups.get(n, n)

    reach = {(key(a), key(b)) for a, bs in needs.items() for b in bs}
    while True:
        more = reach | {(a, d) for a, b in reach for c, d in reach if b == c}
        if more == reach:
            break
        reach = more
    assert (knot is not None) == any((g, g) in reach for g in groups.values())
    if knot is not None:
        assert key(knot[0][0]) == key(knot[-1][1])
        assert all(needed in needs[job] for job, needed in knot)
        assert all(key(a[1]) == key(b[0]) for a, b in itertools.pairwise(knot))
