"""Fetching what a build needs from binary caches, by Nix's own substituters."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

from msgspec import Struct

from actors.nix import serve, wire
from actors.nix.serve import ServeFailed, ServeProcess
from actors.nix.settings import plain

log = logging.getLogger("headrace.worker")

_COPYING = re.compile(rb"^copying path '([^']+)' from ", re.MULTILINE)
_COMPLAINT = re.compile(r"^(?:\x1b\[[0-9;]*m)*(?:error|warning):(.*)$", re.MULTILINE)
_UNREACHABLE = ("unable to download", "cannot open connection", "cannot connect", "timed out")
_CONSEQUENCE = "build of "  # "failed": of the line before it
_MAX_LOG_BYTES = 2**18


class Trouble(Struct, frozen=True):
    """What Nix said while it fetched; the last complaint, on one line."""

    text: str
    is_unreachable: bool
    """A cache could not be asked, so nothing is known of what it holds."""


class Fetcher:
    """A process that fetches, one request at a time; started when something is missing.

    A process that has built does not substitute again, and one that found a cache unreachable
    never asks that one again: it is ended then, and the next request starts a new one.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._argv, self._env = argv, env
        self._process: ServeProcess | None = None

    async def fetch(
        self, paths: Sequence[str], on_copying: Callable[[int], Awaitable[None]]
    ) -> Trouble | None:
        """Asks the caches for these paths and all that they refer to, at once.

        What comes is locked in the process. `on_copying` is told how many of the paths came or are
        on their way. Ask the store what is valid then; the trouble, if any, says why the rest is
        not.
        """
        said = b""
        begun: set[bytes] = set()
        wanted = {path.encode() for path in paths}

        async def take(data: bytes) -> None:
            nonlocal said, begun
            said = (said + data)[-_MAX_LOG_BYTES:]
            seen = begun | (wanted & set(_COPYING.findall(said)))
            if len(seen) > len(begun):
                begun = seen
                await on_copying(len(begun))

        request = serve.query_valid_paths(paths, lock=True, substitute=True)
        try:
            if self._process is None or not self._process.is_alive:
                await self.close()
                self._process = await ServeProcess.start(self._argv, self._env)
            await self._process.ask(request, wire.strings(), take)
            trouble = trouble_of(said.decode(errors="replace"))
        except ServeFailed as error:
            trouble = trouble_of(said.decode(errors="replace")) or Trouble(str(error), True)
        if trouble is not None:
            log.debug("fetching: %s", trouble.text)
            if trouble.is_unreachable:
                await self.close()
        return trouble

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.close()


def trouble_of(said: str) -> Trouble | None:
    """The last complaint in what Nix wrote, unreachable caches first."""
    found = [plain(line).removeprefix("error: ") for line in _COMPLAINT.findall(said)]
    found = [text for text in found if not text.startswith(_CONSEQUENCE)]
    unreachable = [text for text in found if any(words in text for words in _UNREACHABLE)]
    if unreachable:
        return Trouble(unreachable[-1], True)
    return Trouble(found[-1], False) if found else None
