"""Runs the asynchronous part of a command, with the means to connect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from bin.errors import CommandError
from bin.options import Target
from transport.adapter import Context
from transport.curve import KeyFileError, KeyPair, load, load_public
from transport.interface import Connector
from transport.zmq_sockets import ZmqConnector

T = TypeVar("T")


def run(target: Target, work: Callable[[Connector], Awaitable[T]]) -> T:
    """Run `work` to its end; Ctrl-C interrupts it where it waits, and it cleans up."""

    async def session() -> T:
        async with connecting(target) as connector:
            return await work(connector)

    return trio.run(session, restrict_keyboard_interrupt_to_checkpoints=True)


@asynccontextmanager
async def connecting(target: Target) -> AsyncIterator[Connector]:
    """The means to connect for the length of a block, with the keys of `target`.

    Raises `CommandError` when a key file cannot be used.
    """
    server_key, keys = _keys(target)
    async with Context() as context:
        yield ZmqConnector(context, server_key, keys)


def _keys(target: Target) -> tuple[str | None, KeyPair | None]:
    try:
        return (
            None if target.server_key is None else load_public(target.server_key),
            None if target.key is None else load(target.key),
        )
    except KeyFileError as error:
        raise CommandError(str(error)) from None
