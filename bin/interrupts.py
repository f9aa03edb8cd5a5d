"""Commands that have much to clean up when they are stopped."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import trio

from bin.errors import CommandError

LATE_SIGNAL_SECS = 0.05


@asynccontextmanager
async def stopped_by_signals() -> AsyncIterator[trio.Nursery]:
    """A nursery whose block a signal cancels, and which then raises `CommandError`.

    Further signals are taken until the block has cleaned up, so that a second Ctrl-C does not
    cut that short.
    """
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_stop_on, signals)
                yield nursery
                nursery.cancel_scope.cancel()
        finally:
            await _swallow(signals)


async def _swallow(signals: AsyncIterator[int]) -> None:
    """Takes what came while all was cleaned up: Trio would raise it again at the end."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + LATE_SIGNAL_SECS):
        async for _ in signals:
            pass


async def _stop_on(signals: AsyncIterator[int]) -> NoReturn:
    number = await anext(signals)
    raise CommandError("stopped", 128 + number)
