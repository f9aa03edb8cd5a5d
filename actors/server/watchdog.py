"""Ends a server whose loop stands still, or that does not come to its end.

A thread of its own counts its ticks since the loop last beat. Ticks, not seconds: while the
process is stopped (SIGSTOP, a suspended machine) the thread does not tick either, so neither
waking up nor a debugger ends a server that is well. Trio preempts nobody and a stuck call holds
its thread for ever, so the only remedy is to end the process; the ledger loses nothing by it.
"""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

import trio

STALL_TICKS, TICK_SECS = 10, 1.0
END_TICKS = 30
"""Ticks that all tasks and threads have to end once they were told to."""
_LAST_WORDS_SECS = 5.0


def end_process(line: str) -> None:
    """Prints the line and the stack of every thread to stderr, and exits with code 1.

    Does not return, even when nobody reads stderr.
    """
    # Whoever blocks on a full pipe must not keep us from the exit.
    last = threading.Timer(_LAST_WORDS_SECS, os._exit, (1,))
    last.daemon = True
    last.start()
    # Not through logging or sys.stderr: the loop's thread may hold their locks.
    os.write(2, f"headrace: {line}\n".encode())
    faulthandler.dump_traceback(2, all_threads=True)
    os._exit(1)


class Watchdog:
    """`with Watchdog() as watchdog:` around the loop, and `beat` as a task in it."""

    def __init__(
        self,
        end: Callable[[str], None] = end_process,
        *,
        tick_secs: float = TICK_SECS,
        stall_ticks: int = STALL_TICKS,
        end_ticks: int = END_TICKS,
    ) -> None:
        self._end = end
        self._tick_secs = tick_secs
        self._stall_ticks = stall_ticks
        self._end_ticks = end_ticks
        self._beats = 0
        self._is_beating = False
        self._is_ending = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    async def beat(self) -> None:
        """Shows that the loop turns, until cancelled; only meanwhile it is judged."""
        self._is_beating = True
        try:
            while True:
                self._beats += 1
                await trio.sleep(self._tick_secs)
        finally:
            self._is_beating = False

    def expect_end(self) -> None:
        """All tasks were told to end: the block must be left within `END_TICKS`."""
        self._is_ending = True

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen, still, ending = -1, 0, 0
        while not self._closed.wait(self._tick_secs):
            if self._is_beating and self._beats == seen:
                still += 1
            else:
                seen, still = self._beats, 0
            if still >= self._stall_ticks:
                seconds = self._stall_ticks * self._tick_secs
                self._end(f"the loop has stood still for {seconds:g} s; here is where:")
                return
            ending += self._is_ending
            if ending >= self._end_ticks:
                seconds = self._end_ticks * self._tick_secs
                self._end(f"not everything ended within {seconds:g} s; here is what runs:")
                return
