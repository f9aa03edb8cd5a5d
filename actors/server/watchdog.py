"""A thread that ends the process when the event loop stands still.

A loop that is stuck in a call serves nobody and can be cured by nothing inside it; what it held is
in the ledger, so the best is a quick end and a new start. The thread counts its own looks and not
time: a process that was stopped, or a machine that slept, is not mistaken for a stalled loop.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

LOOK_EVERY_SECS = 1.0
MAX_LOOKS = 10
"""Without a beat in between; some 10 s."""
EXIT_CODE = 1


class Stall:
    """Counts looks since the last beat."""

    def __init__(self, limit: int = MAX_LOOKS) -> None:
        self._limit = limit
        self._beats = self._seen = 0
        self._looks = 0

    def beat(self) -> None:
        """The loop runs."""
        self._beats += 1

    def look(self) -> bool:
        """Whether the loop has stood still for too long."""
        if self._beats != self._seen:
            self._seen, self._looks = self._beats, 0
        else:
            self._looks += 1
        return self._looks >= self._limit


def _end() -> None:
    print(
        f"headrace: the event loop stood still for some {MAX_LOOKS * LOOK_EVERY_SECS:g} s and is "
        "ended; nothing that was confirmed is lost, start the server again",
        file=sys.stderr,
    )
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(EXIT_CODE)


@contextmanager
def watched(
    end: Callable[[], None] = _end, every: float = LOOK_EVERY_SECS, looks: int = MAX_LOOKS
) -> Iterator[Callable[[], None]]:
    """Watches while the block runs; gives what the loop must call, `beat`."""
    stall, over = Stall(looks), threading.Event()

    def look() -> None:
        while not over.wait(every):
            if stall.look():
                end()
                return

    thread = threading.Thread(target=look, name="watchdog")
    thread.start()
    try:
        yield stall.beat
    finally:
        over.set()
        thread.join()


async def beat_regularly(beat: Callable[[], None], every: float = LOOK_EVERY_SECS) -> None:
    """Beats while the loop runs."""
    while True:
        beat()
        await trio.sleep(every / 2)
