"""A farm whose parts can be made to fail: processes, their connections, disks and ledger."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import assert_never

import psutil
import trio

from actors.worker.detect import own_system
from actors.worker.executors.spec import MARK
from actors.worker.executors.store import DirectoryStore
from bin.chaos import ledger
from bin.chaos.daemon import Daemon
from bin.chaos.disk import Disk, FileSizeLimit, Tmpfs
from bin.chaos.faults import KINDS, Fault, Kind
from bin.chaos.proxy import Link
from bin.children import kill_within
from bin.client import Client, connect
from bin.errors import FAILED, CommandError
from transport.interface import ConnectionLost, Connector
from transport.messages import CmdDone, CmdKillActor

SLOTS = 2
START_SECS = 60.0
STOP_SERVER_SECS, STOP_WORKER_SECS = 22.0, 8.0
ASK_SECS = 5.0
_FILL_AGAIN_SECS = 0.02
# Waits are short, so that a run of half a minute sees what else would take an hour; a job is to
# fail only by itself, so attempts are many; how busy this machine is must not decide anything.
_SERVER_OPTIONS = {
    "--heartbeat-timeout": 12, "--tick": 0.5, "--reconnect-grace": 1, "--answer-timeout": 3,
    "--retry-backoff": 0.2, "--max-attempts": 1000, "--policy": "simple",
    "--cluster-prepare-timeout": 4, "--cluster-retry-delay": 0.5, "--cluster-reserve-after": 3,
    "--cluster-reserve-timeout": 15,
}  # fmt: skip


class Farm:
    """One server and workers in `home`. Use `running`; then `apply` faults."""

    def __init__(
        self, home: Path, workers: Sequence[str], secs: float, complain: Callable[[str], None]
    ) -> None:
        """`secs` is about how long it will run, for the sizes of disks."""
        self.home = home
        self.kinds: frozenset[Kind] = frozenset(KINDS)
        """Faults that are possible here."""
        self._port = _free_port()
        self.endpoint = f"tcp://127.0.0.1:{self._port}"
        self.ledger_file = home / "server" / "ledger.sqlite3"
        self.store = home / "build" / "store"
        self._unwritable = _Unwritable()
        self.server = Daemon(
            "server", self._server_arguments, home / "server.log",
            ready_text=f"listening on {self.endpoint}", complain=complain,
            may_fail_to_start=self._unwritable.since,
        )  # fmt: skip
        self._links = {name: Link(self._port) for name in workers}
        self.workers = {
            name: Daemon(
                name, partial(self._worker_arguments, name), home / f"{name}.log",
                ready_text=f"worker {name}, server", complain=complain,
            )
            for name in workers
        }  # fmt: skip
        self._disks: dict[str, Disk] = {}
        self._turns = {name: trio.Lock() for name in ("", "ledger", "build", *workers)}
        self._make_disks(secs)

    def _make_disks(self, secs: float) -> None:
        for name, directory, mib in (
            ("ledger", self.home / "server", 64 + round(secs / 4)),
            ("build", self.home / "build", 64 + round(secs / 2)),
        ):
            directory.mkdir()
            disk: Disk | None = Tmpfs.mounted(directory, mib)
            if disk is None and name == "ledger":
                disk = FileSizeLimit(lambda: self.server.pid)
            if disk is None:
                self.kinds -= {"full-build-disk"}
            else:
                self._disks[name] = disk

    def close(self, *, keep: bool) -> None:
        """Gives the disks up, after all has ended; with `keep` the files stay."""
        for disk in self._disks.values():
            disk.close(keep=keep)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything runs for the length of a block, and has ended after it."""
        daemons = [self.server, *self.workers.values()]
        try:
            async with trio.open_nursery() as nursery:
                for link in self._links.values():
                    await nursery.start(link.serve)
                for daemon in daemons:
                    nursery.start_soon(daemon.keep)
                with trio.move_on_after(START_SECS) as starting:
                    await self.server.until_up()
                if starting.cancelled_caught:
                    why = f"the server did not start within {START_SECS:g} s"
                    raise CommandError(why, FAILED)
                yield
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                self._heal()
                async with trio.open_nursery() as stopping:
                    for worker in self.workers.values():
                        stopping.start_soon(worker.finish, STOP_WORKER_SECS)
                await self.server.finish(STOP_SERVER_SECS)

    def _heal(self) -> None:
        """What a fault that was cut short may have left."""
        for disk in self._disks.values():
            disk.free()

    def _server_arguments(self) -> list[str]:
        options = [str(part) for option in _SERVER_OPTIONS.items() for part in option]
        return [
            "server", "--chaos", "--listen", self.endpoint,
            "--state-dir", str(self.home / "server"), *options,
        ]  # fmt: skip

    def _worker_arguments(self, name: str) -> list[str]:
        return [
            "worker", "--server", f"tcp://127.0.0.1:{self._links[name].port}", "--id", name,
            "--name", name, "--state-dir", str(self.home / "build" / name), "--executor", "process",
            "--store", str(self.store), "--build-max-concurrent", str(SLOTS),
            "--systems", own_system(), "--features", ",", "--cpu-core-score", "1",
        ]  # fmt: skip

    # -- faults ----------------------------------------------------------------------------

    async def apply(self, fault: Fault, connector: Connector) -> bool:
        """Makes a fault happen and end; false when there was nothing to do it to."""
        match fault.kind:
            case "kill-server" | "stop-server" | "pause-server":
                async with self.server.turn:
                    await self._hit(self.server, fault, STOP_SERVER_SECS)
            case "kill-worker" | "stop-worker" | "pause-worker":
                worker = self.workers[fault.target]
                async with worker.turn:
                    await self._hit(worker, fault, STOP_WORKER_SECS)
            case "suspend-worker":
                worker = self.workers[fault.target]
                async with worker.turn:
                    await self._suspend(worker, fault)
            case "kill-builder":
                return self._kill_builder(fault.target)
            case "kill-actor":
                return await self._kill_actor(fault.target, connector)
            case "reset-link" | "close-link":
                self._links[fault.target].cut(reset=fault.kind == "reset-link")
            case "block-link" | "slow-link":
                async with self._turns[fault.target]:
                    await self._hamper(self._links[fault.target], fault)
            case "full-ledger-disk":
                async with self._turns["ledger"]:
                    await self._fill(self._disks["ledger"], fault.secs)
            case "full-build-disk":
                async with self._turns["build"]:
                    await self._fill(self._disks["build"], fault.secs)
            case "lock-ledger":
                async with self._turns[""]:
                    return await self._lock_ledger(fault.secs)
            case _:
                assert_never(fault.kind)
        return True

    async def _hit(self, daemon: Daemon, fault: Fault, stop_secs: float) -> None:
        if fault.kind.startswith("kill"):
            await daemon.kill(fault.secs)
        elif fault.kind.startswith("stop"):
            await daemon.stop(fault.secs, stop_secs)
        else:
            await daemon.pause(fault.secs)

    async def _suspend(self, worker: Daemon, fault: Fault) -> None:
        """As a laptop that is closed: the worker stands still, and what it builds does too."""
        await worker.until_up()
        builders = self.builders(fault.target)
        for builder in builders:
            _signal(builder, signal.SIGSTOP)
        try:
            await worker.pause(fault.secs)
        finally:
            for builder in builders:
                _signal(builder, signal.SIGCONT)

    def _kill_builder(self, worker: str) -> bool:
        """As the kernel does for want of memory."""
        leaders = [p for p in self.builders(worker) if _is_leader(p)]
        for leader in leaders[:1]:
            _signal(leader, signal.SIGKILL)
        return bool(leaders)

    async def _kill_actor(self, actor: str, connector: Connector) -> bool:
        with trio.move_on_after(ASK_SECS):
            client: Client | None = None
            try:
                client = await connect(connector, self.endpoint, ASK_SECS)
                await client.ask(CmdKillActor(request=0, actor=actor), CmdDone, ASK_SECS)
            except (CommandError, ConnectionLost):
                return False
            finally:
                if client is not None:
                    client.close()
            return True
        return False

    async def _hamper(self, link: Link, fault: Fault) -> None:
        try:
            if fault.kind == "block-link":
                link.block()
            else:
                link.delay_secs = 0.3
            await trio.sleep(fault.secs)
        finally:
            link.unblock()
            link.delay_secs = 0.0

    async def _fill(self, disk: Disk, secs: float) -> None:
        try:
            with trio.move_on_after(secs), self._unwritable.for_a_while():
                while True:
                    await trio.to_thread.run_sync(disk.fill)
                    await trio.sleep(_FILL_AGAIN_SECS)
        finally:
            disk.free()

    async def _lock_ledger(self, secs: float) -> bool:
        held = await trio.to_thread.run_sync(ledger.lock, self.ledger_file)
        if held is None:
            return False
        try:
            with self._unwritable.for_a_while():
                await trio.sleep(secs)
        finally:
            held.close()
        return True

    # -- what is there ---------------------------------------------------------------------

    def builders(self, worker: str | None = None) -> list[psutil.Process]:
        """Processes of builds: of a worker, or of all."""
        builds = self.home / "build"
        marks = {str(builds / name / "builds") for name in self.workers if worker in (None, name)}
        return [p for p in psutil.process_iter() if _mark_of(p) in marks]

    def strays(self) -> list[str]:
        """Processes that are still there after the end."""
        own = psutil.Process()
        ours = {own.pid, *(parent.pid for parent in own.parents())}
        left = {p.pid: "a builder" for p in self.builders() if _lives(p)}
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or ()
            if process.pid not in ours and any(str(self.home) in word for word in words):
                left[process.pid] = " ".join(words)
        return [f"{pid}: {line}" for pid, line in left.items()]

    def end_strays(self) -> None:
        """After a run that was cut short: its builders may have nobody who ends them."""
        for builder in self.builders():
            _signal(builder, signal.SIGKILL)
        kill_within(self.home)

    def output(self, path: str) -> str | None:
        """The text at a store path; none unless it is valid."""
        store = DirectoryStore(self.store)
        if not store.is_valid(path):
            return None
        with suppress(OSError, UnicodeDecodeError):
            return store.entry(path).read_text()
        return None


class _Unwritable:
    """When a ledger could not be written, so that a server had every reason not to start."""

    def __init__(self) -> None:
        self._reasons = 0
        self._ended_at = -inf

    @contextmanager
    def for_a_while(self) -> Iterator[None]:
        self._reasons += 1
        try:
            yield
        finally:
            self._reasons -= 1
            self._ended_at = trio.current_time()

    def since(self, at: float) -> bool:
        """Whether it was so at any time since then."""
        return self._reasons > 0 or self._ended_at >= at


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _mark_of(process: psutil.Process) -> str | None:
    try:
        mark: str | None = process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None
    return mark


def _is_leader(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == process.pid
    except OSError:
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)
