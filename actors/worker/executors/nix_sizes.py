"""NAR sizes of what is missing, from the entries of the binary cache."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

from actors.nix.cache import CacheFailed, entry, open_cache

log = logging.getLogger("headrace.worker")

MAX_REMEMBERED = 100_000
"""Sizes; beyond it those learned first are forgotten."""
PAGE_SECS = 0.03
"""For look-ups per page of offers; a path whose turn does not come counts as of unknown size."""
_PAUSE_SECS = 60.0
"""After the cache did not answer."""


class CacheSizes:
    """Used by one thread at a time."""

    def __init__(self, uri: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = open_cache(uri)
        self._clock = clock
        self._known: OrderedDict[str, int] = OrderedDict()
        self._until = 0.0
        self._resume_at = 0.0

    def begin_page(self) -> None:
        now = self._clock()
        self._until = now + PAGE_SECS if now >= self._resume_at else 0.0

    def of(self, path: str) -> int | None:
        """Bytes of a path's NAR, if the cache has it and there is time to ask."""
        if path in self._known:
            return self._known[path]
        if self._cache is None or self._clock() >= self._until:
            return None
        try:
            found = entry(self._cache, path)
        except CacheFailed as error:
            log.info("sizes of missing paths are not known: %s", error)
            self._until, self._resume_at = 0.0, self._clock() + _PAUSE_SECS
            return None
        if found is None:
            return None
        self._known[path] = found.nar_size
        if len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return found.nar_size

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()
