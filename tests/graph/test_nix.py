from __future__ import annotations

import json

import pytest

from actors.graph.files import BadGraph, read_submission
from actors.graph.order import check

A = "0000000000000000000000000000000a-app-1.0.drv"
B = "0000000000000000000000000000000b-lib-2.0.drv"
OUT = "0000000000000000000000000000000c-app-1.0"
STORE = "/nix/store/"


def show(drv: dict, key: str = STORE + A) -> str:
    return json.dumps({key: drv})


def derivation(**changes: object) -> dict:
    fields = {
        "outputs": {"out": {"path": STORE + OUT}},
        "inputSrcs": [],
        "inputDrvs": {},
        "system": "x86_64-linux",
        "builder": "/bin/sh",
        "args": ["-c", "true"],
        "env": {"name": "app-1.0", "out": STORE + OUT},
    }
    return fields | changes


def job(**changes: object):
    return read_submission(show(derivation(**changes)), "f").jobs[0]


def refusal(data: str) -> str:
    with pytest.raises(BadGraph) as error:
        read_submission(data, "f")
    return str(error.value)


def test_the_oldest_layout():
    read = job(inputDrvs={STORE + B: ["out", "dev"]}, inputSrcs=[STORE + "s"])
    assert read.drv_path == STORE + A
    assert read.name == "app-1.0"
    assert read.outputs == {"out": STORE + OUT}
    assert read.input_drvs == [STORE + B]
    assert read.input_srcs == [STORE + "s"]
    assert (read.builder, read.args) == ("/bin/sh", ["-c", "true"])
    assert read.env == {"name": "app-1.0", "out": STORE + OUT}
    assert (read.is_fixed_output, read.prefer_local_build, read.pname) == (None, None, None)


def test_base_names_become_paths():
    drv = derivation(
        version=3,
        name="app-1.0",
        outputs={"out": {"path": OUT}},
        inputSrcs=["s"],
        inputDrvs={B: {"outputs": ["out"], "dynamicOutputs": {}}},
    )
    (read,) = read_submission(show(drv, A), "f").jobs
    assert (read.drv_path, read.outputs["out"]) == (STORE + A, STORE + OUT)
    assert (read.input_drvs, read.input_srcs) == ([STORE + B], [STORE + "s"])


@pytest.mark.parametrize("wanted", [["out"], {"outputs": ["out"], "dynamicOutputs": {}}])
def test_the_newest_layout(wanted):
    drv = derivation(
        version=4,
        name="app-1.0",
        outputs={"out": {"path": OUT}},
        inputs={"srcs": ["s"], "drvs": {B: wanted}},
    )
    del drv["inputSrcs"], drv["inputDrvs"]
    top = {"version": 4, "derivations": {A: drv}}
    (read,) = read_submission(json.dumps(top), "f").jobs
    assert (read.drv_path, read.input_drvs, read.input_srcs) == (
        STORE + A,
        [STORE + B],
        [STORE + "s"],
    )


def test_features_from_the_environment():
    read = job(env={"requiredSystemFeatures": "kvm big-parallel  kvm", "preferLocalBuild": "1",
                    "pname": "app"})  # fmt: skip
    assert read.required_features == ["kvm", "big-parallel"]
    assert read.prefer_local_build is True
    assert read.pname == "app"


ATTRS = {"requiredSystemFeatures": ["kvm"], "preferLocalBuild": True, "pname": "app"}


@pytest.mark.parametrize(
    "changes", [{"structuredAttrs": ATTRS}, {"env": {"__json": json.dumps(ATTRS)}}]
)
def test_structured_attributes(changes):
    read = job(**changes)
    assert read.required_features == ["kvm"]
    assert read.prefer_local_build is True
    assert read.pname == "app"
    assert json.loads(read.env["__json"]) == ATTRS


def test_fixed_outputs():
    assert job(outputs={"out": {"path": OUT, "hashAlgo": "sha256", "hash": "00"}}).is_fixed_output


def test_the_path_of_a_fixed_output_follows_from_its_hash():
    # fetchurl of hello-2.10.tar.gz, as every nixpkgs of its time has it.
    drv = derivation(
        name="hello-2.10.tar.gz",
        outputs={"out": {
            "method": "flat", "hash": "sha256-MeBmE3qWJnbon2nRtlOC3pWn732RS4y5VvQepy4PUWs=",
        }},
    )  # fmt: skip
    (read,) = read_submission(show(drv), "f").jobs
    assert read.outputs == {"out": STORE + "3x7dwzq014bblazs7kq20p9hyzz0qh8g-hello-2.10.tar.gz"}
    assert read.is_fixed_output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outputs": {"out": {"method": "nar", "hashAlgo": "sha256"}}},
         "field `outputs.out.path` is missing: the output path of a floating content-addressed"),
        ({"outputs": {"out": {}}}, "field `outputs.out.path` is missing"),
        ({"outputs": {}}, "field `outputs` is empty"),
        ({"outputs": {"out": {"hash": "sha256-xyz", "method": "nar"}}},
         "`outputs.out.hash`: 'xyz' is not"),
        ({"outputs": {"out": {"hash": "00" * 32, "hashAlgo": "x:sha256"}}}, "unknown method 'x'"),
        ({"system": None}, "field `system`: expected `str`, got `null`"),
        ({"inputDrvs": {STORE + B: {"outputs": [], "dynamicOutputs": {"out": {}}}}},
         "derivations that are made by builds cannot be scheduled"),
        ({"env": {"__json": "{"}}, "field `env.__json` is not valid JSON"),
        ({"env": {"__json": "[]"}}, "field `env.__json` holds a list, not an object"),
        ({"structuredAttrs": {"requiredSystemFeatures": [1]}}, "`requiredSystemFeatures` is a lis"),
        ({"version": 5}, "field `version` is 5, newer than the layouts read here"),
        ({"env": {"x": "y" * (2**20 + 1)}}, "field `env[...]`"),
    ],
)  # fmt: skip
def test_what_cannot_be_taken_is_named_with_its_derivation(changes, message):
    said = refusal(show(derivation(**changes)))
    assert message in said
    assert said.startswith(f"f: {STORE}{A}: ")
    assert "\n" not in said


def test_a_newer_layout_is_not_guessed_at():
    assert "field `version` is 5" in refusal('{"version": 5, "derivations": {"a.drv": {}}}')


def test_an_empty_graph():
    assert "nothing to submit" in refusal('{"version": 4, "derivations": {}}')


def test_a_required_field():
    drv = derivation()
    del drv["outputs"]
    assert "missing required field `outputs`" in refusal(show(drv))


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["hello", "python3", "firefox", "nixos-system", "desktop5"])
def test_all_layouts_of_a_real_graph_agree(name, expand, unpack):
    graph = json.loads(unpack(f"{name}-20.09.json.gz"))
    reads = [
        read_submission(json.dumps(expand.layout(graph, kind, "/nix/store")), kind)
        for kind in ("2.8", "2.18", "3", "4")
    ]
    assert all(read == reads[0] for read in reads[1:])
    checked = check(reads[0].jobs)
    assert not checked.unknown_inputs
    assert {j.drv_path for j in checked.jobs} == {STORE + d["p"] for d in graph["drvs"]}
    edges = sum(len(j.input_drvs) for j in checked.jobs)
    assert edges == sum(len(d.get("i", ())) for d in graph["drvs"])
    features = {STORE + d["p"]: d["f"] for d in graph["drvs"] if d.get("f")}
    assert {j.drv_path: j.required_features for j in checked.jobs if j.required_features} == (
        features
    )


@pytest.mark.shared_data
@pytest.mark.parametrize("name", ["hello-2.10", "hello-2.10-darwin"])
def test_what_nix_printed(name, unpack):
    raw = unpack(f"{name}.derivation-show.json.gz")
    printed = json.loads(raw)
    submission = read_submission(raw, name)
    checked = check(submission.jobs)
    assert not checked.unknown_inputs
    assert checked.jobs[-1].pname == "hello"
    for job in submission.jobs:
        drv = printed[job.drv_path]
        assert (job.name, job.env, job.args) == (drv["env"]["name"], drv["env"], drv["args"])
        assert job.outputs == {name: o["path"] for name, o in drv["outputs"].items()}


@pytest.mark.shared_data
def test_fixed_outputs_are_where_nix_puts_them(unpack):
    printed = json.loads(unpack("hello-2.10-darwin.derivation-show.json.gz"))
    fixed = {p: d for p, d in printed.items() if "hash" in d["outputs"].get("out", {})}
    paths = {p: d["outputs"]["out"].pop("path") for p, d in fixed.items()}
    assert len(fixed) == 160
    jobs = read_submission(json.dumps(fixed), "fixed").jobs
    assert {job.drv_path: job.outputs["out"] for job in jobs} == paths
