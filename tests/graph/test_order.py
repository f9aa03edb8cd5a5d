from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.graph.order import BadGraph, check, shown
from transport.messages import SubmittedJob


def drv(name: object) -> str:
    return f"/nix/store/{name}.drv"


def job(name: object, *inputs: object, **changes: object) -> SubmittedJob:
    fields = {
        "drv_path": drv(name),
        "name": str(name),
        "system": "x86_64-linux",
        "required_features": [],
        "outputs": {"out": f"/nix/store/{name}"},
        "input_drvs": [drv(i) for i in inputs],
        "input_srcs": [],
    }
    return SubmittedJob(**fields | changes)


def names(checked) -> list[str]:
    return [j.name for j in checked.jobs]


def test_inputs_come_first():
    checked = check([job("app", "lib", "tool"), job("tool", "lib"), job("lib")])
    assert names(checked) == ["lib", "tool", "app"]
    assert checked.unknown_inputs == frozenset()


def test_an_order_that_holds_is_kept():
    given_order = [job("a"), job("b", "a"), job("c"), job("d", "c", "a"), job("e")]
    assert names(check(given_order)) == ["a", "b", "c", "d", "e"]


def test_inputs_that_are_not_there_are_named():
    checked = check([job("app", "lib", "other"), job("lib", "other", "base")])
    assert checked.unknown_inputs == {drv("other"), drv("base")}


def test_nothing_is_a_graph_too():
    assert check([]).jobs == ()


def test_an_input_named_twice_is_one_edge():
    assert names(check([job("app", "lib", "lib"), job("lib")])) == ["lib", "app"]


def test_a_cycle_is_named_in_full():
    with pytest.raises(BadGraph) as error:
        check([job("z", "a"), job("a", "b"), job("b", "c"), job("c", "a")])
    loop = " -> ".join(map(drv, ["a", "b", "c", "a"]))
    assert f"cycle: {loop};" in str(error.value)


def test_a_long_cycle_is_found_and_shortened():
    n = 5_000
    with pytest.raises(BadGraph) as error:
        check([job(i, (i + 1) % n) for i in range(n)])
    assert "(4992 more)" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_long_chain_is_no_recursion():
    n = 50_000
    assert names(check([job(i, i + 1) for i in range(n)] + [job(n)]))[0] == str(n)


def test_a_derivation_that_needs_itself():
    with pytest.raises(BadGraph, match=r"a\.drv: field `input_drvs` names the derivation itself"):
        check([job("a", "a")])


def test_the_same_derivation_twice():
    with pytest.raises(BadGraph, match=r"jobs\[2\]: derivation .*a\.drv was already given as jo"):
        check([job("a"), job("b"), job("a")])


def test_the_same_job_id_twice():
    with pytest.raises(BadGraph, match=r"jobs\[1\] .*`job_id` j1 is also the id of .*a\.drv"):
        check([job("a", job_id="j1"), job("b", job_id="j1")])


def test_a_relative_derivation_path():
    with pytest.raises(BadGraph, match=r"jobs\[0\] \(a\.drv\): field `drv_path` must be an abs"):
        check([job("a", drv_path="a.drv")])


def test_an_output_of_two_derivations():
    taken = {"out": "/nix/store/o", "dev": "/nix/store/a"}
    with pytest.raises(BadGraph, match=r"b\.drv: field `outputs\.dev`: /nix/store/a is also an"):
        check([job("a"), job("b", outputs=taken)])


def test_twins_that_differ_only_in_how_sources_are_fetched():
    same = {"out": "/nix/store/o", "dev": "/nix/store/o-dev"}
    assert len(check([job("a", outputs=same), job("b", outputs=dict(same))]).jobs) == 2


@given(st.integers(0, 40).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.sets(st.tuples(st.integers(0, n), st.integers(0, n)).filter(lambda e: e[0] > e[1])),
        st.permutations(range(n + 1)),
    )
))  # fmt: skip
def test_any_acyclic_graph_is_ordered(graph):
    _, edges, order = graph
    jobs = [job(i, *(b for a, b in sorted(edges) if a == i)) for i in order]
    checked = check(jobs)
    position = {j.drv_path: i for i, j in enumerate(checked.jobs)}
    assert sorted(position) == sorted(j.drv_path for j in jobs)
    assert all(position[drv(b)] < position[drv(a)] for a, b in edges)
    assert check(checked.jobs).jobs == checked.jobs


@given(st.integers(1, 20), st.data())
def test_a_graph_with_a_cycle_never_passes(n, data):
    loop = data.draw(st.permutations(range(n)).map(lambda p: p[: data.draw(st.integers(1, n))]))
    needs = {a: {loop[(i + 1) % len(loop)]} for i, a in enumerate(loop)}
    with pytest.raises(BadGraph):
        check([job(i, *needs.get(i, ())) for i in range(n)])


def test_text_of_others_stays_on_one_line():
    assert shown("a\nb\x1b[2J") == r"a\nb\x1b[2J"
    assert shown("x" * 500) == "x" * 200 + "..."
