from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from bin.view import render


def shown(status, width: int, height: int = 20, **console) -> list[str]:
    out = io.StringIO()
    settings = {"color_system": None, "force_terminal": False} | console
    Console(file=out, width=width, height=height, **settings).print(render(status, width, height))
    return [line.rstrip() for line in out.getvalue().splitlines()]


SNAPSHOTS = {
    40: """\
headrace 0.1.0, up 1h 02m
3 pending  2 running  7 waiting
12 completed  1 failed
2 dependency failed
3 stale reports, pager restarted 2x
clusters: 1 Waiting
worker                   state     build
amber                    active    1/2
w-2                      draining  1/4
running              worker       for
hello-2.12.1         amber        3m 05s
nixpkgs              w-2          2s""",
    80: """\
headrace 0.1.0, up 1h 02m
3 pending  2 running  7 waiting  12 completed  1 failed  2 dependency failed
3 stale reports, pager restarted 2x
clusters: 1 Waiting
worker                                      state     build  eval  cpu  ram free
amber                                       active    1/2    1     61%  5.5 GiB
w-2                                         draining  1/4    0
running                            worker                for     progress
hello-2.12.1                       amber                 3m 05s  build 40%
nixpkgs                            w-2                   2s      120 derivations""",
    120: """\
headrace 0.1.0, up 1h 02m
3 pending  2 running  7 waiting  12 completed  1 failed  2 dependency failed
3 stale reports, pager restarted 2x
clusters: 1 Waiting
worker                                     state     build  eval  cpu  ram free  systems\
                  zone    seen
amber                                      active    1/2    1     61%  5.5 GiB   x86_64-linux\
 i686-linux  hall-1  1s
w-2                                        draining  1/4    0                    aarch64-linux\
                    1m 15s
running                                              worker                            for\
     progress         job
hello-2.12.1                                         amber                             3m 05s\
  build 40%        j-000001
nixpkgs                                              w-2                               2s\
      120 derivations  j-000002""",
}


@pytest.mark.parametrize("width", SNAPSHOTS)
def test_the_view(status, width):
    assert shown(status, width) == SNAPSHOTS[width].splitlines()


def test_colour_changes_nothing_but_colour(status):
    coloured = shown(status, 80, color_system="standard", force_terminal=True)
    assert "\x1b[" in "\n".join(coloured)
    plain = Console(file=io.StringIO(), width=80, force_terminal=True, no_color=True)
    plain.print(render(status, 80, 20))
    assert "\x1b[3" not in plain.file.getvalue()


def test_nobody_there():
    assert shown({}, 60) == [
        "headrace ?, up ?",
        "0 pending  0 running  0 waiting  0 completed",
        "no workers: start one with `headrace worker`",
    ]


def test_what_does_not_fit_is_counted(status):
    status["workers"] *= 30
    status["running"] *= 30
    view = shown(status, 80, 12)
    assert len(view) == 12
    assert view.count("... and 58 more") == 2
    assert view[-1] == "... and 58 more"


def test_running_jobs_get_the_room_that_workers_leave(status):
    status["running"] *= 30
    view = shown(status, 80, 24)
    assert len(view) == 24
    assert view[-1] == "... and 45 more"


names = st.text(max_size=60)


@given(
    width=st.integers(1, 150),
    height=st.integers(1, 60),
    workers=st.lists(names, max_size=40),
    running=st.lists(names, max_size=40),
)
def test_the_view_always_fits(width, height, workers, running):
    status = {
        "workers": [{"id": n, "state": "active", "architectures": [n]} for n in workers],
        "running": [{"job_id": n, "worker": n, "name": n} for n in running],
        "clusters": [{"id": n, "status": n} for n in running],
        "jobs": dict.fromkeys(("pending", "running", "failed", "aborted"), 123_456),
    }
    view = shown(status, max(width, 20), max(height, 8))
    assert all(cell_len(line) <= max(width, 20) for line in view)
    # A narrow terminal wraps the counts; what matters is that nothing else grows.
    assert len(view) <= max(height, 8) + (4 if width < 40 else 0)
