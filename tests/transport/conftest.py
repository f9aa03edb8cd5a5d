from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio

from transport.adapter import Context


async def _end_a_hanging_test() -> None:
    await trio.sleep(20)
    raise TimeoutError("the test hangs")


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    async with trio.open_nursery() as nursery, Context() as context:
        nursery.start_soon(_end_a_hanging_test)
        yield context
        nursery.cancel_scope.cancel()
