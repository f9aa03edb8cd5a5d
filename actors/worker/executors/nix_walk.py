"""From the derivations asked for through all that they need, level by level.

What another evaluation has reported whole is not walked into.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import trio

from actors.graph.nix import as_job
from actors.graph.order import BadGraph
from actors.nix import aterm
from actors.nix.aterm import BadDerivation
from actors.nix.settings import Nix, plain, store_root
from actors.worker.executors.base import JobContext
from actors.worker.executors.graphs import as_derivation, batches
from actors.worker.executors.nix_eval_run import EvalFailed
from transport import messages as m

_COPIED_AT_ONCE = 500
"""Sources in one call of `nix copy`."""


class Walk:
    """One evaluation's; what it has seen it does not report again."""

    def __init__(self, nix: Nix, env: dict[str, str], context: JobContext) -> None:
        """Raises `BadStore`."""
        self._nix, self._env, self._context = nix, env, context
        self._root = store_root(nix.store)
        self._seen: set[str] = set()
        self._copied: set[str] = set()
        self._reported = 0
        self.warnings: list[str] = []
        self.refused: dict[str, str] = {}
        """Derivations that cannot be taken, and why. What needs them is reported nevertheless; the
        server fails it."""

    async def run(self, drv_paths: Iterable[str]) -> None:
        """Raises `BadGraph` for one too large, or `EvalFailed` if sources cannot be copied."""
        level = self._unseen(drv_paths)
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
            level = self._unseen(path for d in derivations for path in d.input_drvs)

    def _unseen(self, drv_paths: Iterable[str]) -> list[str]:
        return [path for path in dict.fromkeys(drv_paths) if path not in self._seen]

    def _read(self, drv_paths: Sequence[str]) -> list[m.Derivation]:
        found = []
        for path in drv_paths:
            try:
                found.append(as_derivation(as_job(path, aterm.parse(self._file(path)))))
            except (BadDerivation, BadGraph) as error:
                self.refused[path] = str(error)
        return found

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
