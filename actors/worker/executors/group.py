"""One builder as a process group: its output, its limits, what it used, and its end.

The builder leads a session of its own, so that all that it starts can be found and ended.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Literal

import trio
from msgspec import Struct

from actors.worker.disks import is_full
from actors.worker.metrics import oom_kills, session_members, session_rss

READ_BYTES = 2**16
_GATHER_SECS = 0.1  # small pieces of output within this time become one
_SAMPLE_EVERY_SECS = 0.5
_TERM_GRACE_SECS = 1.0
_KILL_LIMIT_SECS = 2.0
_NO_SPACE = os.strerror(errno.ENOSPC).encode()
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024

Limit = Literal["wall", "silence"] | None


class Limits(Struct, frozen=True):
    """Seconds, bytes; 0 is no limit."""

    wall_secs: float = 0
    silent_secs: float = 0
    log_bytes: int = 0


class Ended(Struct, frozen=True):
    """How a builder ended and what it used."""

    returncode: int
    """Of the builder itself; negative: the signal that ended it."""
    limit: Limit
    """The limit that it was ended for."""
    oom: bool
    wall_secs: float
    cpu_secs: float
    """Of the builder and all its children that it waited for."""
    peak_bytes: int
    no_space: bool = False
    """It said that a disk was full, or one was seen to be while it ran."""


class BuilderGroup:
    """A started builder. Run `finish` to its end, or the processes stay."""

    def __init__(
        self,
        argv: Sequence[str],
        directory: Path,
        env: Mapping[str, str],
        inherits: Collection[int] = (),
        writes_to: Sequence[Path] = (),
    ) -> None:
        """Starts it; output and errors go into one pipe. Blocks, so call it in a thread.

        It gets the descriptors `inherits` besides. Whether there is room where it `writes_to`
        is looked at from time to time.

        Raises:
            OSError: it cannot be executed.
            ValueError: an argument or variable holds a NUL.
        """
        self._oom_kills = oom_kills()
        self._started = time.monotonic()
        self._output, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the derivation's own builder
                argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                cwd=directory,
                env=dict(env),
                start_new_session=True,
                pass_fds=inherits,
            )
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(self._output, False)
        self.pid = self._process.pid
        self._exited = trio.Event()
        self._waiting = trio.CancelScope()
        self._peak = 0
        self._logged = 0
        self._last = b""
        self._writes_to = writes_to
        self._no_space = any(map(is_full, writes_to))

    async def finish(
        self,
        limits: Limits,
        on_log: Callable[[bytes], Awaitable[None]],
        on_peak: Callable[[int], None],
    ) -> Ended:
        """Waits for the end, passing on output and the peak of memory in bytes.

        Ends the whole session for a limit, or when cancelled; nothing of it runs afterwards.
        """
        limit: Limit = None
        wall = trio.move_on_after(limits.wall_secs or inf)
        silence = trio.CancelScope()
        try:
            with wall, silence:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._sample, on_peak)
                    nursery.start_soon(self._pump, limits, silence, on_log)
                    await self._wait()
                    # The rest of the output may take its time to the server.
                    wall.deadline = silence.deadline = inf
                    self._exited.set()
                    self._waiting.cancel()
                    # What it left behind in its group ends with it.
                    self._signal_group(signal.SIGKILL)
            if not self._exited.is_set():
                limit = "wall" if wall.cancelled_caught else "silence"
        finally:
            if not self._exited.is_set():
                with trio.CancelScope(shield=True):
                    await self._end_session()
            ended = self._reap(limit)
        return ended

    # -- while it runs -------------------------------------------------------------------

    async def _wait(self) -> None:
        """Until the builder itself is a zombie; its group stays addressable until `_reap`."""
        if hasattr(os, "pidfd_open"):
            handle = os.pidfd_open(self.pid)
            try:
                await trio.lowlevel.wait_readable(handle)
            finally:
                os.close(handle)
        else:
            await trio.to_thread.run_sync(self._wait_blocking, abandon_on_cancel=True)

    def _wait_blocking(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    async def _pump(
        self,
        limits: Limits,
        silence: trio.CancelScope,
        on_log: Callable[[bytes], Awaitable[None]],
    ) -> None:
        """Reads no faster than `on_log` takes it: a chatty builder waits in its `write`."""
        patience = limits.silent_secs or inf
        while True:
            if not self._exited.is_set():
                silence.deadline = trio.current_time() + patience
            data = await self._read()
            silence.deadline = inf  # the server may be slow; that is not the builder's silence
            if not data:
                return
            self._no_space = self._no_space or _NO_SPACE in self._last + data
            self._last = data[-len(_NO_SPACE) :]
            await self._pass_on(data, limits.log_bytes, on_log)
            if len(data) < READ_BYTES:
                with trio.move_on_after(_GATHER_SECS):
                    await self._exited.wait()

    async def _read(self) -> bytes:
        """Some output; empty at its end, or when nothing waits and the builder is gone."""
        while True:
            try:
                return os.read(self._output, READ_BYTES)
            except BlockingIOError:
                if self._exited.is_set():
                    return b""
            with trio.CancelScope() as self._waiting:
                await trio.lowlevel.wait_readable(self._output)

    async def _pass_on(
        self, data: bytes, most: int, on_log: Callable[[bytes], Awaitable[None]]
    ) -> None:
        before, self._logged = self._logged, self._logged + len(data)
        if not most or self._logged <= most:
            await on_log(data)
        elif before <= most:
            rest = f"\n[log limit of {most} bytes reached, the rest is dropped]\n"
            await on_log(data[: most - before] + rest.encode())

    async def _sample(self, on_peak: Callable[[int], None]) -> None:
        while not self._exited.is_set():
            with trio.move_on_after(_SAMPLE_EVERY_SECS):
                await self._exited.wait()
                return
            rss = await trio.to_thread.run_sync(self._look)
            if rss > self._peak:
                self._peak = rss
                on_peak(rss)

    def _look(self) -> int:
        """Bytes of memory that it has now."""
        self._no_space = self._no_space or any(map(is_full, self._writes_to))
        return session_rss(self.pid)

    # -- its end -------------------------------------------------------------------------

    async def _end_session(self) -> None:
        self._signal_group(signal.SIGTERM)
        with trio.move_on_after(_TERM_GRACE_SECS):
            await self._wait()
        # Also those that left the group but not the session.
        for pid in session_members(self.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        self._signal_group(signal.SIGKILL)
        with trio.move_on_after(_KILL_LIMIT_SECS):
            await self._wait()

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return

    def _reap(self, limit: Limit) -> Ended:
        os.close(self._output)
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        # Not even SIGKILL ends what hangs in the kernel.
        code = os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL
        self._process.returncode = code
        return Ended(
            returncode=code,
            limit=limit,
            oom=limit is None and self._was_oom(code),
            wall_secs=time.monotonic() - self._started,
            cpu_secs=usage.ru_utime + usage.ru_stime,
            # Of a builder too short to be sampled; an upper bound, it starts as a copy of us.
            peak_bytes=self._peak or usage.ru_maxrss * _MAXRSS_BYTES,
            no_space=self._no_space,
        )

    def _was_oom(self, code: int) -> bool:
        if code not in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return False
        before, now = self._oom_kills, oom_kills()
        return before is not None and now is not None and now > before
