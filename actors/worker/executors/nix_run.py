"""One build in a serve process: its log, its limits, what it uses, and what its end means."""

from __future__ import annotations

import time
from math import ceil, inf

import trio
from msgspec.structs import replace

from actors.nix import serve, wire
from actors.nix.serve import BuildResult, ServeFailed, ServeProcess
from actors.nix.settings import plain
from actors.worker.executors.base import Failed, JobContext
from actors.worker.metrics import oom_kills
from transport import messages as m

MAX_LOG_BYTES = 64 * 2**20
OVERTIME_SECS = 5.0
"""After a build's limit, until the worker ends what Nix should have ended: a Nix daemon does not
hear of the limits of serve's clients."""
_FIRST_SAMPLE_SECS, _SAMPLE_EVERY_SECS = 0.05, 0.5
_NOT_VALID = ("is not valid", "does not exist in the store", "dependency")
_UNFIT = ("is required to build", "experimental Nix feature", "has an unsupported type")
_LOG_TAIL = "; last "  # "N log lines: ...", which the log has


class Overtime(Exception):
    """The build went on beyond its limit; the text says which."""


class Run:
    """One build in a process."""

    def __init__(self, process: ServeProcess, job: m.BuildJob, context: JobContext) -> None:
        self._process = process
        self._job = job
        self._context = context
        self._oom_kills = oom_kills()
        self._logged = 0
        self._peak = 0
        self._wall = trio.CancelScope()
        self._silence = trio.CancelScope()
        self.metrics = m.BuildMetrics()

    async def finish(self, request: bytes, reply: wire.Reply[BuildResult]) -> BuildResult:
        """Raises `ServeFailed`, or `Overtime`, after which the process is useless."""
        started, cpu = time.monotonic(), self._process.waited_cpu_secs()
        self._wall.deadline = trio.current_time() + _patience(self._job.timeout_secs)
        self._silence.deadline = trio.current_time() + _patience(self._job.max_silent_secs)
        result: BuildResult | None = None
        failure: ServeFailed | None = None
        with self._wall, self._silence:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sample)
                try:
                    result = await self._process.ask(request, reply, self._pass_on)
                except ServeFailed as error:
                    failure = error  # raised outside: a nursery would wrap it
                nursery.cancel_scope.cancel()
        self.metrics = m.BuildMetrics(
            peak_ram_mb=ceil(self._peak / 2**20) or None,
            cpu_time_ms=round(1000 * (self._process.waited_cpu_secs() - cpu)) or None,
            wall_time_ms=round(1000 * (time.monotonic() - started)),
        )
        if failure is not None:
            raise failure
        if result is None:
            raise Overtime(_timed_out(self._job, is_silent=self._silence.cancelled_caught))
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
        # The server may be slow to take it; that is not the builder's time.
        begun, self._silence.deadline = trio.current_time(), inf
        before, self._logged = self._logged, self._logged + len(data)
        if self._logged <= MAX_LOG_BYTES:
            await self._context.log(data)
        elif before <= MAX_LOG_BYTES:
            rest = f"\n[log limit of {MAX_LOG_BYTES} bytes reached, the rest is dropped]\n"
            await self._context.log(data[: MAX_LOG_BYTES - before] + rest.encode())
        now = trio.current_time()
        self._wall.deadline += now - begun
        self._silence.deadline = now + _patience(self._job.max_silent_secs)


def _patience(limit_secs: int) -> float:
    return limit_secs + OVERTIME_SECS if limit_secs else inf


def failure_of(job: m.BuildJob, result: BuildResult, run: Run) -> Failed | None:
    """What a build's result says; none of success."""
    text = plain(result.error).partition(_LOG_TAIL)[0].removeprefix("error: ")
    match result.status:
        case serve.BUILT | serve.SUBSTITUTED | serve.ALREADY_VALID | serve.RESOLVES_TO_VALID:
            return None
        case serve.TIMED_OUT:
            return Failed("Timeout", _timed_out(job, is_silent="of silence" in text))
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


def _timed_out(job: m.BuildJob, *, is_silent: bool) -> str:
    if is_silent:
        return f"timed out after {job.max_silent_secs} s without output"
    return f"timed out after {job.timeout_secs} s"
