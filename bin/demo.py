"""`headrace demo`: server, workers, a sample graph and the view, on this machine alone."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import click
import trio

from actors.graph.sample import BIG_FEATURE, sample_graph
from actors.worker.detect import own_system
from bin import summary
from bin.children import Child, kill_within, start
from bin.client import connected, steady
from bin.errors import FAILED, INTERRUPTED, CommandError
from bin.interrupts import stopped_by_signals
from bin.jobs import all_jobs
from bin.live import follow, is_terminal
from bin.options import Target, option
from bin.output import note, say
from bin.parts import cut
from bin.session import run
from bin.summary import Status
from transport.interface import Connector

WORKERS = ("amber", "birch", "cedar")
SLOTS = 2
START_SECS = 20.0
GRAPH_SECS = 300.0
POLL_SECS = 0.05


@click.command()
@option("--keep", is_flag=True, help="Keep the directory with ledger, store and logs.")
def demo(keep: bool) -> None:
    """Run a whole farm on this machine: a server, three workers, sixty short builds.

    Needs neither Nix nor any set-up, and leaves nothing behind. Fails unless all is built.
    """
    # The address is known only once the server runs; no keys on the loopback.
    target = Target("", None, None, START_SECS)
    run(target, lambda connector: _demo(connector, keep))


async def _demo(connector: Connector, keep: bool) -> None:
    async with stopped_by_signals() as nursery:
        home = Path(tempfile.mkdtemp(prefix="headrace-demo-"))
        try:
            async with _farm(home, nursery) as endpoint:
                await _build(connector, endpoint, home / "history")
        finally:
            if keep:
                note(f"kept {home}")
            else:
                shutil.rmtree(home, ignore_errors=True)


@asynccontextmanager
async def _farm(home: Path, nursery: trio.Nursery) -> AsyncIterator[str]:
    """A server and the workers for the length of a block; gives the server's address."""
    note(f"a server and {len(WORKERS)} workers, in {home}")
    children: list[Child] = []

    async def child(name: str, arguments: Sequence[str]) -> None:
        children.append(await start(name, arguments, home / f"{name}.log"))
        nursery.start_soon(children[-1].watch)

    try:
        ready = home / "ready.json"
        await child("server", _server(home, ready))
        endpoint = await _endpoint(ready)
        for name in WORKERS:
            await child(f"worker-{name}", _worker(home, endpoint, name))
        yield endpoint
    finally:
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as stopping:
                for worker in children[1:]:
                    stopping.start_soon(worker.stop)
            for server in children[:1]:
                await server.stop()
            kill_within(home)


def _server(home: Path, ready: Path) -> list[str]:
    return [
        "server", "--listen", "tcp://127.0.0.1:0", "--state-dir", str(home / "server"),
        # Three workers keep one machine busy; that shall not make them wait.
        "--ready-file", str(ready), "--policy", "simple",
    ]  # fmt: skip


def _worker(home: Path, endpoint: str, name: str) -> list[str]:
    # The first worker alone has the feature that the big builds need.
    features = BIG_FEATURE if name == WORKERS[0] else ","
    return [
        "worker", "--server", endpoint, "--state-dir", str(home / name), "--id", f"demo-{name}",
        "--name", name, "--executor", "process", "--store", str(home / "store"),
        "--build-max-concurrent", str(SLOTS), "--systems", own_system(), "--features", features,
    ]  # fmt: skip


async def _endpoint(ready: Path) -> str:
    file = trio.Path(ready)
    with trio.move_on_after(START_SECS):
        while not await file.exists():
            await trio.sleep(POLL_SECS)
        endpoint: str = json.loads(await file.read_text())["endpoint"]
        return endpoint
    raise CommandError(f"the server did not start within {START_SECS:g} s", FAILED)


async def _build(connector: Connector, endpoint: str, history: Path) -> None:
    graph = sample_graph(own_system(), str(history))
    started = trio.current_time()
    async with connected(connector, endpoint, START_SECS) as client:
        answer = await client.submit(cut(graph, ()))
        hint = "; q leaves" if is_terminal() else ""
        note(f"submitted {len(answer.jobs)} builds{hint}")
        async with steady(connector, endpoint, START_SECS, note) as asker:
            with trio.move_on_after(GRAPH_SECS):
                over = await follow(asker, is_over=_is_over, block=_line, interval=0.25)
                if not over:
                    raise CommandError("left before the graph was built", INTERRUPTED)
        took = trio.current_time() - started
        _summarize(await all_jobs(client), len(graph), took, history)


def _line(status: Status) -> list[str]:
    return [summary.progress_line(status)]


def _is_over(status: Status) -> bool:
    return summary.open_jobs(status) == 0


def _summarize(jobs: Sequence[dict[str, Any]], expected: int, took: float, history: Path) -> None:
    """Prints how it went; raises `CommandError` unless each build completed, and ran once."""
    completed = [job for job in jobs if job["status"] == "Completed"]
    workers = Counter(str(job["worker"]).removeprefix("demo-") for job in completed)
    runs = Counter(history.read_text().split()) if history.exists() else Counter()
    say(f"{len(completed)} of {expected} jobs done in {took:.1f} s")
    say(f"by worker: {', '.join(f'{name} {workers[name]}' for name in WORKERS)}")
    twice = [name for name, times in runs.items() if times > 1]
    say(f"{len(runs) - len(twice)} of {expected} built exactly once")
    if len(completed) != expected or len(runs) != expected or twice:
        rest = next((j for j in jobs if j["status"] != "Completed"), None)
        why = f"{rest['name']} ended {rest['status']}: {rest.get('error')}" if rest else ""
        raise CommandError(f"the graph was not built as it should be. {why}".strip(), FAILED)
