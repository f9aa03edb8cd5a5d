"""The embedded executor: runs builders without Nix, in a store that is a plain directory.

Builders are not sandboxed, and hashes of fixed outputs are not checked: it is for trying
headrace out, for tests, and for builders that an operator trusts.

Inputs. Sources never get into this store, so an absent one says nothing. Outputs of other
derivations are built by this farm: in a store that the workers share, an absent one means that
the build cannot run (`InputsUnavailable`). A store that is one worker's own holds only what
this worker built; there the builder is tried, and only its failure is put down to the absence.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from typing import TypeVar, TypeVarTuple
from urllib.parse import unquote, urlsplit

import msgspec
import psutil
import trio
from msgspec import Struct

from actors.worker.config import ConfigError, WorkerConfig
from actors.worker.disks import is_full
from actors.worker.executors.base import Built, Evaluated, Failed, JobContext, score_candidates
from actors.worker.executors.graphs import run_graph_file
from actors.worker.executors.group import BuilderGroup, Ended, Limits
from actors.worker.executors.spec import (
    MARK,
    BadSpec,
    BuildSpec,
    environment,
    expected_inputs,
    read_spec,
)
from actors.worker.executors.store import (
    DirectoryStore,
    Relocation,
    StoreLock,
    remove_tree,
    tree_disk_bytes,
)
from actors.worker.signals import CannotListen, offered, remove_leftovers
from transport import messages as m

log = logging.getLogger("headrace.worker")

MAX_LOG_BYTES = 64 * 2**20
LOCK_WAIT_SECS = 3_600.0
"""For another build of the same outputs."""
_LOCK_POLL_SECS = 0.1
_CLEAN_UP_SECS = 1.0
# Whoever sends these, it is not the builder's own fault.
_OUTSIDE_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_PASSING_ERRORS = {errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE,
                   errno.ENFILE, errno.EIO}  # fmt: skip

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Running(Struct, frozen=True):
    """A builder that runs, the directory it runs in, and the lock on its outputs."""

    group: BuilderGroup
    directory: Path
    lock: StoreLock
    missing: list[str]
    """Inputs that are not in the store."""


class ProcessExecutor:
    """Builds in `builds`, a directory of this worker alone, into `store`."""

    fetches = False

    def __init__(
        self, store: DirectoryStore, builds: Path, *, slots: int = 1, is_shared: bool = True
    ) -> None:
        self._store = store
        self._builds = builds
        self._is_shared = is_shared
        # Threads for files and process starts; scoring has its own.
        self._threads = trio.CapacityLimiter(slots + 1)

    @classmethod
    def of(cls, config: WorkerConfig) -> ProcessExecutor:
        """The executor of a configured worker. Raises `ConfigError`."""
        own = config.state_dir / "store"
        directory = own if config.store is None else _directory(config.store)
        return cls(
            DirectoryStore(directory.absolute()),
            (config.state_dir / "builds").absolute(),
            slots=config.build_max_concurrent,
            is_shared=config.store is not None,
        )

    def start(self) -> None:
        """Ends builders that an earlier, killed worker left, and removes their directories."""
        self._store.open()
        self._builds.mkdir(mode=0o700, parents=True, exist_ok=True)
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self._builds):
                    process.kill()
            except (psutil.Error, OSError):
                continue
        for left in self._builds.iterdir():
            remove_tree(left)
        remove_leftovers(self._builds)

    def score(self, candidates: Sequence[m.JobCandidate]) -> list[m.Score]:
        return score_candidates(candidates, self._store.is_valid)

    # -- builds --------------------------------------------------------------------------

    async def run_build(self, job: m.BuildJob, context: JobContext) -> Built | Failed:
        relocate = Relocation(job.drv_path, self._store.directory)
        try:
            spec = read_spec(job, relocate)
        except BadSpec as error:
            return Failed("Permanent", str(error))
        try:
            async with offered(context.member, self._builds) as more:
                return await self._build(job, context, spec, relocate, more)
        except CannotListen as error:
            return Failed("Transient", str(error))

    async def _build(
        self,
        job: m.BuildJob,
        context: JobContext,
        spec: BuildSpec,
        relocate: Relocation,
        more: dict[str, str],
    ) -> Built | Failed:
        """`more` is added to the builder's environment."""
        begun = None
        with trio.move_on_after(LOCK_WAIT_SECS):
            while begun is None:
                begun = await self._in_thread(self._begin, job, spec, relocate, more)
                if begun is None:
                    await trio.sleep(_LOCK_POLL_SECS)
        if begun is None:
            outputs = ", ".join(job.outputs.values())
            return Failed("Transient", f"another build of {outputs} does not end")
        if not isinstance(begun, Running):
            return begun
        ended = None
        try:
            with context.spans.phase("build"):
                ended = await begun.group.finish(
                    Limits(job.timeout_secs, job.max_silent_secs, MAX_LOG_BYTES),
                    context.log,
                    lambda peak: context.observe_peak(_mb(peak)),
                )
        finally:
            if ended is None:
                with trio.move_on_after(_CLEAN_UP_SECS, shield=True):
                    await trio.to_thread.run_sync(
                        self._drop, job, begun, abandon_on_cancel=True, limiter=self._threads
                    )
        # The builder is done, whoever wants it stopped from here on.
        with trio.CancelScope(shield=True):
            outcome = await self._in_thread(self._conclude, job, begun, ended)
        return msgspec.structs.replace(outcome, spans=context.spans.done())

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(work, *args, limiter=self._threads)

    # -- the parts of a build that block -------------------------------------------------

    def _begin(
        self, job: m.BuildJob, spec: BuildSpec, relocate: Relocation, more: dict[str, str]
    ) -> Running | Built | Failed | None:
        """Starts the builder; none while another worker builds the very same outputs."""
        paths = list(job.outputs.values())
        try:
            if all(map(self._store.is_valid, paths)):
                return self._built(job, substituted=True)
            missing = [p for p in expected_inputs(job, spec) if not self._store.is_valid(p)]
            if missing and self._is_shared:
                return Failed("InputsUnavailable", _named(missing), missing_paths=missing)
            lock = self._store.try_lock(paths)
            if lock is None:
                return None
            begun: Running | Built | Failed | None = None
            try:
                begun = self._start(job, spec, relocate, more, lock, missing)
            finally:
                if not isinstance(begun, Running):
                    lock.release()
        except OSError as error:
            return Failed("Transient", f"cannot prepare the build: {error}")
        return begun

    def _start(
        self,
        job: m.BuildJob,
        spec: BuildSpec,
        relocate: Relocation,
        more: dict[str, str],
        lock: StoreLock,
        missing: list[str],
    ) -> Running | Built | Failed:
        # Somebody may have built them while we came for the lock.
        if all(map(self._store.is_valid, job.outputs.values())):
            return self._built(job, substituted=True)
        for path in job.outputs.values():
            self._store.discard(path)
        directory = Path(tempfile.mkdtemp(prefix="build-", dir=self._builds))
        builder = relocate(spec.builder or "")
        group = None
        try:
            env = environment(job, spec, relocate, directory, self._builds) | more
            argv = [builder, *map(relocate, spec.args)]
            disks = (directory, self._store.directory)
            group = BuilderGroup(argv, directory, env, lock.handles, disks)
        except OSError as error:
            kind: m.FailureKind = "Transient" if error.errno in _PASSING_ERRORS else "Permanent"
            return Failed(kind, f"cannot run the builder {builder}: {error.strerror}")
        except ValueError as error:
            return Failed("Permanent", f"cannot run the builder {builder}: {error}")
        finally:
            if group is None:
                remove_tree(directory)
        return Running(group, directory, lock, missing)

    def _conclude(self, job: m.BuildJob, build: Running, ended: Ended) -> Built | Failed:
        try:
            used = tree_disk_bytes(build.directory) + sum(
                tree_disk_bytes(self._store.entry(path)) for path in job.outputs.values()
            )
            metrics = _metrics(ended, used)
            failure = self._failure(job, build, ended)
            if failure is not None:
                self._discard_outputs(job)
                return msgspec.structs.replace(failure, metrics=metrics)
            sizes = [self._store.register(path) for path in job.outputs.values()]
            metrics = msgspec.structs.replace(metrics, output_nar_size=sum(sizes))
            return self._built(job, substituted=False, metrics=metrics)
        except OSError as error:
            return Failed("Transient", f"cannot register the outputs: {error}")
        finally:
            build.lock.release()
            _remove_quietly(build.directory)

    def _failure(self, job: m.BuildJob, build: Running, ended: Ended) -> Failed | None:
        failure = _failure_of(job, ended)
        if failure is None:
            for name, path in job.outputs.items():
                if not os.path.lexists(self._store.entry(path)):
                    text = f"the builder failed to produce output path {path} ({name})"
                    failure = Failed("Permanent", text)
        if failure is not None and failure.kind == "Permanent":
            # Room may have come back since.
            disks = (build.directory, self._store.directory)
            if ended.no_space or any(map(is_full, disks)):
                return Failed("Transient", f"no space left on the disk: {failure.error}")
            if build.missing:
                text = f"{failure.error}; {_named(build.missing)}"
                return Failed("InputsUnavailable", text, missing_paths=build.missing)
        return failure

    def _drop(self, job: m.BuildJob, build: Running) -> None:
        """Clears away after a build that was stopped."""
        try:
            self._discard_outputs(job)
        finally:
            build.lock.release()
            _remove_quietly(build.directory)

    def _discard_outputs(self, job: m.BuildJob) -> None:
        for path in job.outputs.values():
            try:
                self._store.discard(path)
            except OSError as error:
                log.warning("cannot remove the leftover %s: %s", path, error)

    def _built(
        self, job: m.BuildJob, *, substituted: bool, metrics: m.BuildMetrics | None = None
    ) -> Built:
        outputs = {
            name: m.Output(path=path, nar_size=self._store.nar_size(path))
            for name, path in job.outputs.items()
        }
        return Built(outputs, substituted=substituted, metrics=metrics)

    # -- evaluations ---------------------------------------------------------------------

    async def run_eval(self, job: m.EvalJob, context: JobContext) -> Evaluated | Failed:
        if job.source.kind != "graph-file":
            return Failed(
                "Permanent", f"evaluating a {job.source.kind} needs a worker with --executor nix"
            )
        return await run_graph_file(job, context)

    async def close(self) -> None:
        """Nothing outlives a build."""
        await trio.lowlevel.checkpoint()


def _failure_of(job: m.BuildJob, ended: Ended) -> Failed | None:
    """What the end of the builder alone says."""
    code = ended.returncode
    if ended.limit == "wall":
        return Failed("Timeout", f"timed out after {job.timeout_secs} s")
    if ended.limit == "silence":
        return Failed("Timeout", f"timed out after {job.max_silent_secs} s without output")
    if ended.oom:
        return Failed("Transient", "the builder was killed for want of memory")
    if code < 0:
        name = signal.Signals(-code).name
        kind: m.FailureKind = "Transient" if -code in _OUTSIDE_SIGNALS else "Permanent"
        return Failed(kind, f"the builder was killed by {name}")
    if code > 0:
        return Failed("Permanent", f"the builder failed with exit code {code}")
    return None


def _metrics(ended: Ended, disk_bytes: int) -> m.BuildMetrics:
    return m.BuildMetrics(
        peak_ram_mb=_mb(ended.peak_bytes),
        cpu_time_ms=round(ended.cpu_secs * 1000),
        wall_time_ms=round(ended.wall_secs * 1000),
        disk_bytes=disk_bytes,
        oom=ended.oom or None,
    )


def _mb(size: int) -> int:
    return ceil(size / 2**20)


def _named(missing: Sequence[str]) -> str:
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"not in the store: {missing[0]}{rest}"


def _remove_quietly(directory: Path) -> None:
    try:
        remove_tree(directory)
    except OSError as error:
        log.warning("cannot remove the build directory %s: %s", directory, error)


def _directory(store: str) -> Path:
    """A plain path or a `file://` URI."""
    parts = urlsplit(store)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return Path(unquote(parts.path))
    if not store or "://" in store:
        raise ConfigError(f"--store {store!r}: the process executor needs a directory")
    return Path(store)
