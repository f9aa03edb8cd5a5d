"""One program of an evaluation: in a process group of its own, with its limit of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import trio
from msgspec import Struct

from actors.graph.order import BadGraph
from actors.nix.aterm import BadDerivation
from actors.worker.executors.base import JobContext
from actors.worker.executors.group import BuilderGroup, Ended, Limits

MAX_LOG_BYTES = 16 * 2**20
_KEPT_LOG_BYTES = 2**20
_LOOK_EVERY_SECS = 0.2
_READ_BYTES = 2**20

OnLines = Callable[[list[bytes]], Awaitable[None]]


class EvalFailed(Exception):
    """Nix could not evaluate; the text is one line."""


class OutOfMemory(EvalFailed):
    """The evaluation took more memory than it may."""


class Ran(Struct, frozen=True):
    """A program that came to its end."""

    returncode: int
    output: bytes
    """Standard output, unless its lines were taken while it ran."""
    log: bytes
    """The end of standard error."""


class EvalRunner:
    """Runs the programs of one evaluation, at most `memory_mb` each (0 = no limit)."""

    def __init__(self, env: dict[str, str], memory_mb: int, context: JobContext) -> None:
        self._env = env
        self._memory_mb = memory_mb
        self._context = context

    async def run(
        self,
        command: Sequence[str],
        files: dict[str, str],
        on_lines: OnLines | None = None,
    ) -> Ran:
        """Runs it in a new directory with these files.

        `on_lines` gets its output while it runs; what it raises ends the program.

        Raises:
            OutOfMemory: it took too much.
        """
        with tempfile.TemporaryDirectory(prefix="headrace-eval-") as name:
            directory, log = Path(name), bytearray()
            for file, text in files.items():
                (directory / file).write_text(text)
            output = directory / "output"
            output.touch()
            ended, is_too_large = await self._group(command, output, log, on_lines)
            if is_too_large:
                raise OutOfMemory(f"the evaluation took more than {self._memory_mb} MiB of memory")
            told = b"" if on_lines is not None else output.read_bytes()
        return Ran(ended.returncode, told, bytes(log))

    async def _group(
        self, command: Sequence[str], output: Path, log: bytearray, on_lines: OnLines | None
    ) -> tuple[Ended, bool]:
        is_too_large = False
        scope = trio.CancelScope()

        async def keep(data: bytes) -> None:
            log.extend(data)
            del log[:-_KEPT_LOG_BYTES]
            await self._context.log(data)

        def measure(peak_bytes: int) -> None:
            nonlocal is_too_large
            self._context.observe_peak(peak_bytes // 2**20)
            if self._memory_mb and peak_bytes > self._memory_mb * 2**20:
                is_too_large = True
                scope.cancel()

        argv = ["/bin/sh", "-c", 'exec "$@" > output', "sh", *command]
        group = await trio.to_thread.run_sync(BuilderGroup, argv, output.parent, self._env)
        ended = Ended(1, None, False, 0.0, 0.0, 0)
        has_ended = trio.Event()
        failure: Exception | None = None

        async def finish() -> None:
            nonlocal ended
            with scope:
                ended = await group.finish(Limits(log_bytes=MAX_LOG_BYTES), keep, measure)
            has_ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(finish)
            if on_lines is not None:
                try:
                    await _follow(output, has_ended, on_lines)
                except (BadDerivation, BadGraph, EvalFailed) as error:
                    failure = error  # raised outside: a nursery would wrap it
                    nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return ended, is_too_large


async def _follow(output: Path, has_ended: trio.Event, on_lines: OnLines) -> None:
    """Passes on whole lines as they come, and the rest at the end."""
    rest = b""
    with output.open("rb") as file:
        while True:
            is_over = has_ended.is_set()
            if data := file.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                await on_lines(lines)
            elif is_over:
                break
            else:
                with trio.move_on_after(_LOOK_EVERY_SECS):
                    await has_ended.wait()
    if rest:
        await on_lines([rest])
