"""Evaluations with the real Nix: attributes to `.drv` files, and from there to derivations.

Nix runs in a process group of its own with limits of time and memory; what it says is the job's
log. Derivations are reported level by level while the walk goes on, and what another evaluation
has reported whole is not walked into.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import inf
from pathlib import Path

import trio
from msgspec.structs import replace

from actors.graph.nix import as_job
from actors.graph.order import BadGraph
from actors.nix import aterm, evaluate
from actors.nix.aterm import BadDerivation
from actors.nix.evaluate import BadAttribute, Source
from actors.nix.settings import BadStore, Nix, plain, store_root
from actors.worker.executors.base import Evaluated, Failed, JobContext
from actors.worker.executors.graphs import as_derivation, batches
from actors.worker.executors.group import BuilderGroup, Ended, Limits
from transport import messages as m

MAX_LOG_BYTES = 16 * 2**20
_KEPT_LOG_BYTES = 2**20
_COPIED_AT_ONCE = 500
"""Sources in one call of `nix copy`."""
_MAX_TEXT = 32_000
"""Characters of one warning or error that are reported."""
_MAX_WARNINGS = 1_000


class EvalFailed(Exception):
    """Nix could not evaluate; the text is one line."""


class OutOfMemory(EvalFailed):
    """The evaluation took more memory than it may."""


class NixEvaluator:
    """Evaluates into the store of `nix`; at most `memory_mb` for one evaluation (0 = no limit)."""

    def __init__(self, nix: Nix, env: dict[str, str], system: str, memory_mb: int = 0) -> None:
        self._nix = nix
        self._env = env
        self._system = system
        self._memory_mb = memory_mb

    async def run(self, job: m.EvalJob, context: JobContext) -> Evaluated | Failed:
        with trio.move_on_after(job.timeout_secs or inf):
            try:
                source = self._source(job.source)
                with context.spans.phase("evaluate"):
                    await context.update(m.Evaluating())
                    outcome = await self._evaluate(source, job.attributes, context)
            except (BadAttribute, BadDerivation, BadGraph, BadStore, EvalFailed) as error:
                outcome = Failed("Permanent", str(error))
            return replace(outcome, spans=context.spans.done())
        return Failed("Timeout", f"the evaluation took more than {job.timeout_secs} s")

    def _source(self, source: m.EvalSource) -> Source:
        if source.kind == "nix-file":
            return evaluate.nix_file(source.ref)
        return evaluate.flake(source.ref, self._system)

    async def _evaluate(
        self, source: Source, attributes: Sequence[str], context: JobContext
    ) -> Evaluated | Failed:
        output, log = await self._nix_instantiate(evaluate.expand(source, attributes), context)
        warnings, _ = evaluate.messages(log)
        paths = evaluate.expanded(output)
        targets, errors, more = await self._instantiate(source, paths, context)
        warnings = list(dict.fromkeys([*warnings, *more]))[:_MAX_WARNINGS]
        if errors and not targets:
            await self._say(context, warnings, errors, {})
            return Failed("Permanent", errors[0])
        walk = _Walk(self._nix, self._env, context)
        await walk.run(dict.fromkeys(targets.values()))
        await self._say(context, [*warnings, *walk.warnings], errors, targets)
        return Evaluated()

    async def _say(
        self,
        context: JobContext,
        warnings: Sequence[str],
        errors: Sequence[str],
        targets: dict[str, str],
    ) -> None:
        told = m.EvalResult(
            derivations=[],
            warnings=[text[:_MAX_TEXT] for text in warnings],
            errors=[text[:_MAX_TEXT] for text in errors],
            targets=targets or None,
        )
        await context.update(told)

    async def _instantiate(
        self, source: Source, paths: Sequence[tuple[str, ...]], context: JobContext
    ) -> tuple[dict[str, str], list[str], list[str]]:
        """Drv paths by attribute, errors, warnings. Fails together, then one by one."""
        targets: dict[str, str] = {}
        errors: list[str] = []
        warnings: list[str] = []
        whole: list[Sequence[tuple[str, ...]]] = [paths] if paths else []
        while whole:
            some = whole.pop(0)
            try:
                output, log = await self._nix_instantiate(
                    evaluate.instantiate(source, some), context
                )
            except OutOfMemory:
                raise
            except EvalFailed as error:
                if len(some) > 1:
                    # Halves: of many attributes few are broken.
                    middle = len(some) // 2
                    whole[:0] = [some[:middle], some[middle:]]
                else:
                    name = evaluate.joined(some[0])
                    errors.append(f"{name}: {error}" if name else str(error))
                continue
            warnings += evaluate.messages(log)[0]
            found = evaluate.instantiated(output)
            if len(found) == len(some):
                names = [evaluate.joined(path) or "default" for path in some]
                targets.update(zip(names, found, strict=True))
            else:  # sets of derivations, or one under two names
                targets |= {drv.rpartition("/")[2].removesuffix(".drv")[33:]: drv for drv in found}
        return targets, errors, warnings

    async def _nix_instantiate(
        self, arguments: Sequence[str], context: JobContext
    ) -> tuple[bytes, bytes]:
        """Standard output and the end of standard error. Raises `EvalFailed`."""
        with tempfile.TemporaryDirectory(prefix="headrace-eval-") as name:
            directory = Path(name)
            log = bytearray()
            ended, is_too_large = await self._run(arguments, directory, log, context)
            output = (directory / "output").read_bytes()
        if is_too_large:
            raise OutOfMemory(f"the evaluation took more than {self._memory_mb} MiB of memory")
        if ended.returncode:
            _, error = evaluate.messages(bytes(log))
            raise EvalFailed(error or f"nix-instantiate ended with exit code {ended.returncode}")
        return output, bytes(log)

    async def _run(
        self, arguments: Sequence[str], directory: Path, log: bytearray, context: JobContext
    ) -> tuple[Ended, bool]:
        is_too_large = False
        scope = trio.CancelScope()

        async def keep(data: bytes) -> None:
            log.extend(data)
            del log[:-_KEPT_LOG_BYTES]
            await context.log(data)

        def measure(peak_bytes: int) -> None:
            nonlocal is_too_large
            context.observe_peak(peak_bytes // 2**20)
            if self._memory_mb and peak_bytes > self._memory_mb * 2**20:
                is_too_large = True
                scope.cancel()

        argv = ["/bin/sh", "-c", 'exec "$@" > output', "sh", "nix-instantiate",
                *self._nix.store_option, *arguments]  # fmt: skip
        group = await trio.to_thread.run_sync(BuilderGroup, argv, directory, self._env)
        ended = Ended(1, None, False, 0.0, 0.0, 0)
        with scope:
            ended = await group.finish(Limits(log_bytes=MAX_LOG_BYTES), keep, measure)
        return ended, is_too_large


class _Walk:
    """From the derivations asked for through all that they need, level by level."""

    def __init__(self, nix: Nix, env: dict[str, str], context: JobContext) -> None:
        self._nix, self._env, self._context = nix, env, context
        self._root = store_root(nix.store)
        self._seen: set[str] = set()
        self._copied: set[str] = set()
        self._reported = 0
        self.warnings: list[str] = []

    async def run(self, drv_paths: dict[str, None]) -> None:
        level = list(drv_paths)
        while level:
            self._seen.update(level)
            known: set[str] = set()
            for start in range(0, len(level), m.MAX_KNOWN_ASKED):
                known |= await self._context.known(level[start : start + m.MAX_KNOWN_ASKED])
            new = [path for path in level if path not in known]
            derivations = await trio.to_thread.run_sync(self._read, new, abandon_on_cancel=True)
            for start in range(0, len(derivations), _COPIED_AT_ONCE):
                some = derivations[start : start + _COPIED_AT_ONCE]
                await self._copy_sources(some)
                await self._report(some)
            inputs = dict.fromkeys(path for d in derivations for path in d.input_drvs)
            level = [path for path in inputs if path not in self._seen]

    def _read(self, drv_paths: Sequence[str]) -> list[m.Derivation]:
        return [as_derivation(as_job(path, aterm.parse(self._file(path)))) for path in drv_paths]

    def _file(self, drv_path: str) -> bytes:
        try:
            return Path(f"{self._root}{drv_path}").read_bytes()
        except OSError as error:
            raise BadDerivation(f"cannot read {drv_path}: {error.strerror}") from None

    async def _report(self, derivations: Sequence[m.Derivation]) -> None:
        for batch in batches(derivations):
            await self._context.update(m.EvalResult(batch, warnings=[], errors=[]))
            self._reported += len(batch)
            await self._context.advance_eval(self._reported)

    async def _copy_sources(self, derivations: Sequence[m.Derivation]) -> None:
        """Sources are only in this worker's store until they are in the cache."""
        sources = {path for d in derivations for path in d.input_srcs} - self._copied
        if not sources:
            return
        self._copied |= sources
        if self._nix.cache is None:
            if not self.warnings:
                self.warnings.append(
                    "without --cache the sources are only in the store of the worker that "
                    "evaluated: others cannot build what needs them"
                )
            return
        done = await trio.run_process(
            self._nix.copy_to_cache(sorted(sources)), env=self._env, check=False,
            capture_stderr=True, capture_stdout=True,
        )  # fmt: skip
        if done.returncode:
            said = plain(done.stderr.decode(errors="replace"))
            raise EvalFailed(f"cannot copy sources to {self._nix.cache}: {said}")
