"""Request to assignment, and whole jobs a second, beside a bare ZeroMQ echo in the same run.

    python benchmarks/dispatch.py [--pending 1000,10000,100000] [--seconds 5] [--json FILE]

Method. The server is a real `headrace server` process on a ledger on disk; every `AssignJob` has
its row committed first. Workers are bare DEALER sockets that do no work, in processes of their
own, so that what is measured is the server and the wire:

- latency: one worker with all candidates scored sends a `RequestJob` and waits for the
  `AssignJob`; accepting and completing stands between the samples and is not timed.
- throughput: 4 workers with S slots each; every slot goes request, assign, accept, complete,
  request, the last three in one message, for some seconds.
- echo: the same client against a Trio task that sends back what its ROUTER receives, through
  the same adapter. Ratios to it are what can be compared between machines.
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing as mp
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cbor2
import trio
import zmq

from transport.adapter import Context
from transport.zmq_sockets import ZmqRouter

SAMPLES = 2_000
WARM_UP = 200
WORKERS = 4
SYSTEM = "x86_64-linux"
CONTEXT = zmq.Context()


# -- the two servers ---------------------------------------------------------------------------


async def _echo(ready: Path) -> None:
    async with Context() as context:
        router = ZmqRouter(context, "tcp://127.0.0.1:0")
        _announce(ready, router.endpoint)
        while True:
            for message in await router.receive():
                router.send(message.peer, message.frames)


def _announce(ready: Path, endpoint: str) -> None:
    ready.write_text(json.dumps({"endpoint": endpoint}))


@contextmanager
def started(command: list[str], ready: Path) -> Iterator[str]:
    """A server process, until the block ends; yields its endpoint."""
    with (ready.parent / f"{ready.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (ready.exists() and ready.stat().st_size):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start, see {log.name}")
            time.sleep(0.01)
        yield json.loads(ready.read_text())["endpoint"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


# -- a bare client -------------------------------------------------------------------------------


class Client:
    """One DEALER connection; blocking."""

    def __init__(self, endpoint: str) -> None:
        self.socket = CONTEXT.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 120_000
        self.socket.connect(endpoint)
        self.inbox: collections.deque[bytes] = collections.deque()

    def send(self, *messages: dict[str, Any]) -> None:
        self.socket.send_multipart([cbor2.dumps(m) for m in messages])

    def until(self, kind: str) -> dict[str, Any]:
        """The next message of a type; others are dropped."""
        while True:
            while self.inbox:
                message: dict[str, Any] = cbor2.loads(self.inbox.popleft())
                if message["type"] == kind:
                    return message
            self.inbox.extend(self.socket.recv_multipart())

    def open_session(self, worker: str, slots: int) -> None:
        """Handshake, full list, every candidate scored as present."""
        self.send({"type": "InitConnection", "versions": [1, 1], "id": worker,
                   "capabilities": {"fetch": False, "eval": False, "build": True}})  # fmt: skip
        self.until("InitAck")
        self.send(
            {"type": "WorkerCapabilities", "architectures": [SYSTEM], "system_features": [],
             "max_concurrent_builds": slots},
            {"type": "RequestJobList"},
        )  # fmt: skip
        while True:
            page = self.until("JobListChunk")
            scores = [
                {"job_id": c["job_id"], "missing_count": 0, "missing_nar_size": 0,
                 "outputs_present": False}
                for c in page["candidates"]
            ]  # fmt: skip
            self.send({"type": "RequestJobChunk", "scores": scores})
            if page["is_final"]:
                return


REQUEST = cbor2.dumps({"type": "RequestJob", "kind": "build"})


def ids(assigned: dict[str, Any]) -> dict[str, str]:
    return {"job_id": assigned["job_id"], "assignment_id": assigned["assignment_id"]}


def finished(assigned: dict[str, Any]) -> list[bytes]:
    """Acceptance and completion of an assignment."""
    accepted = {"type": "AssignJobResponse", "accepted": True, **ids(assigned)}
    return [cbor2.dumps(accepted), cbor2.dumps({"type": "JobCompleted", **ids(assigned)})]


def submit(endpoint: str, count: int) -> float:
    """Queues `count` independent builds with 20 inputs each; seconds until the answer."""
    client = Client(endpoint)
    client.send({"type": "CmdHello", "versions": [1, 1]})
    client.until("CmdWelcome")
    sources = [f"/nix/store/{n:032d}-source-{n}" for n in range(20)]
    start = time.perf_counter()
    for first in range(0, count, 1_000):
        jobs = [
            {"drv_path": f"/nix/store/{n:032d}-job.drv", "name": f"job-{n}", "system": SYSTEM,
             "required_features": [], "outputs": {"out": f"/nix/store/{n:032d}-job"},
             "input_drvs": [], "input_srcs": sources, "builder": "/bin/sh", "args": [], "env": {}}
            for n in range(first, min(first + 1_000, count))
        ]  # fmt: skip
        is_final = first + 1_000 >= count
        client.send({"type": "CmdSubmit", "request": 1, "is_final": is_final, "jobs": jobs})
    while not client.until("CmdSubmitted")["is_final"]:
        pass
    return time.perf_counter() - start


# -- measurements ----------------------------------------------------------------------------------


def echo_us(endpoint: str) -> list[float]:
    client = Client(endpoint)
    samples = []
    for _ in range(WARM_UP + SAMPLES):
        start = time.perf_counter()
        client.socket.send(REQUEST)
        client.socket.recv()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples[WARM_UP:]


def request_us(endpoint: str, samples: int) -> list[float]:
    client = Client(endpoint)
    client.open_session("latency", 1)
    measured = []
    for _ in range(samples):
        start = time.perf_counter()
        client.socket.send(REQUEST)
        assigned = client.until("AssignJob")
        measured.append((time.perf_counter() - start) * 1e6)
        client.socket.send_multipart(finished(assigned))
        client.until("Recorded")
    client.send({"type": "Goodbye"})
    return measured[min(WARM_UP, samples // 5) :]


def _cycle(endpoint: str, worker: str, slots: int, go: Any, seconds: float, done: Any) -> None:
    client = Client(endpoint)
    client.open_session(worker, slots)
    done.put(None)
    go.wait()
    client.socket.send_multipart([REQUEST] * slots)
    end = time.perf_counter() + seconds
    count = 0
    client.socket.rcvtimeo = 1_000
    while time.perf_counter() < end:
        out: list[bytes] = []
        try:
            frames = client.socket.recv_multipart()
        except zmq.Again:
            break
        for frame in frames:
            message = cbor2.loads(frame)
            if message["type"] == "AssignJob":
                out += [*finished(message), REQUEST]
                count += 1
        if out:
            client.socket.send_multipart(out)
    done.put(count)


def jobs_per_second(endpoint: str, workers: int, slots: int, seconds: float) -> float:
    context = mp.get_context("spawn")
    go, done = context.Event(), context.Queue()
    processes = [
        context.Process(target=_cycle, args=(endpoint, f"w{n}-{slots}", slots, go, seconds, done))
        for n in range(workers)
    ]
    for process in processes:
        process.start()
    for _ in processes:
        done.get()
    go.set()
    total: int = sum(done.get() for _ in processes)
    for process in processes:
        process.join()
    return total / seconds


def quantiles(samples: list[float]) -> dict[str, float]:
    ordered = sorted(samples)
    return {
        "p50_us": round(statistics.median(ordered), 1),
        "p99_us": round(ordered[int(len(ordered) * 0.99)], 1),
    }


def measure(pending: int, seconds: float, folder: Path) -> dict[str, Any]:
    """All figures with about `pending` jobs pending; a fresh server for each kind."""
    result: dict[str, Any] = {"pending": pending}
    python = [sys.executable, "-m", "bin", "server", "--listen", "tcp://127.0.0.1:0"]
    for name in ("latency", "1 slot", "8 slots"):
        state = Path(tempfile.mkdtemp(dir=folder))
        ready = state / "ready.json"
        command = [*python, "--state-dir", str(state), "--ready-file", str(ready)]
        # Enough to be still about as many at the end of a run.
        extra = 0 if name == "latency" else int(seconds * 8_000)
        with started(command, ready) as endpoint:
            took = submit(endpoint, pending + extra)
            if name == "latency":
                result["submit_secs"] = round(took, 2)
                samples = min(SAMPLES, pending // 2)
                result["request"] = quantiles(request_us(endpoint, samples))
            else:
                slots = int(name.split()[0])
                rate = jobs_per_second(endpoint, WORKERS, slots, seconds)
                result[f"jobs_per_sec_{WORKERS}x{slots}"] = round(rate)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pending", default="1000,10000,100000", help="numbers of pending jobs")
    parser.add_argument("--seconds", type=float, default=5, help="length of a throughput run")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--echo", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.echo:
        trio.run(_echo, args.echo)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name:
        folder = Path(name)
        ready = folder / "echo.json"
        with started([sys.executable, __file__, "--echo", str(ready)], ready) as endpoint:
            echo = quantiles(echo_us(endpoint))
        print(f"bare Trio echo: p50 {echo['p50_us']:.0f} us, p99 {echo['p99_us']:.0f} us\n")
        print(
            "pending   submit   request p50      p99   p50/echo  p99/echo  4x1 jobs/s  4x8 jobs/s"
        )
        rows = []
        for pending in map(int, args.pending.split(",")):
            row = measure(pending, args.seconds, folder)
            rows.append(row)
            request = row["request"]
            print(
                f"{pending:>7}  {row['submit_secs']:>6.2f}s  {request['p50_us']:>9.0f} us"
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
