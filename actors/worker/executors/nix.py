"""The executor that builds with the real Nix.

Theory of operation. A Nix program takes 40 ms and more to start, so the processes live: each slot
has a `nix-store --serve --write` of its own for builds, and one for fetching from the binary cache
once something is missing (a process that has built never substitutes again); one more answers
scoring. What a build needs and makes is locked in its process, which makes it a root of the
garbage collector until the process ends; it is replaced after `MAX_JOBS` jobs, for the list of
these roots only grows.

A process whose answer nobody waits for any more is useless, so a job that is stopped ends its
slot's processes, and Nix, losing its client, ends the builder.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import TypeVar, TypeVarTuple

import trio
from msgspec import Struct
from msgspec.structs import replace

from actors.nix import serve, wire
from actors.nix.cache import CacheFailed
from actors.nix.serve import PathInfo, ServeFailed, ServeProcess, Settings
from actors.nix.settings import BadKey, Nix, NixFailed, plain, show_config
from actors.worker.config import ConfigError, WorkerConfig
from actors.worker.executors.base import Built, Evaluated, Failed, JobContext
from actors.worker.executors.graphs import run_graph_file
from actors.worker.executors.nix_eval import NixEvaluator
from actors.worker.executors.nix_fetch import Fetcher
from actors.worker.executors.nix_repair import holds_all, put_back
from actors.worker.executors.nix_run import Overtime, Run, failure_of
from actors.worker.executors.nix_scoring import ValidPaths
from actors.worker.executors.nix_spec import assumed_inputs, basic_derivation
from actors.worker.executors.nix_upload import Uploader
from actors.worker.executors.spec import BadSpec
from transport import messages as m

MAX_JOBS = 500
"""Of one process."""
MAX_REMEMBERED = 100_000
"""Outputs."""

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def why_unusable(store: str | None) -> str | None:
    """Why Nix cannot use a store, on one line; none if it can. Blocks for some 60 ms."""
    valid = ValidPaths(serve.command(store), Nix(store).environment())
    try:
        valid.among([])
    except ServeFailed as error:
        return str(error)
    finally:
        valid.close()
    return None


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
        self._done: dict[str, None] = {}
        """Outputs of the jobs it has done, the latest last."""
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
        slot = self._idle.pop() if self._idle else _Slot(self._nix, self._argv, self._env)
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
        slot.jobs += 1
        outputs = list(job.outputs.values())
        builder, absent = await slot.builder(outputs)
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
            if drv is not None and (assumed := assumed_inputs(job)):
                # Taken as built by whoever submitted the job: to be had, or not needed.
                await self._prefetch(slot, builder, assumed, context)
                lacking = set(await _missing(builder, assumed))
                here = [path for path in assumed if path not in lacking]
                drv = replace(drv, input_paths=[*drv.input_paths, *here])
            with context.spans.phase("build"):
                limits = Settings(job.max_silent_secs, job.timeout_secs)
                if drv is not None:
                    request = serve.build_derivation(drv, limits)
                    reply = serve.derivation_built
                else:
                    wanted = f"{job.drv_path}!{','.join(job.outputs)}"
                    request = serve.build_paths([wanted], limits)
                    reply = serve.paths_built
                run = Run(builder, job, context)
                try:
                    result = await run.finish(request, reply())
                except Overtime as error:
                    slot.is_broken = True
                    return Failed("Timeout", str(error), metrics=run.metrics)
            metrics = run.metrics
            failure = failure_of(job, result, run)
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
        # A job that comes back to who has done it: somebody could not use what is in the cache.
        is_suspect = is_here and all(path in self._done for path in outputs)
        doubts = _Doubts(is_doubtful, is_suspect)
        if failure := await self._upload(slot, builder, infos, context, doubts):
            return failure
        self._remember(outputs)
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
        missing = await _missing(builder, needed) if needed else []
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
        self,
        slot: _Slot,
        builder: ServeProcess,
        infos: dict[str, PathInfo],
        context: JobContext,
        doubts: _Doubts,
    ) -> Failed | None:
        """Copies the outputs to the cache, where other workers find them."""
        cache, paths = self._nix.cache, list(infos)
        if cache is None:
            return None
        size = sum(info.nar_size for info in infos.values())
        with context.spans.phase("upload"):
            try:
                if doubts.may_be_there and await self._in_thread(
                    holds_all, cache, paths, doubts.may_be_damaged
                ):
                    return None
                await context.advance_build("upload", bytes_done=0, bytes_total=size)
                if sign := self._nix.sign(paths):
                    await self._run(sign)
                if sign or not await slot.uploader.upload(builder, [*infos.values()]):
                    await self._run(self._nix.copy_to_cache(paths))
                if doubts.may_be_there:
                    found = [*infos.values()]
                    await self._in_thread(
                        put_back, self._nix, self._env, found, doubts.may_be_damaged
                    )
            except CacheFailed as error:
                return Failed("Transient", f"cannot copy the outputs to {cache}: {error}")
            await context.advance_build("upload", bytes_done=size, bytes_total=size)
        return None

    def _remember(self, outputs: Sequence[str]) -> None:
        self._done |= dict.fromkeys(outputs)
        while len(self._done) > MAX_REMEMBERED:
            del self._done[next(iter(self._done))]

    async def _run(self, command: Sequence[str]) -> None:
        """A Nix program to its end. Raises `CacheFailed`."""
        done = await trio.run_process(
            command, env=self._env, check=False, capture_stderr=True, capture_stdout=True
        )
        if done.returncode:
            said = plain(done.stderr.decode(errors="replace"))
            raise CacheFailed(said or f"{command[1]}: exit code {done.returncode}")

    async def _in_thread(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        return await trio.to_thread.run_sync(work, *args, limiter=self._threads)

    async def run_eval(self, job: m.EvalJob, context: JobContext) -> Evaluated | Failed:
        if job.source.kind == "graph-file":
            return await run_graph_file(job, context)
        assert self._evaluator is not None, "started"
        return await self._evaluator.run(job, context)


class _Doubts(Struct, frozen=True):
    """About what the cache has of the outputs of a build."""

    may_be_there: bool
    """It may list some, and may have lost them."""
    may_be_damaged: bool
    """Their files may be other than the entries say."""


class _Slot:
    """The processes of one build at a time."""

    def __init__(self, nix: Nix, argv: list[str], env: dict[str, str]) -> None:
        self._argv, self._env = argv, env
        self._builder: ServeProcess | None = None
        self.fetcher = Fetcher(argv, env)
        self.uploader = Uploader(nix, env)
        self.jobs = 0
        self.is_broken = False
        """Whether its process is busy with a build that nobody waits for."""

    @property
    def is_worn(self) -> bool:
        return self.is_broken or self.jobs >= MAX_JOBS

    async def builder(self, outputs: Sequence[str]) -> tuple[ServeProcess, list[str]]:
        """The process for builds, and which of these paths it says are not valid. A new process
        if the old one has ended. Raises `ServeFailed`."""
        if self._builder is not None:
            try:
                return self._builder, await _missing(self._builder, outputs)
            except ServeFailed:
                await self._builder.close()
        self._builder = None
        self._builder = await ServeProcess.start(self._argv, self._env)
        return self._builder, await _missing(self._builder, outputs)

    async def close(self) -> None:
        """Ends the processes, a builder included; raises nothing."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.fetcher.close)
                nursery.start_soon(self.uploader.close)
                if self._builder is not None:
                    nursery.start_soon(self._builder.close)


async def _missing(process: ServeProcess, paths: Sequence[str]) -> list[str]:
    """Which are not valid; the others stay while the process lives."""
    request = serve.query_valid_paths(paths, lock=True, substitute=False)
    valid = set(await process.ask(request, wire.strings()))
    return [path for path in paths if path not in valid]


async def _unheard(_: int) -> None:
    await trio.lowlevel.checkpoint()


def _named(missing: Sequence[str]) -> str:
    rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"neither in the store nor in a cache: {missing[0]}{rest}"
