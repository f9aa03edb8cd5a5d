"""What the whole instance did lately: the means that scoring rules compare with."""

from __future__ import annotations

import math
from collections import deque

from actors.server.pool import Pool
from actors.server.scoring import Averages
from transport import messages as m

_BUCKET_SECS, _HOUR_SECS = 60.0, 3600.0


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


class Instance:
    """Feeds `Averages` from what is assigned; the fleet's mean speeds are the pool's."""

    def __init__(self) -> None:
        self._waits = HourMean()
        self._missing_sizes = HourMean()
        self._missing_counts = HourMean()

    def assigned(self, waited: float, reported: m.Score | None, now: float) -> None:
        """A build was assigned `waited` seconds after it could start, to a worker that had
        reported so much of it missing."""
        self._waits.add(max(0.0, math.floor(waited)), now)
        if reported is not None:
            self._missing_sizes.add(float(reported.missing_nar_size), now)
            self._missing_counts.add(float(reported.missing_count), now)

    def averages(self, pool: Pool, now: float) -> Averages:
        """What rules compare with at `now`."""
        return Averages(
            wait_secs=self._waits.mean(now),
            missing_nar_size=self._missing_sizes.mean(now),
            missing_count=self._missing_counts.mean(now),
            download_mbps=pool.download_mbps.mean,
            upload_mbps=pool.upload_mbps.mean,
        )
