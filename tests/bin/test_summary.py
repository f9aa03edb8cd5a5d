from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bin import summary
from bin.summary import change_key, clean, duration, lines, open_jobs, progress, progress_line

AMBER = (
    "worker amber (active): build 1/2, eval 1, x86_64-linux i686-linux, "
    "features kvm big-parallel, zone hall-1"
)


def test_the_block(status):
    assert lines(status) == [
        "headrace 0.1.0, up 1h 02m",
        "jobs: 3 pending, 2 running, 7 waiting, 12 completed, 1 failed, 2 dependency failed",
        AMBER,
        "worker w-2 (draining): build 1/4, eval 0, aarch64-linux, drained: new disk",
        "running hello-2.12.1 on amber, build, 3m 05s, build 40%",
        "running nixpkgs on w-2, eval, 2s, 120 derivations",
        "cluster c-1: Waiting, 2 members",
        "server: 3 stale reports, pager restarted 2x",
    ]


def test_a_server_that_says_nothing():
    assert lines({}) == [
        "headrace ?, up ?",
        "jobs: 0 pending, 0 running, 0 waiting, 0 completed",
        "no workers",
    ]


def test_one_line_of_progress(status):
    assert progress_line(status) == "12/27 built; running hello-2.12.1, nixpkgs"
    status["running"] *= 3
    assert progress_line(status).endswith("hello-2.12.1, nixpkgs and 2 more")
    assert progress_line({"jobs": {"completed": 4}}) == "4/4 built"


def test_open_jobs(status):
    assert open_jobs(status) == 12
    assert open_jobs({"jobs": {"completed": 3, "failed": 1}}) == 0


def test_only_real_changes_count(status):
    later = copy.deepcopy(status)
    later["server"]["uptime_secs"] += 5
    later["workers"][0] |= {"last_seen_secs": 9, "metrics": None}
    later["running"][0] |= {"since_secs": 99, "progress": None}
    assert change_key(later) == change_key(status)
    later["workers"][0]["state"] = "draining"
    assert change_key(later) != change_key(status)


@pytest.mark.parametrize(
    ("change", "value"),
    [("jobs", {"pending": 9}), ("running", []), ("workers", []), ("clusters", []), ("server", {})],
)
def test_every_part_is_watched(status, change, value):
    assert change_key(status | {change: value}) != change_key(status)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0, "0s"), (59.9, "59s"), (60, "1m 00s"), (3599, "59m 59s"), (3720, "1h 02m"),
     (86400 * 2 + 3 * 3600, "2d 03h")],
)  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({}, ""),
        ({"progress": {"phase": "upload"}}, "upload"),
        ({"progress": {"phase": "upload", "bytes_done": 1, "bytes_total": 0}}, "upload"),
        ({"progress": {"phase": "upload", "bytes_done": 1, "bytes_total": 3}}, "upload 33%"),
        ({"progress": {"type": "EvalProgress", "derivations": 7}}, "7 derivations"),
        ({"progress": "half"}, "half"),
        ({"state": "aborting", "progress": {"phase": "build"}}, "aborting"),
    ],
)
def test_progress(job, text):
    assert progress(job) == text


@given(st.text())
def test_nothing_steers_the_terminal(text):
    assert clean(text).isprintable()
    assert len(clean(text)) == len(text)


def test_names_of_others_are_cleaned(status):
    evil = "\x1b[2J\nworker"
    status["workers"][0] |= {"name": evil, "zone": evil, "architectures": [evil]}
    status["running"][0] |= {"name": evil, "worker": evil, "progress": {"phase": evil}}
    status["clusters"][0]["id"] = evil
    status["server"]["version"] = evil
    block = [*lines(status), summary.progress_line(status)]
    assert all(line.isprintable() for line in block)
