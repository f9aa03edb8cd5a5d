from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.graph.files import BadGraph, read_submission

JOB = {
    "drv_path": "/nix/store/a.drv",
    "name": "a",
    "system": "x86_64-linux",
    "required_features": [],
    "outputs": {"out": "/nix/store/a"},
    "input_drvs": [],
    "input_srcs": [],
}
EVALUATION = {"source": {"kind": "nix-file", "ref": "./default.nix"}, "attributes": ["hello"]}


def read(value: object):
    return read_submission(json.dumps(value), "f.json")


def refusal(data: object) -> str:
    text = data if isinstance(data, str | bytes) else json.dumps(data)
    with pytest.raises(BadGraph) as error:
        read_submission(text, "f.json")
    message = str(error.value)
    assert message.startswith("f.json: ")
    assert "\n" not in message
    return message.removeprefix("f.json: ")


def test_the_own_format():
    extra = {"job_id": "j1", "project": "p", "prioritized": True,
             "required_paths": [{"path": "/nix/store/s", "nar_size": 7}]}  # fmt: skip
    submission = read({"jobs": [JOB | extra], "evaluations": [EVALUATION], "clusters": []})
    (job,) = submission.jobs
    assert (job.job_id, job.project, job.prioritized) == ("j1", "p", True)
    assert job.required_paths[0].nar_size == 7
    (evaluation,) = submission.evaluations
    assert (evaluation.source.ref, evaluation.attributes) == ("./default.nix", ["hello"])
    assert submission.clusters == []


def test_optional_fields_may_be_null():
    assert read({"jobs": [JOB | {"pname": None}], "evaluations": None}).jobs[0].pname is None


def test_text_bytes_and_byte_order_mark_are_the_same():
    text = json.dumps({"jobs": [JOB]})
    expected = read_submission(text, "f")
    assert read_submission(text.encode(), "f") == expected
    assert read_submission(b"\xef\xbb\xbf" + text.encode(), "f") == expected
    assert read_submission("\ufeff" + text, "f") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"jobs": [JOB, JOB | {"name": 3}]}, "jobs[1] (/nix/store/a.drv): field `name`: expected"),
        ({"jobs": [{"name": "a"}]}, "jobs[0]: object missing required field `drv_path`"),
        ({"jobs": ["a"]}, "jobs[0]: expected `object`, got `str`"),
        ({"jobs": {}}, "field `jobs` is an object, not a list"),
        ({"jobs": [JOB | {"outputs": {}}]}, "jobs[0] (/nix/store/a.drv): field `outputs` is emp"),
        ({"jobs": [JOB | {"required_paths": [{}]}]}, "field `required_paths[0]`: object missing"),
        ({"jobs": [JOB | {"job_id": "a\nb"}]}, "field `job_id`"),
        ({"jobs": [JOB], "job": []}, "unknown top-level field `job`; there are jobs, evaluations"),
        ({"jobs": []}, "nothing to submit"),
        ({"clusters": [{"members": 3}]}, "clusters[0]: field `members`: expected `array`"),
        ({"evaluations": [EVALUATION | {"source": {"kind": "x", "ref": ""}}]},
         "evaluations[0]: field `source.kind`"),
        ({"jobs": [JOB | {"job_id": "x"}], "evaluations": [EVALUATION | {"job_id": "x"}]},
         "evaluations[0]: field `job_id` x is also that of jobs[0]"),
        ({}, "the object is empty"),
        ([], "the top level is a list, not an object"),
        (7, "the top level is a number"),
        ({"hello": {}}, "`hello` is not a derivation (<hash>-<name>.drv) and not one of jobs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(value, message):
    assert message in refusal(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (" \n", "the file is empty"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"\xc3(", "not UTF-8 text (byte 0)"),
        (b"\x1f\x8b\x08", "compressed"),
        ('{"jobs": [', "not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"drvPath": "/a"}\n{"drvPath": "/b"}\n', "one JSON value a line"),
    ],
)
def test_what_is_no_json_is_said_so(data, message):
    assert message in refusal(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["outputs", "out", "path", "env", "inputs", "drvs", "hash", "system"])
        | st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip
KEYS = ["jobs", "evaluations", "clusters", "derivations", "version", "/nix/store/a.drv", "b.drv"]


@given(st.dictionaries(st.sampled_from(KEYS), json_values, max_size=3))
def test_any_json_is_read_or_refused_in_one_line(value):
    try:
        read(value)
    except BadGraph as error:
        assert "\n" not in str(error)  # noqa: PT017 - being read is fine too


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data):
    with pytest.raises(BadGraph):
        read_submission(data, "f")
