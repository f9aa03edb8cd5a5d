"""What many workers and long lists cost: heartbeats, a first full list, memory.

Method. A real server process, bare workers as in harness.py; each function says the rest. Used by
`python -m benchmarks`.
"""

from __future__ import annotations

import heapq
import time
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import harness
import zmq
from harness import REQUEST, Client

METRICS_EVERY_SECS = 10.0
REQUEST_EVERY_SECS = 10.0
PING_EVERY_SECS = 5.0
_IDLE_METRICS = cbor2.dumps(
    {"type": "WorkerMetrics", "cpu_usage_pct": 3.0, "ram_free_mb": 30_000,
     "disk_speed_mbps": 900.0, "upload_speed_mbps": 900.0, "download_speed_mbps": 900.0}
)  # fmt: skip
_IS_FINAL = cbor2.dumps("is_final") + cbor2.dumps(True)
"""How the last page of a list ends."""


# -- heartbeats ----------------------------------------------------------------------------------


def heartbeat_shares(folder: Path, workers: int, seconds: float) -> tuple[float, float]:
    """Percent of a core that the server takes for idle workers, and for the same while silent.

    An idle worker sends `WorkerMetrics` every 10 s, `RequestJob` every 10 s, and a `Ping` after
    each 5 s in which the server said nothing, here evenly spread over time. Processor time is that
    of all threads of the server; its clocks and sweeps are in both figures.
    """
    with harness.serving(folder) as server:
        zmq_context = zmq.Context()
        zmq_context.set(zmq.MAX_SOCKETS, workers + 64)
        clients = []
        for n in range(workers):
            client = Client(server.endpoint, zmq_context)
            client.open_session(f"idle-{n:04}", 1)
            clients.append(client)

        def share(work: Any) -> float:
            before, start = server.cpu_secs(), time.perf_counter()
            work()
            return 100 * (server.cpu_secs() - before) / (time.perf_counter() - start)

        silent = share(lambda: time.sleep(seconds))
        beating = share(lambda: _beat(clients, seconds))
        zmq_context.destroy(linger=0)
    return beating, silent


def _beat(clients: list[Client], seconds: float) -> None:
    ping = cbor2.dumps({"type": "Ping", "nonce": 1})
    kinds = ((METRICS_EVERY_SECS, _IDLE_METRICS), (REQUEST_EVERY_SECS, REQUEST),
             (PING_EVERY_SECS, ping))  # fmt: skip
    start = time.perf_counter()
    due = [
        (start + every * (at + kind / len(kinds)) / len(clients), at, kind)
        for at in range(len(clients))
        for kind, (every, _) in enumerate(kinds)
    ]
    heapq.heapify(due)
    while due[0][0] < start + seconds:
        when, at, kind = heapq.heappop(due)
        time.sleep(max(0.0, when - time.perf_counter()))
        socket = clients[at].socket
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            socket.recv_multipart()
        every, frame = kinds[kind]
        socket.send(frame)
        heapq.heappush(due, (when + every, at, kind))


# -- a first full list ---------------------------------------------------------------------------


class Listed(NamedTuple):
    """What a worker's first list took, and others meanwhile."""

    list_secs: float
    """From `RequestJobList` to the last page's arrival."""
    scored_secs: float
    """The same, until all of its scores were taken."""
    others_us: list[float]
    """Requests of another worker that were open at some time of it, scores included."""


def _receive_list(endpoint: str, ready: Any, go: Any, done: Any) -> None:
    client = Client(endpoint)
    client.announce("newcomer", 1)
    client.round_trip()
    ready.put(None)
    go.wait()
    start = time.perf_counter()
    client.send({"type": "RequestJobList"})
    pages = [client.frame("JobListChunk")]
    while not pages[-1].endswith(_IS_FINAL):
        pages.append(client.frame("JobListChunk"))
    listed = time.perf_counter()
    for page in pages:
        client.socket.send(harness.scores_for(cbor2.loads(page)["candidates"]))
    client.round_trip()
    done.put((start, listed, time.perf_counter()))


def first_list(folder: Path, candidates: int) -> Listed:
    """A worker asks for its first list, takes all pages, then scores them as a real one would;
    in another process. Meanwhile a worker that has scored everything requests, accepts and
    completes without pause."""
    with harness.serving(folder) as server:
        harness.submit(server.endpoint, harness.submission(harness.jobs(candidates)))
        other = Client(server.endpoint)
        other.open_session("other", 1)
        given: list[dict[str, Any]] = []

        def request() -> None:
            other.socket.send(REQUEST)
            given.append(other.until("AssignJob"))

        def complete() -> None:
            other.socket.send_multipart(harness.finished(given.pop()))
            other.frame("Recorded")

        with harness.crew(_receive_list, [(server.endpoint,)]) as run:
            ((start, listed, scored),), spans = harness.meanwhile(run, request, complete)
        other.close()
    open_then = [end - begin for begin, end in spans if end > start and begin < scored]
    return Listed(listed - start, scored - start, [secs * 1e6 for secs in open_then])


# -- memory --------------------------------------------------------------------------------------


def memory_mb(folder: Path, candidates: int, workers: int) -> tuple[float, float]:
    """The server's resident memory, in MB of 10^6 bytes, with every candidate scored by every
    worker, and the most that it was on the way there, the submission included."""
    with harness.serving(folder) as server:
        harness.submit(server.endpoint, harness.submission(harness.jobs(candidates)))
        with harness.fleet(server.endpoint, workers, 1):
            return server.memory_mb()
