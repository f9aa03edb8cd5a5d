"""Jobs a second beside general task queues, with as many jobs in flight, in one run.

    pip install 'headrace[bench]'; apt-get install beanstalkd postgresql
    python benchmarks/peers.py [--seconds 5] [--pending 10000] [--json FILE]

Method. Each system holds `--pending` jobs that do nothing and more than the run can take. W worker
processes keep S jobs each in flight: take one, report it done, take the next, for some seconds; a
job counts when it was handed out. Everything is on one machine, and durable unless the row says
otherwise:

- headrace: `headrace server`, bare workers as in `dispatch.py`; a claim row is committed before
  each job goes out, and each result is fsynced before it is confirmed.
- beanstalkd: `-f 0` (fsync at each write) and without a log; a connection for each job in flight,
  reserve and delete in turn.
- PostgreSQL: `UPDATE ... WHERE id = (SELECT ... FOR UPDATE SKIP LOCKED LIMIT 1) RETURNING id`, then
  an update to done, each its own transaction with synchronous_commit on; a connection for each job
  in flight.
- dask.distributed: W worker processes of S threads that each offer S of a resource of which a task
  takes one; the client keeps as many tasks submitted as there are slots. Nothing is durable.

A system that is not installed is left out, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dispatch
import harness

try:
    import distributed
except ImportError:
    distributed = None
try:
    import psycopg
except ImportError:
    psycopg = None

IN_FLIGHT = ((1, 1), (4, 1), (4, 8))
"""Workers and slots."""
GOALS = {
    ("postgresql", 4): 2.0, ("postgresql", 32): 5.0, ("dask", 4): 4.0,
    ("beanstalkd fsync", 1): 0.4, ("beanstalkd fsync", 32): 1.25,
}  # fmt: skip
"""What headrace's rate is to be, at least, as a multiple of the peer's."""


class Missing(Exception):
    """The peer cannot be measured here; the text says why."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"{process.args!r} did not start") from None
            time.sleep(0.02)
        else:
            return


@contextmanager
def running(command: list[str], port: int, log: Path, user: str | None = None) -> Iterator[None]:
    """A peer's server, until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, user=user, group=user)
    try:
        until_open(port, process)
        yield
    finally:
        # Not SIGINT: where the run itself was started in the background it is ignored.
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def rate(work: Callable[..., None], args: tuple[Any, ...], workers: int, seconds: float) -> float:
    """Jobs a second of processes that each run `work(*args, seconds, ready, go, done)`."""
    with harness.crew(work, [(*args, seconds)] * workers) as run:
        return sum(run()) / seconds


# -- headrace --------------------------------------------------------------------------------------


def headrace(workers: int, slots: int, pending: int, seconds: float, folder: Path) -> float:
    return dispatch.jobs_per_second(folder, pending, workers, slots, seconds)


# -- beanstalkd ------------------------------------------------------------------------------------


def _reserve_and_delete(
    port: int, slots: int, seconds: float, ready: Any, go: Any, done: Any
) -> None:
    # One connection of a blocking protocol is one job in flight; `select` serves them all.
    selector = selectors.DefaultSelector()
    for _ in range(slots):
        selector.register(
            socket.create_connection(("127.0.0.1", port)), selectors.EVENT_READ, [b""]
        )
    ready.put(None)
    go.wait()
    for key in selector.get_map().values():
        key.fileobj.sendall(b"reserve\r\n")  # type: ignore[union-attr]  # these are sockets
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for key, _ in selector.select(timeout=1):
            buffer = key.data
            buffer[0] += key.fileobj.recv(65536)  # type: ignore[union-attr]  # as above
            while (line_end := buffer[0].find(b"\r\n")) >= 0:
                words = buffer[0][:line_end].split()
                if words[0] == b"RESERVED":
                    whole = line_end + 2 + int(words[2]) + 2
                    if len(buffer[0]) < whole:
                        break
                    buffer[0] = buffer[0][whole:]
                    count += 1
                    order = b"delete %s\r\nreserve\r\n" % words[1]
                    key.fileobj.sendall(order)  # type: ignore[union-attr]  # as above
                else:
                    buffer[0] = buffer[0][line_end + 2 :]  # DELETED
    done.put(count)


def beanstalkd(
    workers: int, slots: int, pending: int, seconds: float, folder: Path, *, fsync: bool
) -> float:
    program = shutil.which("beanstalkd")
    if program is None:
        raise Missing("not installed: beanstalkd")
    port = free_port()
    durable = ["-b", str(folder), "-f", "0"] if fsync else []
    command = [program, "-l", "127.0.0.1", "-p", str(port), *durable]
    with running(command, port, folder / "log"):
        with socket.create_connection(("127.0.0.1", port)) as client:
            body = b"x" * 200
            put = b"put 0 0 600 %d\r\n%s\r\n" % (len(body), body)
            answers = client.makefile("rb")
            for _ in range(0, pending + int(seconds * (15_000 if fsync else 60_000)), 500):
                client.sendall(put * 500)
                for _ in range(500):
                    answers.readline()
        return rate(_reserve_and_delete, (port, slots), workers, seconds)


# -- PostgreSQL ------------------------------------------------------------------------------------

_TAKE = """UPDATE job SET state = 'running' WHERE id = (
    SELECT id FROM job WHERE state = 'queued' ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED)
RETURNING id"""
_DONE = "UPDATE job SET state = 'done' WHERE id = %s"


def _take_and_finish(dsn: str, slots: int, seconds: float, ready: Any, go: Any, done: Any) -> None:
    counts = [0] * slots
    barrier = threading.Barrier(slots + 1)

    def run(slot: int) -> None:
        with psycopg.connect(dsn, autocommit=True) as db:
            barrier.wait()
            go.wait()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                row = db.execute(_TAKE, prepare=True).fetchone()
                if row is None:
                    return
                counts[slot] += 1
                db.execute(_DONE, row, prepare=True)

    threads = [threading.Thread(target=run, args=(slot,)) for slot in range(slots)]
    for thread in threads:
        thread.start()
    barrier.wait()
    ready.put(None)
    for thread in threads:
        thread.join()
    done.put(sum(counts))


def postgresql(workers: int, slots: int, pending: int, seconds: float, folder: Path) -> float:
    if psycopg is None:
        raise Missing("not installed: psycopg")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        raise Missing("not installed: PostgreSQL")
    programs, data, port = found[-1].parent, folder / "data", free_port()
    # It refuses to run as root.
    user = "postgres" if os.geteuid() == 0 else None
    if user is not None:
        shutil.chown(folder, user)
        folder.parent.chmod(0o755)
    init = [str(programs / "initdb"), "-A", "trust", "-U", "bench", "-D", str(data)]
    subprocess.run(init, check=True, stdout=subprocess.DEVNULL, cwd=folder, user=user, group=user)
    server = [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", "",
              "-h", "127.0.0.1", "-c", "synchronous_commit=on", "-c", "fsync=on"]  # fmt: skip
    dsn = f"host=127.0.0.1 port={port} user=bench dbname=postgres"
    with running(server, port, folder / "log", user):
        with _connected(dsn) as db:
            db.execute("CREATE TABLE job (id bigserial PRIMARY KEY, state text, body text)")
            db.execute(
                "INSERT INTO job (state, body) SELECT 'queued', repeat('x', 200)"
                " FROM generate_series(1, %s)", (pending + int(seconds * 12_000),)
            )  # fmt: skip
            db.execute("CREATE INDEX job_queued ON job (id) WHERE state = 'queued'")
            db.execute("VACUUM ANALYZE job")
        return rate(_take_and_finish, (dsn, slots), workers, seconds)


def _connected(dsn: str) -> Any:
    deadline = time.monotonic() + 30
    while True:
        try:
            return psycopg.connect(dsn, autocommit=True)
        except psycopg.OperationalError:  # the port is open before the database is
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


# -- dask ------------------------------------------------------------------------------------------


def _nothing(number: int) -> int:
    return number


def dask(workers: int, slots: int, _pending: int, seconds: float, folder: Path) -> float:
    if distributed is None:
        raise Missing("not installed: dask.distributed")
    with (
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=slots, resources={"slot": slots},
            dashboard_address=None, local_directory=str(folder), processes=True,
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        numbers = itertools.count()

        def submit() -> Any:
            return client.submit(_nothing, next(numbers), resources={"slot": 1}, pure=False)

        client.gather([submit() for _ in range(100)])
        running = distributed.as_completed([submit() for _ in range(workers * slots)])
        count, end = 0, time.perf_counter() + seconds
        for _ in running:
            count += 1
            if time.perf_counter() > end:
                break
            running.add(submit())
        return count / seconds


SYSTEMS: dict[str, Callable[[int, int, int, float, Path], float]] = {
    "headrace": headrace,
    "beanstalkd fsync": lambda *args: beanstalkd(*args, fsync=True),
    "beanstalkd memory": lambda *args: beanstalkd(*args, fsync=False),
    "postgresql": postgresql,
    "dask": dask,
}


PEERS = tuple(name for name in SYSTEMS if name != "headrace")


def jobs_per_second(
    name: str, workers: int, slots: int, pending: int, seconds: float, parent: Path | None = None
) -> float:
    """A system's rate; its files are below `parent`. Raises `Missing`."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-", dir=parent) as folder:
        inner = Path(folder) / "state"
        inner.mkdir()
        return SYSTEMS[name](workers, slots, pending, seconds, inner)


def measure(pending: int, seconds: float) -> list[dict[str, Any]]:
    """A row per system: jobs a second, and headrace's rate as a multiple, by jobs in flight."""
    rows: list[dict[str, Any]] = []
    for name in SYSTEMS:
        row: dict[str, Any] = {"system": name, "jobs_per_sec": {}, "headrace_is": {}}
        for workers, slots in IN_FLIGHT:
            try:
                found = jobs_per_second(name, workers, slots, pending, seconds)
            except Missing as missing:
                row["missing"] = str(missing)
                break
            flight = workers * slots
            row["jobs_per_sec"][flight] = round(found)
            row["headrace_is"][flight] = round(
                (rows or [row])[0]["jobs_per_sec"][flight] / found, 2
            )
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    if "missing" in row:
        return f"{row['system']:<18} left out: {row['missing']}"
    cells = [f"{row['jobs_per_sec'][w * s]:>8}" for w, s in IN_FLIGHT]
    told = []
    for workers, slots in IN_FLIGHT if row["system"] != "headrace" else ():
        flight = workers * slots
        goal = GOALS.get((row["system"], flight))
        ratio = row["headrace_is"][flight]
        told.append(f"{ratio:.2f} x" + (f" (goal {goal:g})" if goal is not None else ""))
    return f"{row['system']:<18} {' '.join(cells)}   {', '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5, help="length of each run")
    parser.add_argument("--pending", type=int, default=10_000, help="number of pending jobs")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    args = parser.parse_args()
    flights = " ".join(f"{w * s:>8}" for w, s in IN_FLIGHT)
    print(f"{'jobs in flight':<18} {flights}   headrace's rate is")
    rows = measure(args.pending, args.seconds)
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
