"""Which paths of offers are valid in a Nix store: one query a page, and a memory of the answers."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from actors.nix import serve, wire
from actors.worker.executors.base import score_candidates
from actors.worker.executors.nix_sizes import CacheSizes
from transport import messages as m

MAX_REMEMBERED = 500_000
"""Paths; beyond it those asked for longest ago are forgotten."""
VALID_SECS = 300.0
"""How long a valid path is taken to be so: what the garbage collector removes meanwhile costs one
build that finds out."""
MISSING_SECS = 15.0
"""How long a missing one is; what this worker builds or fetches counts at once."""


class ValidPaths:
    """Answers from any thread, one at a time."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cache: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._argv, self._env = argv, env
        self._store: serve.BlockingServe | None = None
        self._sizes = CacheSizes(cache, clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._asking = threading.Lock()
        self._known: OrderedDict[str, tuple[bool, float]] = OrderedDict()
        """By path: whether it is valid, and until when that is believed."""

    def score(self, candidates: Sequence[m.JobCandidate]) -> list[m.Score]:
        """One score for every candidate. Raises `ServeFailed`."""
        paths: dict[str, None] = {}
        for candidate in candidates:
            paths.update(dict.fromkeys(r.path for r in candidate.required_paths))
            paths.update(dict.fromkeys(candidate.output_paths))
        valid = self.among(paths)
        self._sizes.begin_page()
        return score_candidates(candidates, valid.__contains__, self._sizes.of)

    def among(self, paths: Collection[str]) -> set[str]:
        """The valid ones. Raises `ServeFailed`."""
        now = self._clock()
        with self._lock:
            known = {path: self._known.get(path, (False, 0.0)) for path in paths}
        valid = {path for path, (is_valid, until) in known.items() if is_valid and until > now}
        unsure = [path for path, (_, until) in known.items() if until <= now]
        if unsure or not paths:
            request = serve.query_valid_paths(unsure, lock=False, substitute=False)
            with self._asking:
                if self._store is None:
                    self._store = serve.BlockingServe(self._argv, self._env)
                found = set(self._store.ask(request, wire.strings))
            self._remember(unsure, found, now)
            valid |= found
        return valid

    def add(self, paths: Iterable[str]) -> None:
        """This worker made them valid."""
        paths = list(paths)
        self._remember(paths, set(paths), self._clock())

    def drop(self, paths: Iterable[str]) -> None:
        """They turned out to be missing."""
        self._remember(paths, set(), self._clock())

    def _remember(self, paths: Iterable[str], valid: Collection[str], now: float) -> None:
        with self._lock:
            for path in paths:
                is_valid = path in valid
                self._known[path] = is_valid, now + (VALID_SECS if is_valid else MISSING_SECS)
                self._known.move_to_end(path)
            while len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)

    def close(self) -> None:
        with self._asking:
            if self._store is not None:
                self._store.close()
                self._store = None
            self._sizes.close()
