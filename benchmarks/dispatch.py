"""Request to assignment, and whole jobs a second, beside a bare ZeroMQ echo in the same run.

    python benchmarks/dispatch.py [--pending 1000,10000,100000] [--seconds 5] [--json FILE]

Method. The server is a real `headrace server` process on a ledger on disk; every `AssignJob` has
its row committed first. Workers are bare DEALER sockets that do no work, in processes of their
own, so that what is measured is the server and the wire:

- latency: one worker with all candidates scored sends a `RequestJob` and waits for the
  `AssignJob`; accepting and completing stands between the samples and is not timed.
- throughput: W workers with S slots each, in 4 processes; every slot goes request, assign, accept,
  complete, request, the last three in one message, for some seconds.
- echo: the same client against a task that sends back what its ROUTER receives (echo.py). Ratios
  to it are what can be compared between machines.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import REQUEST, Client

SAMPLES = 2_000
WARM_UP = 200
WORKERS = 4
MOST_JOBS_PER_SEC = 8_000
"""So many more are submitted for each second of a run, for enough to be left at its end."""


def echo_us(folder: Path, samples: int, *, blocking: bool = False) -> list[float]:
    """Microseconds of round trips of a `RequestJob`'s bytes."""
    with harness.echoing(folder, blocking=blocking) as echo:
        client = Client(echo.endpoint)
        measured = []
        for _ in range(WARM_UP + samples):
            start = time.perf_counter()
            client.socket.send(REQUEST)
            client.socket.recv()
            measured.append((time.perf_counter() - start) * 1e6)
        client.close()
    return measured[WARM_UP:]


def fsync_us(folder: Path, samples: int) -> list[float]:
    """Microseconds of appending a page to a file and having it on the disk."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def append() -> None:
            file.write(bytes(4096))
            os.fsync(file.fileno())

        return [harness.timed(append) * 1e6 for _ in range(samples)]


def request_us(endpoint: str, samples: int) -> list[float]:
    """Microseconds from `RequestJob` to `AssignJob`."""
    client = Client(endpoint)
    client.open_session("latency", 1)
    measured = []
    warm_up = min(WARM_UP, samples // 5)
    for _ in range(warm_up + samples):
        start = time.perf_counter()
        client.socket.send(REQUEST)
        assigned = client.until("AssignJob")
        measured.append((time.perf_counter() - start) * 1e6)
        client.socket.send_multipart(harness.finished(assigned))
        client.frame("Recorded")
    client.send({"type": "Goodbye"})
    client.close()
    return measured[warm_up:]


def request_beside(folder: Path, pending: int, samples: int, others: int = 0) -> list[float]:
    """The same on a server with so many jobs pending, and other workers that are idle."""
    with harness.serving(folder) as server:
        harness.submit(server.endpoint, harness.submission(harness.jobs(pending + 2 * samples)))
        if not others:
            return request_us(server.endpoint, samples)
        with harness.fleet(server.endpoint, others, 1):
            return request_us(server.endpoint, samples)


def jobs_per_second(folder: Path, pending: int, workers: int, slots: int, seconds: float) -> float:
    """Assignments a second, each completed, with at least `pending` jobs pending throughout."""
    with harness.serving(folder) as server:
        count = pending + int(seconds * MOST_JOBS_PER_SEC)
        harness.submit(server.endpoint, harness.submission(harness.jobs(count)))
        with harness.fleet(server.endpoint, workers, slots, seconds) as run:
            return run()


def submit_to_assign_us(folder: Path, samples: int) -> tuple[list[float], list[float]]:
    """Microseconds from a `CmdSubmit` of one job to its `JobOffer` and to its `AssignJob` at the
    one worker, which has no other job and answers the offer with its score and a `RequestJob` in
    one message, as the real one does. The submission is durable before it is offered."""
    with harness.serving(folder) as server:
        command, worker = Client(server.endpoint), Client(server.endpoint)
        command.hello()
        worker.open_session("idle", 1)
        offered, assigned = [], []
        for n in range(WARM_UP // 4 + samples):
            (frame,) = harness.submission(harness.jobs(1, label=f"single-{n}"), request=n)
            start = time.perf_counter()
            command.socket.send(frame)
            candidates = worker.until("JobOffer")["candidates"]
            offered.append((time.perf_counter() - start) * 1e6)
            worker.socket.send_multipart([harness.scores_for(candidates), REQUEST])
            assignment = worker.until("AssignJob")
            assigned.append((time.perf_counter() - start) * 1e6)
            worker.socket.send_multipart(harness.finished(assignment))
            worker.frame("Recorded")
            command.frame("CmdSubmitted")
        worker.close()
        command.close()
    return offered[-samples:], assigned[-samples:]


def measure(folder: Path, pending: int, seconds: float) -> dict[str, Any]:
    """All figures with about `pending` jobs pending; a fresh server for each kind."""
    samples = min(SAMPLES, pending // 2)
    result: dict[str, Any] = {"pending": pending}
    result["request"] = harness.quantiles(request_beside(folder, pending, samples))
    for slots in (1, 8):
        rate = jobs_per_second(folder, pending, WORKERS, slots, seconds)
        result[f"jobs_per_sec_{WORKERS}x{slots}"] = round(rate)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pending", default="1000,10000,100000", help="numbers of pending jobs")
    parser.add_argument("--seconds", type=float, default=5, help="length of a throughput run")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        echo = harness.quantiles(echo_us(folder, SAMPLES))
        print(f"bare Trio echo: p50 {echo['p50_us']:.0f} us, p99 {echo['p99_us']:.0f} us\n")
        print("pending  request p50      p99   p50/echo  p99/echo  4x1 jobs/s  4x8 jobs/s")
        rows = []
        for pending in map(int, args.pending.split(",")):
            row = measure(folder, pending, args.seconds)
            rows.append(row)
            request = row["request"]
            print(
                f"{pending:>7}  {request['p50_us']:>8.0f} us"
                f"  {request['p99_us']:>6.0f} us  {request['p50_us'] / echo['p50_us']:>8.2f}"
                f"  {request['p99_us'] / echo['p50_us']:>8.2f}"
                f"  {row[f'jobs_per_sec_{WORKERS}x1']:>10}  {row[f'jobs_per_sec_{WORKERS}x8']:>10}",
                flush=True,
            )
    if args.json:
        figures = {"cores": os.cpu_count(), "echo": echo, "rows": rows}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
