"""A large graph is submitted, and what others wait for meanwhile.

Method. A real server process on an empty ledger. A client sends `CmdSubmit`s of 1 000 jobs each,
encoded beforehand, with 10 edges and 10 sources a job; the time is from the first frame to the
final `CmdSubmitted`, which comes when the whole is durable. Meanwhile two other connections take
turns, 2 ms apart: one waits for the `Pong` to a worker's `Ping`, which shows for how long the loop
is held up, the other for the reply to a `CmdStatus`. Used by `python -m benchmarks`.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import NamedTuple

import harness
from harness import Client

EDGES = 10
PAUSE_SECS = 0.002


class Submitted(NamedTuple):
    """Seconds of the submission, and milliseconds of others' answers meanwhile."""

    secs: float
    pings_ms: list[float]
    statuses_ms: list[float]


def submit_graph(folder: Path, count: int) -> Submitted:
    """`count` jobs with 10 edges each."""
    frames = harness.submission(harness.jobs(count, edges=EDGES))
    with harness.serving(folder) as server:
        worker, command = Client(server.endpoint), Client(server.endpoint)
        worker.announce("bystander", 1)
        command.hello()
        turns = itertools.count()

        def ask() -> None:
            turn = next(turns)
            if turn % 2:
                command.send({"type": "CmdStatus", "request": turn})
                command.frame("CmdStatusReply")
            else:
                worker.round_trip()

        (start, end), spans = harness.meanwhile(
            lambda: harness.submit(server.endpoint, frames), ask, lambda: time.sleep(PAUSE_SECS)
        )
        worker.close()
        command.close()
    answers: tuple[list[float], list[float]] = ([], [])
    for turn, (asked, answered) in enumerate(spans):
        if answered > start and asked < end:
            answers[turn % 2].append((answered - asked) * 1000)
    return Submitted(end - start, *answers)
