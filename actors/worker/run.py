"""Puts a worker together and runs it: `run_worker`."""

from __future__ import annotations

import fcntl
import importlib.metadata
import logging
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from actors.worker.config import ConfigError, ExecutorName, WorkerConfig, read_peers, worker_id
from actors.worker.core import CoreSettings, WorkerCore
from actors.worker.detect import detect
from actors.worker.disks import Disks
from actors.worker.executors.base import Executor
from actors.worker.executors.nix import NixExecutor, why_unusable
from actors.worker.executors.process import ProcessExecutor
from actors.worker.metrics import MachineMetrics
from actors.worker.shell import WorkerShell
from transport import messages as m
from transport.interface import Connector

log = logging.getLogger("headrace.worker")

_EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


async def run_worker(
    config: WorkerConfig,
    connector: Connector,
    *,
    executor: Executor | None = None,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> int:
    """Runs a worker until SIGTERM or SIGINT; both drain it, a second one ends it at once.

    Call it from the main thread. `executor` replaces the configured one.

    Returns:
        The exit code of the process.

    Raises:
        ConfigError: the worker cannot start so.
    """
    identity = worker_id(config)
    tokens = read_peers(config.peers_file)
    executor = make_executor(config) if executor is None else executor
    with (
        _sole_use(config.state_dir),
        trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
    ):
        stopper = _Stopper()
        failure: ConfigError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stopper.watch, signals, nursery.cancel_scope)
            try:
                announced = await trio.to_thread.run_sync(
                    _prepare, config, executor, abandon_on_cancel=True
                )
            except ConfigError as error:
                failure = error  # raised outside: a nursery would wrap it
            else:
                core = WorkerCore(
                    _settings(config, identity, tokens, announced, fetches=executor.fetches),
                    random.random,
                    trio.current_time(),
                )
                stopper.shell = WorkerShell(
                    core,
                    executor,
                    connector,
                    config.server,
                    MachineMetrics().read,
                    config.peers_file,
                    find_trouble=Disks(_written_to(config)).trouble,
                )
                log.info("worker %s, server %s", identity, config.server)
                task_status.started()
                try:
                    stopper.exit_code = await stopper.shell.run()
                finally:
                    with trio.CancelScope(shield=True):
                        await executor.close()
            nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return stopper.exit_code


def make_executor(config: WorkerConfig) -> Executor:
    """The configured executor.

    Raises:
        ConfigError: there is none of that name, or its settings do not fit.
    """
    if config.executor == "process":
        return ProcessExecutor.of(config)
    return NixExecutor.of(config)


def default_executor(store: str | None) -> ExecutorName:
    """`nix` where a Nix is installed that can use the store, else `process`."""
    if shutil.which("nix-store") is None:
        return "process"
    reason = why_unusable(store)
    if reason is None:
        return "nix"
    log.warning("Nix is installed and cannot be used (%s): --executor process", reason)
    return "process"


def _written_to(config: WorkerConfig) -> list[Path]:
    """Where jobs write."""
    store = Path(config.store or "/nix/store") if config.executor == "nix" or config.store else None
    return [config.state_dir, *([store] if store is not None and store.is_dir() else [])]


class _Stopper:
    """Turns signals into a drain, and the second one into an end."""

    def __init__(self) -> None:
        self.shell: WorkerShell | None = None
        self.exit_code = 0

    async def watch(self, signals: AsyncIterator[int], everything: trio.CancelScope) -> None:
        is_draining = False
        async for number in signals:
            name = signal.Signals(number).name
            self.exit_code = _EXIT_CODES[signal.Signals(number)]
            if self.shell is None or is_draining:
                log.warning("%s: stopping at once", name)
                everything.cancel()
                return
            log.info("%s: stopping; running jobs go back to the queue", name)
            is_draining = True
            await self.shell.drain(self.exit_code)


def _settings(
    config: WorkerConfig,
    identity: str,
    tokens: dict[str, str],
    announced: m.WorkerCapabilities,
    *,
    fetches: bool,
) -> CoreSettings:
    evaluates = config.eval_max_concurrent > 0
    return CoreSettings(
        worker_id=identity,
        capabilities=m.Capabilities(
            fetch=fetches and evaluates,
            eval=evaluates,
            build=config.build_max_concurrent > 0,
        ),
        announced=announced,
        max_builds=config.build_max_concurrent,
        max_evals=config.eval_max_concurrent,
        name=config.name,
        agent=_agent(),
        tokens=tokens,
    )


def _prepare(config: WorkerConfig, executor: Executor) -> m.WorkerCapabilities:
    try:
        executor.start()
    except OSError as error:
        raise ConfigError(f"the store cannot be used: {error}") from None
    return detect(config)


def _agent() -> str:
    try:
        return f"headrace/{importlib.metadata.version('headrace')}"
    except importlib.metadata.PackageNotFoundError:
        return "headrace"


@contextmanager
def _sole_use(state_dir: Path) -> Iterator[None]:
    """Two workers in one state directory would have one id and clean up each other's builds."""
    path = state_dir / "worker.lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot use the state directory {state_dir}: {error}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another worker runs in {state_dir}; give each its own --state-dir"
            ) from None
        yield
    finally:
        os.close(handle)
