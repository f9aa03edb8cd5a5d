"""The executor that builds with the real Nix.

Theory of operation. A Nix program takes 40 ms and more to start, so the processes live: each slot
has a `nix-store --serve --write` of its own for builds, and one for fetching from the binary cache
once something is missing (a process that has built never substitutes again); one more answers
scoring. What a build needs and makes is locked in its process, which makes it a root of the
garbage collector until the process ends; it is replaced after `MAX_BUILDS` builds, for the list of
these roots only grows.

A process whose answer nobody waits for any more is useless, so a job that is stopped ends its
slot's processes, and Nix, losing its client, ends the builder.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import TypeVar, TypeVarTuple

import psutil
import trio
from msgspec.structs import replace

from actors.nix import serve, wire
from actors.nix.cache import CacheFailed
from actors.nix.serve import BuildResult, PathInfo, ServeFailed, ServeProcess, Settings
from actors.nix.settings import BadKey, Nix, NixFailed, plain, show_config
from actors.worker.config import ConfigError, WorkerConfig
from actors.worker.executors.base import Built, Evaluated, Failed, JobContext
from actors.worker.executors.graphs import run_graph_file
from actors.worker.executors.nix_eval import NixEvaluator
from actors.worker.executors.nix_fetch import Fetcher
from actors.worker.executors.nix_repair import holds_all, put_back
from actors.worker.executors.nix_scoring import ValidPaths
from actors.worker.executors.nix_spec import basic_derivation
from actors.worker.executors.spec import BadSpec
from actors.worker.metrics import oom_kills
from transport import messages as m

MAX_BUILDS = 500
"""Of one process."""
MAX_LOG_BYTES = 64 * 2**20
_FIRST_SAMPLE_SECS, _SAMPLE_EVERY_SECS = 0.05, 0.5
_OVERTIME_SECS = 30
"""After a build's time limit, until Nix itself is taken to hang."""

_NOT_VALID = ("is not valid", "does not exist in the store", "dependency")
_UNFIT = ("is required to build",)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class NixExecutor:
    """Builds into the store of `nix`, reads and writes its cache."""

    fetches = True

    def __init__(self, nix: Nix, *, slots: int = 1, eval_memory_mb: int = 0) -> None:
        self._nix = nix
        self._eval_memory_mb = eval_memory_mb
        self._evaluator: NixEvaluator | None = None
        self._env: dict[str, str] = {}
        self._substitutes = False
        """Whether there is any cache to fetch from."""
        self._argv = serve.command(nix.store)
        self._idle: list[_Slot] = []
        self._valid = ValidPaths(self._argv, self._env, nix.cache)
        self._threads = trio.CapacityLimiter(slots + 1)

    @classmethod
    def of(cls, config: WorkerConfig) -> NixExecutor:
        """The executor of a configured worker. Raises `ConfigError`."""
        if shutil.which("nix-store") is None:
            raise ConfigError(
                "nix-store is not on PATH: install Nix, or start with --executor process"
            )
        nix = Nix(config.store, config.cache, config.cache_key)
        return cls(nix, slots=config.build_max_concurrent, eval_memory_mb=config.eval_max_memory_mb)

    def start(self) -> None:
        """Tries the store."""
        try:
            self._env.update(self._nix.environment())
            settings = show_config(self._env)
            self._substitutes = bool(settings.get("substituters"))
            self._evaluator = NixEvaluator(
                self._nix, self._env, str(settings["system"]), self._eval_memory_mb
            )
            self._valid.among([])
        except (BadKey, NixFailed, ServeFailed) as error:
            raise OSError(str(error)) from None

    async def close(self) -> None:
        """Ends all processes; nothing may run any more."""
        self._valid.close()
        while self._idle:
            await self._idle.pop().close()

    def score(self, candidates: Sequence[m.JobCandidate]) -> list[m.Score]:
        return self._valid.score(candidates)

    # -- builds ------------------------------------------------------------------------------------

    async def run_build(self, job: m.BuildJob, context: JobContext) -> Built | Failed:
        slot = self._idle.pop() if self._idle else _Slot(self._argv, self._env)
        is_whole = False
        try:
            outcome = await self._build(slot, job, context)
            is_whole = True
        except BadSpec as error:
            is_whole = True
            outcome = Failed("Permanent", str(error))
        except ServeFailed as error:
            outcome = Failed("Transient", str(error))
        finally:
            if is_whole and not slot.is_worn:
                self._idle.append(slot)
            else:
                await slot.close()
        return replace(outcome, spans=context.spans.done())

    async def _build(self, slot: _Slot, job: m.BuildJob, context: JobContext) -> Built | Failed:
        drv = basic_derivation(job)
        builder = await slot.builder()
        outputs = list(job.outputs.values())
        absent = await _missing(builder, outputs)
        trouble = None
        if absent and self._substitutes:
            trouble = await slot.fetcher.fetch(absent, _unheard)
            absent = await _missing(builder, absent)
        is_here = not absent
        metrics = None
        if not is_here:
            needed = [required.path for required in job.required_paths]
            needed += [job.drv_path] if drv is None else []
            failure = await self._prefetch(slot, builder, needed, context)
            if failure is not None:
                return failure
            with context.spans.phase("build"):
                limits = Settings(job.max_silent_secs, job.timeout_secs)
                if drv is not None:
                    request = serve.build_derivation(drv, limits)
                    reply = serve.derivation_built
                else:
                    wanted = f"{job.drv_path}!{','.join(job.outputs)}"
                    request = serve.build_paths([wanted], limits)
                    reply = serve.paths_built
                run = _Run(builder, context)
                result = await run.finish(request, reply(), job.timeout_secs)
            slot.builds += 1
            metrics = run.metrics
            failure = _failure_of(job, result, run)
            if failure is not None:
                return replace(failure, metrics=metrics)
        infos = {
            info.path: info
            for info in await builder.ask(serve.query_path_infos(outputs), serve.path_infos())
        }
        if unmade := [path for path in outputs if path not in infos]:
            return Failed("Permanent", f"the builder failed to produce output path {unmade[0]}")
        self._valid.add(outputs)
        is_doubtful = is_here or trouble is not None
        if failure := await self._upload(infos, context, is_doubtful=is_doubtful):
            return failure
        if metrics is not None:
            size = sum(infos[path].nar_size for path in outputs)
            metrics = replace(metrics, output_nar_size=size)
        made = {
            name: m.Output(path=path, nar_size=infos[path].nar_size, nar_hash=infos[path].nar_hash)
            for name, path in job.outputs.items()
        }
        return Built(made, substituted=is_here, metrics=metrics)

    async def _prefetch(
        self, slot: _Slot, builder: ServeProcess, needed: list[str], context: JobContext
    ) -> Failed | None:
        """Makes what the build needs valid; the failure names what could not be had."""
        missing = await _missing(builder, needed)
        if not missing:
            return None

        async def copying(paths: int) -> None:
            await context.advance_build("prefetch", paths_done=paths, paths_total=len(missing))

        with context.spans.phase("prefetch"):
            await context.advance_build("prefetch", paths_done=0, paths_total=len(missing))
            trouble = None
            if self._substitutes:
                trouble = await slot.fetcher.fetch(missing, copying)
            gone = await _missing(builder, missing)
            done = len(missing) - len(gone)
            await context.advance_build("prefetch", paths_done=done, paths_total=len(missing))
        here = set(missing) - set(gone)
        self._valid.add(here)
        self._valid.drop(gone)
        if not gone:
            return None
        why = f" ({trouble.text})" if trouble is not None else ""
        if trouble is not None and trouble.is_unreachable:
            return Failed("Transient", f"cannot fetch {gone[0]}{why}")
        return Failed("InputsUnavailable", f"{_named(gone)}{why}", missing_paths=gone)

    async def _upload(
        self, infos: dict[str, PathInfo], context: JobContext, *, is_doubtful: bool
    ) -> Failed | None:
        """Copies the outputs to the cache, where other workers find them.

        `is_doubtful`: the cache may list some of them already, and may have lost them.
        """
        cache, paths = self._nix.cache, list(infos)
        if cache is None:
            return None
        size = sum(info.nar_size for info in infos.values())
        with context.spans.phase("upload"):
            try:
                if is_doubtful and await self._in_thread(holds_all, cache, paths):
                    return None
                await context.advance_build("upload", bytes_done=0, bytes_total=size)
                done = await trio.run_process(
                    self._nix.copy_to_cache(paths), env=self._env, check=False,
                    capture_stderr=True, capture_stdout=True,
                )  # fmt: skip
                if done.returncode:
                    said = plain(done.stderr.decode(errors="replace"))
                    raise CacheFailed(said or f"exit code {done.returncode}")  # noqa: TRY301
                if is_doubtful:
                    await self._in_thread(put_back, self._nix, self._env, [*infos.values()])
            except CacheFailed as error:
                return Failed("Transient", f"cannot copy the outputs to {cache}: {error}")
            await context.advance_build("upload", bytes_done=size, bytes_total=size)
        return None

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(work, *args, limiter=self._threads)

    async def run_eval(self, job: m.EvalJob, context: JobContext) -> Evaluated | Failed:
        if job.source.kind == "graph-file":
            return await run_graph_file(job, context)
        assert self._evaluator is not None, "started"
        return await self._evaluator.run(job, context)


class _Slot:
    """The processes of one build at a time."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env
        self._builder: ServeProcess | None = None
        self.fetcher = Fetcher(argv, env)
        self.builds = 0

    @property
    def is_worn(self) -> bool:
        return self.builds >= MAX_BUILDS

    async def builder(self) -> ServeProcess:
        """The process for builds, a new one if it has ended. Raises `ServeFailed`."""
        if self._builder is not None:
            try:
                await _missing(self._builder, [])
            except ServeFailed:
                await self._builder.close()
                self._builder = None
        if self._builder is None:
            self._builder = await ServeProcess.start(self._argv, self._env)
        return self._builder

    async def close(self) -> None:
        """Ends the processes, a builder included; raises nothing."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fetcher.close)
                if self._builder is not None:
                    nursery.start_soon(self._builder.close)


class _Run:
    """One build in a process: its log, and what it uses."""

    def __init__(self, process: ServeProcess, context: JobContext) -> None:
        self._process = process
        self._context = context
        self._oom_kills = oom_kills()
        self._logged = 0
        self._peak = 0
        self.metrics = m.BuildMetrics()

    async def finish(
        self, request: bytes, reply: wire.Reply[BuildResult], timeout_secs: int
    ) -> BuildResult:
        """Raises `ServeFailed`."""
        started, cpu = time.monotonic(), _cpu_secs(self._process.pid)
        patience = timeout_secs + _OVERTIME_SECS if timeout_secs else inf
        result: BuildResult | None = None
        failure: ServeFailed | None = None
        with trio.move_on_after(patience):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sample)
                try:
                    result = await self._process.ask(request, reply, self._pass_on)
                except ServeFailed as error:
                    failure = error  # raised outside: a nursery would wrap it
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if result is None:
            raise ServeFailed(f"nix did not end the build {_OVERTIME_SECS} s after its time limit")
        self.metrics = m.BuildMetrics(
            peak_ram_mb=ceil(self._peak / 2**20) or None,
            cpu_time_ms=round(1000 * (_cpu_secs(self._process.pid) - cpu)),
            wall_time_ms=round(1000 * (time.monotonic() - started)),
        )
        return result

    @property
    def was_oom(self) -> bool:
        before, now = self._oom_kills, oom_kills()
        return before is not None and now is not None and now > before

    async def _sample(self) -> None:
        wait = _FIRST_SAMPLE_SECS
        while True:
            await trio.sleep(wait)
            wait = min(2 * wait, _SAMPLE_EVERY_SECS)
            rss = await trio.to_thread.run_sync(self._process.look_around)
            if rss > self._peak:
                self._peak = rss
                self._context.observe_peak(ceil(rss / 2**20))

    async def _pass_on(self, data: bytes) -> None:
        before, self._logged = self._logged, self._logged + len(data)
        if self._logged <= MAX_LOG_BYTES:
            await self._context.log(data)
        elif before <= MAX_LOG_BYTES:
            rest = f"\n[log limit of {MAX_LOG_BYTES} bytes reached, the rest is dropped]\n"
            await self._context.log(data[: MAX_LOG_BYTES - before] + rest.encode())


async def _missing(process: ServeProcess, paths: Sequence[str]) -> list[str]:
    """Which are not valid; the others stay while the process lives."""
    request = serve.query_valid_paths(paths, lock=True, substitute=False)
    valid = set(await process.ask(request, wire.strings()))
    return [path for path in paths if path not in valid]


async def _unheard(_: int) -> None:
    await trio.lowlevel.checkpoint()


def _failure_of(job: m.BuildJob, result: BuildResult, run: _Run) -> Failed | None:
    """What a build's result says. Statuses: spec of the serve protocol, see `actors.nix.serve`."""
    text = plain(result.error)
    match result.status:
        case serve.BUILT | serve.SUBSTITUTED | serve.ALREADY_VALID | serve.RESOLVES_TO_VALID:
            return None
        case serve.TIMED_OUT:
            if "of silence" in text:
                text = f"timed out after {job.max_silent_secs} s without output"
            else:
                text = f"timed out after {job.timeout_secs} s"
            return Failed("Timeout", text)
        case serve.TRANSIENT_FAILURE:
            return Failed("Transient", text)
        case serve.DEPENDENCY_FAILED | serve.NO_SUBSTITUTERS:
            return Failed("InputsUnavailable", text)
        case serve.MISC_FAILURE if any(word in text for word in _NOT_VALID):
            return Failed("InputsUnavailable", text)
        case serve.MISC_FAILURE if not any(word in text for word in _UNFIT):
            return Failed("Transient", text)
        case serve.PERMANENT_FAILURE if "failed due to signal 9" in text:
            if run.was_oom:
                run.metrics = replace(run.metrics, oom=True)
                return Failed("Transient", "the builder was killed for want of memory")
            return Failed("Transient", text)
        case _:
            return Failed("Permanent", text)


def _cpu_secs(pid: int) -> float:
    """Of the children that a process waited for."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))


def _named(missing: Sequence[str]) -> str:
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"neither in the store nor in a cache: {missing[0]}{rest}"
