"""A `headrace` process that is kept running, whatever is done to it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import trio

from bin.children import Child, start

_START_PAUSE_SECS = 0.3
_POLL_SECS = 0.03


class Daemon:
    """Run `keep`; everything else is done to what it keeps.

    Faults of one process take turns: each holds `turn` until the process is as it was.
    """

    def __init__(
        self,
        name: str,
        arguments: Callable[[], Sequence[str]],
        log: Path,
        *,
        ready_text: str,
        complain: Callable[[str], None],
        may_fail_to_start: Callable[[float], bool] = lambda _: False,
    ) -> None:
        """It is up once it has logged `ready_text`. `complain` is told in one line of every end
        that nobody asked for, but for that of a process which never came up and was started at
        a time for which `may_fail_to_start` is true."""
        self.name = name
        self.turn = trio.Lock()
        self.restarts = 0
        self._arguments = arguments
        self._log = log
        self._ready_text = ready_text.encode()
        self._complain = complain
        self._may_fail_to_start = may_fail_to_start
        self._child: Child | None = None
        self._up = trio.Event()
        self._down_secs: float | None = None

    @property
    def pid(self) -> int | None:
        """None while it is down."""
        return None if self._child is None else self._child.pid

    async def keep(self) -> NoReturn:
        """Starts it again each time that it ends, until cancelled."""
        while True:
            self._down_secs = None
            started = trio.current_time()
            said = self._log.stat().st_size if self._log.exists() else 0
            self._child = child = await start(self.name, self._arguments(), self._log)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch_start, said)
                await child.wait()
                nursery.cancel_scope.cancel()
            self._child = None
            was_up = self._up.is_set()
            if was_up:  # who waits for a start that failed waits for the next
                self._up = trio.Event()
            if self._down_secs is None and (was_up or not self._may_fail_to_start(started)):
                self._complain(child.obituary())
            self.restarts += 1
            await trio.sleep(_START_PAUSE_SECS if self._down_secs is None else self._down_secs)

    async def _watch_start(self, offset: int) -> None:
        with self._log.open("rb") as log:
            while True:
                log.seek(offset)
                if self._ready_text in log.read():
                    break
                await trio.sleep(_POLL_SECS)
        self._up.set()

    async def until_up(self) -> None:
        """Waits until the present or the next incarnation is ready."""
        await self._up.wait()

    async def kill(self, down_secs: float) -> None:
        """SIGKILL; returns when it is back."""
        await self._end(signal.SIGKILL, down_secs)

    async def stop(self, down_secs: float, limit_secs: float) -> None:
        """SIGTERM, after which it must end with code 0 within the limit; returns when it is
        back."""
        await self._end(signal.SIGTERM, down_secs, limit_secs)

    async def _end(self, number: signal.Signals, down_secs: float, limit: float = 60.0) -> None:
        await self.until_up()
        child = self._child
        if child is None:
            return
        self._down_secs = down_secs
        child.signal(number)
        with trio.move_on_after(limit) as scope:
            code = await child.wait()
            if number == signal.SIGTERM and code != 0:
                self._complain(child.obituary())
        if scope.cancelled_caught:
            self._complain(f"{self.name} did not end within {limit:g} s after {number.name}")
            child.signal(signal.SIGKILL)
            await child.wait()
        await self._until_next(child)

    async def _until_next(self, last: Child) -> None:
        while self._child is None or self._child is last:
            await trio.sleep(_POLL_SECS)
        await self.until_up()

    async def pause(self, secs: float) -> None:
        """SIGSTOP, and SIGCONT after some time."""
        await self.until_up()
        child = self._child
        if child is None:
            return
        child.signal(signal.SIGSTOP)
        try:
            await trio.sleep(secs)
        finally:
            child.signal(signal.SIGCONT)

    async def finish(self, limit_secs: float) -> None:
        """Ends it for good, in order if that is possible; cancel `keep` first."""
        child, self._child = self._child, None
        if child is None:
            return
        child.signal(signal.SIGCONT)
        code = await child.stop(limit_secs)
        if code != 0:
            self._complain(child.obituary())
