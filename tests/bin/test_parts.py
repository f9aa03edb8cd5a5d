from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bin import parts
from bin.errors import CommandError
from bin.parts import PART_BYTES, cut
from transport.codec import encode
from transport.messages import EvalSource, SubmittedEvaluation, SubmittedJob


def job(i: int, size: int = 0) -> SubmittedJob:
    return SubmittedJob(
        drv_path=f"/nix/store/{i}.drv", name=str(i), system="x86_64-linux", required_features=[],
        outputs={"out": f"/nix/store/{i}"}, input_drvs=[], input_srcs=[],
        args=["x" * (2**20 - 1)] * (size >> 20) + ["y" * (size & 2**20 - 1)],
    )  # fmt: skip


EVALUATION = SubmittedEvaluation(EvalSource("flake", "."))


def test_a_small_submission_is_one_part():
    (part,) = cut([job(1), job(2)], [EVALUATION], assume_inputs_built=True, interactive=True)
    assert part.is_final
    assert [j.name for j in part.jobs] == ["1", "2"]
    assert part.evaluations == [EVALUATION]
    assert part.assume_inputs_built
    assert part.interactive


def test_nothing_is_a_part_too():
    assert [p.is_final for p in cut([], [])] == [True]


def test_a_single_large_job_goes_alone():
    assert [len(p.jobs) for p in cut([job(1), job(2, 5 << 20), job(3)], [])] == [1, 1, 1]


@given(st.lists(st.integers(0, 3 << 20), max_size=8))
def test_parts_keep_the_order_and_fit(sizes):
    jobs = [job(i, size) for i, size in enumerate(sizes)]
    made = cut(jobs, [EVALUATION])
    assert [j for p in made for j in p.jobs] == jobs
    assert [e for p in made for e in p.evaluations] == [EVALUATION]
    assert [p.is_final for p in made] == [False] * (len(made) - 1) + [True]
    assert all(len(encode(p)) <= PART_BYTES for p in made)


def test_many_short_texts_fit_too():
    # The texts whose heads CBOR writes longer than the encoding that sizes are taken in.
    jobs = [
        SubmittedJob(
            drv_path="/" + "d" * 27, name="n" * 28, system="s" * 28,
            required_features=["f" * 24] * 200, outputs={"o" * 24: "p" * 24}, input_drvs=[],
            input_srcs=[],
        )
        for _ in range(2_000)
    ]  # fmt: skip
    made = cut(jobs, [])
    assert len(made) > 1
    assert all(len(encode(p)) <= PART_BYTES for p in made)


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr(parts, "MAX_PARTS", 2)
    assert len(cut([job(i, 3 << 20) for i in range(2)], [])) == 2
    with pytest.raises(CommandError, match="submit it in several files"):
        cut([job(i, 3 << 20) for i in range(3)], [])
