"""What the whole instance did lately, and does now: what scoring rules compare with."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from actors.ledger.records import KEPT_PREFETCHES, AddPrefetch, PastWait
from actors.server.pool import Pool
from actors.server.scoring import Averages
from transport import messages as m

_BUCKET_SECS, _HOUR_SECS = 60.0, 3600.0
SECS_PER_PATH = 0.18
MIN_PREFETCHES = 100
"""Prefetches from which on the time that a path takes is fitted, to the latest of them."""


class HourMean:
    """The mean of the last hour's samples, in 60 buckets of a minute."""

    def __init__(self) -> None:
        self._buckets: deque[list[float]] = deque()
        self._sum, self._count = 0.0, 0

    def add(self, value: float, now: float) -> None:
        start = now // _BUCKET_SECS
        if not self._buckets or self._buckets[-1][0] != start:
            self._buckets.append([start, 0.0, 0.0])
        self._buckets[-1][1] += value
        self._buckets[-1][2] += 1
        self._sum += value
        self._count += 1

    def mean(self, now: float) -> float | None:
        """None without samples: unknown is not zero."""
        oldest = (now - _HOUR_SECS) // _BUCKET_SECS
        while self._buckets and self._buckets[0][0] <= oldest:
            _, total, count = self._buckets.popleft()
            self._sum -= total
            self._count -= int(count)
        return self._sum / self._count if self._count else None


class PathFit:
    """What a path takes beside its bytes, fitted to the latest prefetches."""

    def __init__(self) -> None:
        self._samples: deque[tuple[int, float]] = deque()
        self._paths, self._secs = 0, 0.0

    def add(self, prefetch: AddPrefetch) -> None:
        self._samples.append((prefetch.paths, prefetch.secs))
        self._paths += prefetch.paths
        self._secs += prefetch.secs
        if len(self._samples) > KEPT_PREFETCHES:
            old_paths, old_secs = self._samples.popleft()
            self._paths -= old_paths
            self._secs -= old_secs

    @property
    def path_secs(self) -> float:
        if len(self._samples) < MIN_PREFETCHES or not self._paths:
            return SECS_PER_PATH
        return max(0.0, self._secs / self._paths)


class Instance:
    """Feeds `Averages`; the fleet's mean speeds and the history are the pool's."""

    def __init__(self) -> None:
        self._waits = HourMean()
        self._missing_sizes = HourMean()
        self._missing_counts = HourMean()
        self.paths = PathFit()
        self.phases = {"prefetch": 0, "upload": 0}
        """Open builds that fetch inputs, and that upload outputs."""
        self.project_claims: dict[str, int] = {}
        """Open claims by project."""
        self.fetch_workers: dict[str, bool] = {}
        """By worker with `fetch` that is here: whether it holds a claim."""

    def load(self, waits: Iterable[PastWait], prefetches: Iterable[AddPrefetch]) -> None:
        """Takes over what the ledger holds, oldest first."""
        for prefetch in prefetches:
            self.paths.add(prefetch)
        for wait in waits:
            self._assigned(wait.waited, wait.missing, wait.claimed_at)

    def assigned(self, waited: float, reported: m.Score | None, now: float) -> None:
        """A build was assigned `waited` seconds after it could start, to a worker that had
        reported so much of it missing."""
        missing = None
        if reported is not None:
            missing = (reported.missing_nar_size, reported.missing_count)
        self._assigned(waited, missing, now)

    def _assigned(self, waited: float, missing: tuple[int, int] | None, now: float) -> None:
        self._waits.add(max(0.0, math.floor(waited)), now)
        if missing is not None:
            self._missing_sizes.add(float(missing[0]), now)
            self._missing_counts.add(float(missing[1]), now)

    def averages(self, pool: Pool, now: float) -> Averages:
        """What rules compare with at `now`."""
        evaluations = pool.history.any_evaluation
        busy = sum(self.fetch_workers.values())
        return Averages(
            wait_secs=self._waits.mean(now),
            missing_nar_size=self._missing_sizes.mean(now),
            missing_count=self._missing_counts.mean(now),
            build_secs=pool.history.median_build_secs,
            evaluation_secs=_known(evaluations.secs),
            evaluation_core_score=_known(evaluations.core_score),
            path_secs=self.paths.path_secs,
            download_mbps=pool.download_mbps.mean,
            upload_mbps=pool.upload_mbps.mean,
            downloads=self.phases["prefetch"],
            uploads=self.phases["upload"],
            fetch_workers=len(self.fetch_workers),
            idle_fetch_workers=len(self.fetch_workers) - busy,
            project_claims=self.project_claims,
        )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
