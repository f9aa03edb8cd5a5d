"""The watchdog of the event loop."""

from __future__ import annotations

import subprocess
import sys
import threading

import trio

from actors.server.watchdog import Stall, beat_regularly, watched

STALLED = """
import time, trio
from actors.server import watchdog

async def main():
    with watchdog.watched(every=0.05, looks=3) as beat:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watchdog.beat_regularly, beat, 0.05)
            await trio.sleep(0.5)
            print("alive", flush=True)
            time.sleep(60)

trio.run(main)
"""


def test_looks_without_a_beat_between_them_are_counted() -> None:
    stall = Stall(limit=3)
    assert [stall.look(), stall.look()] == [False, False]
    stall.beat()
    assert [stall.look() for _ in range(5)] == [False, False, False, True, True]
    stall.beat()
    assert not stall.look()


async def test_a_loop_that_runs_is_left_alone_and_the_thread_ends_with_it() -> None:
    ends: list[None] = []
    with watched(lambda: ends.append(None), every=0.05, looks=20) as beat:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(beat_regularly, beat, 0.05)
            await trio.sleep(0.6)
            nursery.cancel_scope.cancel()
    assert ends == []
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_a_loop_that_stands_still_ends_the_process_and_shows_where() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.stdout == "alive\n"
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: the event loop stood still for some")
    assert "in main" in done.stderr
