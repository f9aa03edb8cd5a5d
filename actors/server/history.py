"""What past builds and evaluations took: the statistics that scoring predicts from.

Rules of the file:

- A sample is one build or evaluation that ran for real; unknown figures are left out of a mean,
  a measured zero is a zero.
- Build times are divided by the contention they were measured under, and memory is the 95th
  percentile by nearest rank: of 20 samples the second largest.
- `now` is monotonic seconds, which go below zero for what an earlier server measured. What is too
  old is dropped at the next `expire`, so that a mean is at most one tick behind its definition.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from actors.ledger.records import AddMetric

DAY_SECS = 86_400.0
KEPT_SAMPLES = 20
KEPT_SECS = 90 * DAY_SECS
EVALUATION_SECS = 7 * DAY_SECS
MAX_PACKAGES = 50_000
"""Packages remembered; beyond it those that were built longest ago are forgotten."""
MAX_RECENT_BUILDS = 20_000
MAX_EVALUATIONS = 20_000
EVALUATION_SYSTEM = ""
"""The `system` of an evaluation's row in the ledger; its `package` is the project."""

Key = tuple[str, str]
"""(pname, else name; system) of a build, (project, "") of an evaluation."""


class Profile(NamedTuple):
    """What is expected of a job; NaN = unknown."""

    secs: float = math.nan
    """Uncontended, on a machine with `core_score`."""
    core_score: float = math.nan
    peak_mb: float = math.nan
    output_size: float = math.nan
    oom_rate: float = math.nan


UNKNOWN = Profile()


class Sample(NamedTuple):
    """One build; None = not measured."""

    at: float
    secs: float | None
    core_score: float | None
    peak_mb: float | None = None
    output_size: float | None = None
    oom: bool = False


def sample_of(metric: AddMetric) -> Sample:
    """A row of the ledger as a sample."""
    wall = metric.wall_time_ms
    return Sample(
        metric.at,
        None if wall is None else wall / 1000 / metric.contention,
        metric.core_score,
        _float(metric.peak_ram_mb),
        _float(metric.output_nar_size),
        metric.oom,
    )


def _float(value: int | None) -> float | None:
    return None if value is None else float(value)


class History:
    """Profiles of packages and projects. `changed` is told the kind and key of each profile
    that is other than before."""

    def __init__(self, changed: Callable[[bool, Key], None] = lambda *_: None) -> None:
        self._changed = changed
        self._packages: dict[Key, deque[Sample]] = {}
        self._profiles: dict[Key, Profile] = {}
        self._day: deque[tuple[float, float]] = deque()
        self._day_sorted: list[float] = []
        self._evaluations = _Means()
        self._projects: dict[str, _Means] = {}

    def __len__(self) -> int:
        return len(self._packages)

    def load(self, metrics: Iterable[AddMetric], now: float) -> None:
        """Takes over what the ledger holds, oldest first."""
        for metric in metrics:
            self.add(metric)
        self.expire(now)

    def add(self, metric: AddMetric) -> None:
        """One more build or evaluation."""
        sample = sample_of(metric)
        if metric.system == EVALUATION_SYSTEM:
            self._add_evaluation(metric.package, sample)
            return
        key = (metric.package, metric.system)
        samples = self._packages.pop(key, None)
        if samples is None:
            samples = deque(maxlen=KEPT_SAMPLES)
        samples.append(sample)
        self._packages[key] = samples  # at the end: the newest
        self._profiles[key] = _profile(samples)
        if sample.secs is not None:
            self._day.append((sample.at, sample.secs))
            insort(self._day_sorted, sample.secs)
            if len(self._day) > MAX_RECENT_BUILDS:
                self._drop_of_day()
        self._changed(False, key)
        if len(self._packages) > MAX_PACKAGES:
            self._forget(next(iter(self._packages)))

    def expire(self, now: float) -> None:
        """Drops what is too old."""
        while self._day and self._day[0][0] < now - DAY_SECS:
            self._drop_of_day()
        while self._packages:
            key = next(iter(self._packages))
            if self._packages[key][-1].at >= now - KEPT_SECS:
                break
            self._forget(key)
        for project in self._evaluations.expire(now - EVALUATION_SECS):
            means = self._projects[project]
            means.expire(now - EVALUATION_SECS)
            if not len(means):
                del self._projects[project]
            self._changed(True, (project, EVALUATION_SYSTEM))

    def of_build(self, key: Key, now: float) -> Profile | None:
        """The profile of a package; None when nothing is known of it."""
        samples = self._packages.get(key)
        if samples is None:
            return None
        if samples[0].at < now - KEPT_SECS:
            while samples and samples[0].at < now - KEPT_SECS:
                samples.popleft()
            if not samples:
                self._forget(key)
                return None
            self._profiles[key] = _profile(samples)
        return self._profiles[key]

    def of_evaluation(self, project: str) -> Profile | None:
        """The profile of a project's evaluations; None when nothing is known of them."""
        means = self._projects.get(project)
        return None if means is None else means.profile

    @property
    def any_evaluation(self) -> Profile:
        """The mean over all projects."""
        return self._evaluations.profile

    @property
    def median_build_secs(self) -> float | None:
        """Of the last 24 h; None without samples."""
        ordered = self._day_sorted
        if not ordered:
            return None
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def _add_evaluation(self, project: str, sample: Sample) -> None:
        if sample.secs is None:
            return
        self._projects.setdefault(project, _Means()).add(project, sample)
        dropped = self._evaluations.add(project, sample)
        if dropped is not None:
            means = self._projects[dropped]
            means.drop()
            if not len(means):
                del self._projects[dropped]
            self._changed(True, (dropped, EVALUATION_SYSTEM))
        self._changed(True, (project, EVALUATION_SYSTEM))

    def _drop_of_day(self) -> None:
        _, secs = self._day.popleft()
        del self._day_sorted[bisect_left(self._day_sorted, secs)]

    def _forget(self, key: Key) -> None:
        del self._packages[key]
        del self._profiles[key]
        self._changed(False, key)


class _Means:
    """Means over evaluations, oldest first."""

    def __init__(self) -> None:
        self._samples: deque[tuple[str, Sample]] = deque()
        self._profile: Profile | None = None

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, project: str, sample: Sample) -> str | None:
        """Returns the project whose oldest sample had to go."""
        self._samples.append((project, sample))
        self._profile = None
        return self.drop() if len(self._samples) > MAX_EVALUATIONS else None

    def drop(self) -> str:
        """Drops the oldest sample; returns its project."""
        self._profile = None
        return self._samples.popleft()[0]

    def expire(self, oldest: float) -> set[str]:
        """Drops what is older; returns the projects concerned."""
        dropped = set()
        while self._samples and self._samples[0][1].at < oldest:
            dropped.add(self.drop())
        return dropped

    @property
    def profile(self) -> Profile:
        if self._profile is None:
            secs = [s.secs for _, s in self._samples if s.secs is not None]
            cores = [s.core_score for _, s in self._samples if s.core_score is not None]
            self._profile = Profile(secs=_mean(secs), core_score=_mean(cores))
        return self._profile


def _profile(samples: Iterable[Sample]) -> Profile:
    known = tuple(samples)
    peaks = sorted(s.peak_mb for s in known if s.peak_mb is not None)
    return Profile(
        secs=_mean([s.secs for s in known if s.secs is not None]),
        core_score=_mean([s.core_score for s in known if s.core_score is not None]),
        peak_mb=peaks[math.ceil(0.95 * len(peaks)) - 1] if peaks else math.nan,
        output_size=_mean([s.output_size for s in known if s.output_size is not None]),
        oom_rate=sum(s.oom for s in known) / len(known),
    )


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
