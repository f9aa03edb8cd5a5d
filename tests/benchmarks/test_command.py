"""`python -m benchmarks`, as far as it measures nothing: runs shown and compared, and wrong use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def figure(key: str, value: float | None, unit: str = "us", **more: Any) -> dict[str, Any]:
    return {"key": key, "what": f"what {key} is", "value": value, "unit": unit, **more}


def saved(path: Path, *figures: dict[str, Any], pending: int = 10_000) -> str:
    run = {
        "machine": {"cores": 2}, "sizes": {"pending": pending}, "is_quick": False,
        "figures": figures,
    }  # fmt: skip
    path.write_text(json.dumps(run))
    return str(path)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def lines(*arguments: str, code: int = 0) -> list[list[str]]:
    """The cells of a Markdown table's lines, without its head."""
    done = bench(*arguments, "--markdown")
    assert done.returncode == code, done.stderr
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()[2:]
        if line.startswith("|")
    ]


RATIO = {"goal": {"limit": 3, "of_ratio": True}, "against": "echo p50"}
AT_LEAST = {"goal": {"limit": 5000, "at_least": True}}


def test_a_goal_is_of_the_value_or_of_the_ratio_to_the_baseline(tmp_path):
    run = saved(
        tmp_path / "run.json",
        figure("a", 450.0, baseline=100.0, **RATIO),
        figure("b", 4_800.0, "jobs/s", **AT_LEAST),
        figure("c", 17.0),
        figure("d", None, missing="not installed: dask", **RATIO),
    )
    assert lines("--from", run) == [
        ["what a is", "450 us", "echo p50 100 us", "4.50 x", "<= 3 x", "NO"],
        ["what b is", "4 800 jobs/s", "", "", ">= 5 000 jobs/s", "NO"],
        ["what c is", "17 us", "", "", "", ""],
        ["what d is", "not installed: dask", "", "", "<= 3 x", ""],
    ]


def test_what_is_worse_by_a_tenth_than_an_earlier_run_is_marked(tmp_path):
    old = saved(
        tmp_path / "old.json",
        figure("a", 300.0, baseline=100.0, **RATIO),
        figure("b", 5_000.0, "jobs/s", **AT_LEAST),
        figure("c", 10.0),
        figure("gone", 1.0),
    )
    new = saved(
        tmp_path / "new.json",
        figure("a", 400.0, baseline=120.0, **RATIO),
        figure("b", 6_000.0, "jobs/s", **AT_LEAST),
        figure("c", 10.5),
        figure("added", 1.0),
    )
    compared = [line[6:] for line in lines("--from", new, "--compare", old, code=1)]
    assert compared == [
        ["3.00 x", "3.33 x", "+11 % WORSE"],
        ["5 000 jobs/s", "6 000 jobs/s", "+20 %"],
        ["10 us", "10.5 us", "+5 %"],
        ["", "", ""],
    ]
    compared = [line[6:] for line in lines("--from", old, "--compare", new, code=1)]
    assert [line[-1] for line in compared] == ["-10 %", "-17 % WORSE", "-5 %", ""]


def test_runs_of_other_sizes_are_not_comparable(tmp_path):
    old = saved(tmp_path / "old.json", figure("a", 1.0), pending=1_000)
    new = saved(tmp_path / "new.json", figure("a", 1.0))
    assert "cannot be compared" in bench("--from", new, "--compare", old).stdout


def test_wrong_use_is_told_in_a_line(tmp_path):
    unknown = bench("--only", "echo,nothing")
    assert unknown.returncode == 2
    assert "no row 'nothing'; there are echo, request," in unknown.stderr
    missing = bench("--from", str(tmp_path / "none.json"))
    assert missing.returncode == 2
    assert "none.json" in missing.stderr.splitlines()[-1]


def test_every_row_states_its_method():
    told = bench("--help").stdout
    for row in ("echo", "request-many", "cycle-workers", "single", "list", "peers"):
        assert f"\n{row}:\n    " in told
