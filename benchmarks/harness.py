"""What the benchmarks share: server processes, bare clients, fleets of bare workers, quantiles.

The server is always a real `headrace server` process on a ledger on disk. Clients are blocking
DEALER sockets that do no work of their own, so that what is measured is the server and the wire.
Times are taken by `time.perf_counter`, which on Linux is one clock for all processes.
"""

from __future__ import annotations

import collections
import hashlib
import json
import multiprocessing as mp
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cbor2
import psutil
import zmq

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
SYSTEM = "x86_64-linux"
INPUTS = 20
"""Paths that each submitted job needs."""
JOBS_PER_PART = 1_000
FLEET_PROCESSES = 4
"""Over which the workers of a fleet are spread, however many there are: the cores are few."""
START_SECS = 60
REQUEST = cbor2.dumps({"type": "RequestJob", "kind": "build"})
_SOURCES = [f"/nix/store/{n:032d}-source-{n}" for n in range(5_000)]
_EDGE_REACH = 5_000
"""How far back in the submission the inputs of a job are."""


# -- servers -------------------------------------------------------------------------------------


class Running(NamedTuple):
    """A server process."""

    endpoint: str
    pid: int

    def cpu_secs(self) -> float:
        """Processor time of all its threads so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def memory_mb(self) -> tuple[float, float]:
        """Resident memory now, and the most that it ever was, in MB of 10^6 bytes."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        now, peak = (int(fields[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))
        return now, peak


@contextmanager
def started(command: Sequence[str], ready: Path) -> Iterator[Running]:
    """A server process that writes a ready file, until the block ends."""
    with (ready.parent / f"{ready.name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        deadline = time.monotonic() + START_SECS
        while not (ready.exists() and ready.stat().st_size):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command} did not start, see {log.name}")
            time.sleep(0.01)
        yield Running(json.loads(ready.read_text())["endpoint"], process.pid)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@contextmanager
def serving(folder: Path) -> Iterator[Running]:
    """A `headrace server` on an empty ledger, in a folder of its own below `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ready = Path(name) / "ready.json"
        command = [sys.executable, "-m", "bin", "server", "--listen", "tcp://127.0.0.1:0",
                   "--state-dir", name, "--ready-file", str(ready)]  # fmt: skip
        with started(command, ready) as running:
            yield running


@contextmanager
def echoing(folder: Path, *, blocking: bool = False) -> Iterator[Running]:
    """The bare echo of echo.py."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ready = Path(name) / "ready.json"
        option = ["--blocking"] if blocking else []
        command = [sys.executable, "-m", "benchmarks.echo", str(ready), *option]
        with started(command, ready) as running:
            yield running


# -- clients -------------------------------------------------------------------------------------

_CONTEXT: zmq.Context[Any] = zmq.Context()


class Client:
    """One DEALER connection; blocking."""

    def __init__(self, endpoint: str, context: zmq.Context[Any] | None = None) -> None:
        self.socket = (context or _CONTEXT).socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 300_000
        self.socket.connect(endpoint)
        self._inbox: collections.deque[bytes] = collections.deque()

    def send(self, *messages: dict[str, Any]) -> None:
        self.socket.send_multipart([cbor2.dumps(message) for message in messages])

    def frame(self, *kinds: str) -> bytes:
        """The next frame of one of these types; others are dropped."""
        while True:
            while self._inbox:
                frame = self._inbox.popleft()
                if kind_of(frame) in kinds:
                    return frame
            self._inbox.extend(self.socket.recv_multipart())

    def until(self, *kinds: str) -> dict[str, Any]:
        """The next message of one of these types; others are dropped."""
        message: dict[str, Any] = cbor2.loads(self.frame(*kinds))
        return message

    def hello(self) -> None:
        """As a command."""
        self.send({"type": "CmdHello", "versions": [1, 1]})
        self.until("CmdWelcome")

    def announce(self, worker: str, slots: int) -> None:
        """As a worker, up to its capabilities."""
        self.send({"type": "InitConnection", "versions": [1, 1], "id": worker,
                   "capabilities": {"fetch": False, "eval": False, "build": True}})  # fmt: skip
        self.until("InitAck")
        self.send({"type": "WorkerCapabilities", "architectures": [SYSTEM],
                   "system_features": [], "max_concurrent_builds": slots})  # fmt: skip

    def open_session(self, worker: str, slots: int) -> None:
        """As a worker: handshake, full list, every candidate scored as present and taken."""
        self.announce(worker, slots)
        self.send({"type": "RequestJobList"})
        is_final = False
        while not is_final:
            scores, is_final = _scores_of(self.frame("JobListChunk"))
            self.socket.send(scores)
        self.round_trip()

    def round_trip(self) -> None:
        """Until the server has taken everything sent so far."""
        self.send({"type": "Ping", "nonce": 0})
        self.until("Pong")

    def close(self) -> None:
        self.socket.close()


def kind_of(frame: bytes) -> str:
    """The `type` of a frame; the server writes it first."""
    assert frame[1:6] == b"dtype"
    head = frame[6]
    start, length = (8, frame[7]) if head == 0x78 else (7, head - 0x60)  # CBOR text, long or short
    return frame[start : start + length].decode()


_KNOWN_PAGES: dict[bytes, tuple[bytes, bool]] = {}
"""By digest. Workers of one process are sent the same pages, and cbor2 takes 10 ms for one."""


def _scores_of(page: bytes) -> tuple[bytes, bool]:
    """The scores of a page, all present, and whether the page is the last."""
    digest = hashlib.sha256(page).digest()
    if digest not in _KNOWN_PAGES:
        message = cbor2.loads(page)
        _KNOWN_PAGES[digest] = scores_for(message["candidates"]), message.get("is_final", True)
    return _KNOWN_PAGES[digest]


def scores_for(candidates: Iterable[dict[str, Any]]) -> bytes:
    """The `RequestJobChunk` of a worker that has every input."""
    scores = [
        {"job_id": c["job_id"], "missing_count": 0, "missing_nar_size": 0, "outputs_present": False}
        for c in candidates
    ]
    return cbor2.dumps({"type": "RequestJobChunk", "scores": scores})


def finished(assigned: dict[str, Any]) -> list[bytes]:
    """Acceptance and completion of an assignment."""
    ids = {"job_id": assigned["job_id"], "assignment_id": assigned["assignment_id"]}
    accepted = {"type": "AssignJobResponse", "accepted": True, **ids}
    return [cbor2.dumps(accepted), cbor2.dumps({"type": "JobCompleted", **ids})]


# -- submissions ---------------------------------------------------------------------------------


def jobs(count: int, edges: int = 0, label: str = "job") -> Iterator[dict[str, Any]]:
    """Builds with 20 inputs each, `edges` of them outputs of earlier ones as far as there are any,
    the others of 5 000 sources."""
    rng = random.Random(1)
    for n in range(count):
        needs = rng.sample(range(max(0, n - _EDGE_REACH), n), min(edges, n))
        yield {
            "drv_path": f"/nix/store/{n:032d}-{label}.drv", "name": f"{label}-{n}",
            "system": SYSTEM, "required_features": [],
            "outputs": {"out": f"/nix/store/{n:032d}-{label}"},
            "input_drvs": [f"/nix/store/{need:032d}-{label}.drv" for need in needs],
            "input_srcs": rng.sample(_SOURCES, INPUTS - edges),
            "builder": "/bin/sh", "args": [], "env": {},
        }  # fmt: skip


def submission(submitted: Iterable[dict[str, Any]], request: int = 1) -> list[bytes]:
    """The frames of a submission."""
    every = list(submitted)
    parts = [every[at : at + JOBS_PER_PART] for at in range(0, len(every), JOBS_PER_PART)]
    return [
        cbor2.dumps({"type": "CmdSubmit", "request": request,
                     "is_final": part is parts[-1], "jobs": part})
        for part in parts
    ]  # fmt: skip


def submit(endpoint: str, frames: Sequence[bytes]) -> tuple[float, float]:
    """When the first frame was sent and when the whole was accepted."""
    client = Client(endpoint)
    client.hello()
    start = time.perf_counter()
    for frame in frames:
        client.socket.send(frame)
    while not client.until("CmdSubmitted", "CmdError")["is_final"]:
        pass
    end = time.perf_counter()
    client.close()
    return start, end


# -- fleets --------------------------------------------------------------------------------------


def _work(
    endpoint: str, names: Sequence[str], slots: int, seconds: float, ready: Any, go: Any, done: Any
) -> None:
    clients = {}
    poller = zmq.Poller()
    for name in names:
        client = Client(endpoint)
        client.open_session(name, slots)
        clients[client.socket] = client
        poller.register(client.socket, zmq.POLLIN)
    ready.put(None)
    go.wait()
    for client in clients.values():
        client.socket.send_multipart([REQUEST] * slots)
    count, end = 0, time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        for socket, _ in poller.poll(int(left * 1_000) + 1):
            out: list[bytes] = []
            for frame in socket.recv_multipart():
                if kind_of(frame) == "AssignJob":
                    out += [*finished(cbor2.loads(frame)), REQUEST]
                    count += 1
            if out:
                socket.send_multipart(out)
    done.put(count)


@contextmanager
def fleet(
    endpoint: str, workers: int, slots: int, seconds: float = 0.0
) -> Iterator[Callable[[], float]]:
    """Workers with open sessions that have scored everything. Yields what lets them work: every
    slot goes request, assign, accept, complete, request, the last three in one message, for some
    seconds; it returns assignments a second, and is to be called once."""
    names = [f"worker-{n:03}" for n in range(workers)]
    shares = [names[at::FLEET_PROCESSES] for at in range(min(workers, FLEET_PROCESSES))]
    with crew(_work, [(endpoint, share, slots, seconds) for share in shares]) as run:
        yield lambda: sum(run()) / seconds


@contextmanager
def crew(work: Callable[..., None], each: Sequence[tuple[Any, ...]]) -> Iterator[Callable[[], Any]]:
    """A process per item of `each`, that runs `work(*item, ready, go, done)`, made ready. Yields
    what lets them go and returns what they put into `done`."""
    context = mp.get_context("spawn")
    ready, go, done = context.Queue(), context.Event(), context.Queue()
    processes = [context.Process(target=work, args=(*item, ready, go, done)) for item in each]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            ready.get(timeout=900)

        def run() -> list[Any]:
            go.set()
            return [done.get(timeout=900) for _ in processes]

        yield run
    finally:
        for process in processes:
            process.kill()
            process.join()


def meanwhile(
    run: Callable[[], T], work: Callable[[], object], between: Callable[[], object]
) -> tuple[T, list[tuple[float, float]]]:
    """What `run` returns, and the begin and end of each `work` that a thread did until then, over
    and over, with `between` after it."""
    spans = []
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            start = time.perf_counter()
            work()
            spans.append((start, time.perf_counter()))
            between()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        result = run()
    finally:
        is_over.set()
        thread.join()
    return result, spans


# -- figures -------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def quantile(samples: Sequence[float], share: float) -> float:
    """The sample that `share` of all are below."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Of microseconds."""
    return {
        "p50_us": round(statistics.median(samples), 1),
        "p99_us": round(quantile(samples, 0.99), 1),
    }
