"""The watchdog ends what stands still, and nothing that was only stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import trio

from actors.server.watchdog import Watchdog

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, time, trio
from actors.server.watchdog import Watchdog

def stand_still():
    time.sleep(60)

async def main():
    trio.lowlevel.spawn_system_task(watchdog.beat)
    await trio.sleep(0.2)
    print("up", flush=True)
    if sys.argv[1] == "stall":
        stand_still()
    await trio.to_thread.run_sync(sys.stdin.readline)
    await trio.sleep(0.5)

with Watchdog(tick_secs=0.1, stall_ticks=10) as watchdog:
    trio.run(main)
"""


def start(what: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, what], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_loop_that_stands_still_ends_with_one_line_and_the_stacks():
    process = start("stall")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    first, *rest = err.splitlines()
    assert first == "headrace: the loop has stood still for 1 s; here is where:"
    assert any("in stand_still" in line for line in rest)


def test_a_process_that_was_stopped_for_longer_goes_on():
    process = start("run")
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)  # it is the length that matters here: more than twice what a loop may stall
    os.kill(process.pid, signal.SIGCONT)
    out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


def test_it_is_heard_even_if_nobody_reads_stderr():
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    code = (
        "from actors.server import watchdog; watchdog._LAST_WORDS_SECS = 0.5;"
        "watchdog.end_process('nobody reads this')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=write)
    os.close(write)
    assert process.wait(30) == 1
    os.close(read)


async def stall(watchdog: Watchdog) -> None:
    trio.lowlevel.spawn_system_task(watchdog.beat)
    await trio.sleep(0.1)
    time.sleep(0.6)  # noqa: ASYNC251 - this is the stall


def test_it_judges_only_while_the_loop_beats_and_stops_with_its_owner():
    said: list[str] = []
    with Watchdog(said.append, tick_secs=0.02, stall_ticks=10) as watchdog:
        time.sleep(0.6)
        trio.run(trio.sleep, 0.1)
        assert said == []
        trio.run(stall, watchdog)
    assert said == ["the loop has stood still for 0.2 s; here is where:"]
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]


def test_what_does_not_end_when_told_to_is_ended():
    said: list[str] = []

    async def main():
        trio.lowlevel.spawn_system_task(watchdog.beat)
        watchdog.expect_end()
        with trio.fail_after(20):
            while not said:
                await trio.sleep(0.02)

    with Watchdog(said.append, tick_secs=0.02, end_ticks=5) as watchdog:
        trio.run(main)
    assert said == ["not everything ended within 0.1 s; here is what runs:"]
