"""Following the status: a live view on a terminal, plain blocks anywhere else."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import trio
from rich.console import Console
from rich.live import Live

from bin import summary
from bin.client import Steady
from bin.output import note, say
from bin.summary import Status
from bin.view import render
from transport.messages import CmdStatus, CmdStatusReply

LIVE_SECS = 0.4
PLAIN_SECS = 1.0

IsOver = Callable[[Status], bool]


def is_terminal() -> bool:
    """Whether stdout can show a view that redraws itself."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


async def ask_status(steady: Steady) -> Status:
    """One status from the server."""
    return (await steady.ask(CmdStatus(request=0), CmdStatusReply)).status


async def follow(
    steady: Steady,
    *,
    is_over: IsOver = lambda _: False,
    interval: float | None = None,
    block: Callable[[Status], list[str]] | None = None,
) -> bool:
    """Show the status again and again, until it `is_over` or, on a terminal, somebody hits q.

    Returns whether it is over.

    Args:
        steady: whom to ask.
        is_over: judges each status.
        interval: seconds between two looks; LIVE_SECS or PLAIN_SECS when not given.
        block: the lines to print where there is no terminal; a dated summary when not given.
    """
    if is_terminal():
        return await _follow_live(steady, is_over, LIVE_SECS if interval is None else interval)
    pause = PLAIN_SECS if interval is None else interval
    await _follow_plain(steady, is_over, pause, block or _dated)
    return True


async def _follow_plain(
    steady: Steady, is_over: IsOver, interval: float, block: Callable[[Status], list[str]]
) -> None:
    key: object = None
    said: list[str] = []
    while True:
        status = await ask_status(steady)
        if summary.change_key(status) != key:
            key = summary.change_key(status)
            # Not every change shows in every kind of block.
            if (lines := block(status)) != said:
                said = lines
                say("\n".join(lines))
        if is_over(status):
            return
        await trio.sleep(interval)


def _dated(status: Status) -> list[str]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    first, *rest = summary.lines(status)
    return [f"{now} {first}", *rest, ""]


async def _follow_live(steady: Steady, is_over: IsOver, interval: float) -> bool:
    over = False
    console = Console()
    # Its own refresh thread would draw between our updates; redirection is for printing code.
    live = Live(
        console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
        vertical_overflow="crop",
    )  # fmt: skip
    with _keys() as key_pressed, live:
        steady.notice = lambda text: console.print(text, markup=False, highlight=False)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_until_quit, key_pressed, nursery.cancel_scope)
                while not over:
                    status = await ask_status(steady)
                    width, height = console.size
                    live.update(render(status, width, height - 1), refresh=True)
                    over = is_over(status)
                    await trio.sleep(0 if over else interval)
                nursery.cancel_scope.cancel()
        finally:
            steady.notice = note
    return over


async def _until_quit(key_pressed: Callable[[], Awaitable[bytes]], scope: trio.CancelScope) -> None:
    while b"q" not in (await key_pressed()).lower():
        pass
    scope.cancel()


@contextmanager
def _keys() -> Iterator[Callable[[], Awaitable[bytes]]]:
    """Reads the keyboard without waiting for a line; gives nothing where that cannot be."""
    fd = _keyboard()
    if fd is None:
        yield _no_key
        return

    async def key_pressed() -> bytes:
        await trio.lowlevel.wait_readable(fd)
        data = os.read(fd, 64)
        if not data:  # hung up: it would be readable for ever
            await trio.sleep_forever()
        return data

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield key_pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def _no_key() -> bytes:
    await trio.sleep_forever()


def _keyboard() -> int | None:
    """Stdin's number if it is a terminal that we may read: a job in the background may not."""
    try:
        fd = sys.stdin.fileno()
        return fd if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError):
        return None
