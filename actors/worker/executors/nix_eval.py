"""Evaluations with the real Nix: attributes to `.drv` files, and from there to derivations.

Where nix-eval-jobs is installed, several processes evaluate at once, and derivations are reported
while they still do. What it gives no answer for, `nix-instantiate` evaluates; without it, all.
Programs run with limits of time and memory; what they say is the job's log.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from math import inf

import psutil
import trio
from msgspec.structs import replace

from actors.graph.order import BadGraph
from actors.nix import eval_jobs, evaluate
from actors.nix.aterm import BadDerivation
from actors.nix.eval_jobs import Line
from actors.nix.evaluate import BadAttribute, Source
from actors.nix.settings import BadStore, Nix
from actors.worker.executors.base import Evaluated, Failed, JobContext
from actors.worker.executors.nix_eval_run import EvalFailed, EvalRunner, OutOfMemory, Ran
from actors.worker.executors.nix_walk import Walk
from transport import messages as m

_MAX_TEXT = 32_000
"""Characters of one warning or error that are reported."""
_MAX_WARNINGS = 1_000

Paths = Sequence[tuple[str, ...]]


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
                    evaluation = _Evaluation(self._nix, self._env, source, self._memory_mb, context)
                    outcome = await evaluation.run(job.attributes)
            except (BadAttribute, BadDerivation, BadGraph, BadStore, EvalFailed) as error:
                outcome = Failed("Permanent", str(error))
            return replace(outcome, spans=context.spans.done())
        return Failed("Timeout", f"the evaluation took more than {job.timeout_secs} s")

    def _source(self, source: m.EvalSource) -> Source:
        if source.kind == "nix-file":
            return evaluate.nix_file(source.ref)
        return evaluate.flake(source.ref, self._system)


class _Evaluation:
    """One of them, and what has come of it so far."""

    def __init__(
        self, nix: Nix, env: dict[str, str], source: Source, memory_mb: int, context: JobContext
    ) -> None:
        self._nix, self._env, self._source, self._context = nix, env, source, context
        self._memory_mb = memory_mb
        self._runner = EvalRunner(env, memory_mb, context)
        self._walk = Walk(nix, env, context)
        self._targets: dict[str, str] = {}
        """Drv paths by attribute."""
        self._errors: list[str] = []
        self._warnings: list[str] = []

    async def run(self, attributes: Sequence[str]) -> Evaluated | Failed:
        text = evaluate.names(self._source, attributes)
        asked = await self._nix_instantiate(evaluate.EXPAND, {evaluate.FILE: text})
        self._warnings += evaluate.messages(asked.log)[0]
        paths: Paths = evaluate.expanded(asked.output)
        if paths and shutil.which(eval_jobs.PROGRAM, path=self._env.get("PATH")) is not None:
            paths = await self._in_parallel(paths)
        await self._one_process(paths)
        await self._walk.run(self._targets.values())
        self._drop_refused()
        await self._say()
        if self._errors and not self._targets:
            return Failed("Permanent", self._errors[0])
        return Evaluated()

    def _drop_refused(self) -> None:
        refused = dict(self._walk.refused)
        for name, path in list(self._targets.items()):
            if path in refused:
                self._errors.append(f"{name}: {refused[path]}")
                del self._targets[name]
        asked = {error.partition(": ")[2] for error in self._errors}
        self._errors += [error for error in refused.values() if error not in asked]

    async def _say(self) -> None:
        warnings = [*dict.fromkeys(self._warnings)][:_MAX_WARNINGS] + self._walk.warnings
        told = m.EvalResult(
            derivations=[],
            warnings=[text[:_MAX_TEXT] for text in warnings],
            errors=[text[:_MAX_TEXT] for text in self._errors],
            targets=self._targets or None,
        )
        await self._context.update(told)

    # -- nix-eval-jobs -----------------------------------------------------------------------------

    async def _in_parallel(self, paths: Paths) -> Paths:
        """Evaluates with nix-eval-jobs, and reports as it goes; what it did not answer for."""
        found: list[Line] = []

        async def take(lines: list[bytes]) -> None:
            new = [line for text in lines if (line := eval_jobs.read(text, paths)) is not None]
            found.extend(new)
            await self._walk.run(line.drv_path for line in new if line.drv_path)

        memory_mib = self._memory_mb or psutil.virtual_memory().total // 2**21
        command = eval_jobs.command(
            self._nix.store, self._env.get("NIX_PATH", ""),
            memory_mib, os.cpu_count() or 1,
        )  # fmt: skip
        ran = await self._runner.run(command, self._file(paths), take)
        self._warnings += evaluate.warnings_among(ran.log)
        left: set[int] = set()
        if ran.returncode:
            # It has ended early: of what is a set there may be more.
            left = set(range(len(paths))) - {line.number for line in found if not line.is_below}
        for line in sorted(found, key=lambda line: (line.number, line.name)):
            if line.number in left:
                continue
            if line.error:
                self._errors.append(f"{line.name}: {line.error}" if line.name else line.error)
            else:
                self._targets[line.name or "default"] = line.drv_path
        return [path for number, path in enumerate(paths) if number in left]

    def _file(self, paths: Paths) -> dict[str, str]:
        return {evaluate.FILE: evaluate.jobs(self._source, paths)}

    # -- nix-instantiate ---------------------------------------------------------------------------

    async def _one_process(self, paths: Paths) -> None:
        """All together; what fails by halves, until each that is broken was alone."""
        whole: list[Paths] = [paths] if paths else []
        while whole:
            some = whole.pop(0)
            try:
                arguments = evaluate.instantiate(range(len(some)))
                ran = await self._nix_instantiate(arguments, self._file(some))
            except OutOfMemory:
                raise
            except EvalFailed as error:
                if len(some) > 1:
                    middle = len(some) // 2
                    whole[:0] = [some[:middle], some[middle:]]
                else:
                    name = evaluate.joined(some[0])
                    self._errors.append(f"{name}: {error}" if name else str(error))
                continue
            self._warnings += evaluate.messages(ran.log)[0]
            found = evaluate.instantiated(ran.output)
            if len(found) == len(some):
                names = [evaluate.joined(path) or "default" for path in some]
                self._targets.update(zip(names, found, strict=True))
            else:  # sets of derivations, or one under two names
                self._targets |= {
                    drv.rpartition("/")[2].removesuffix(".drv")[33:]: drv for drv in found
                }

    async def _nix_instantiate(self, arguments: Sequence[str], files: dict[str, str]) -> Ran:
        """Raises `EvalFailed`."""
        command = ["nix-instantiate", *self._nix.store_option, *arguments]
        ran = await self._runner.run(command, files)
        if ran.returncode:
            _, error = evaluate.messages(ran.log)
            raise EvalFailed(error or f"nix-instantiate ended with exit code {ran.returncode}")
        return ran
