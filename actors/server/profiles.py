"""Numbers for the expected cost of pending jobs: one row of a small table per profile.

Jobs of a package share its profile, and all jobs of which nothing is known share one, so that
what depends on history and machine is computed once for each profile in use and looked up by
job. What of it depends on nothing but profile and machine is kept per worker until one of the two
changes (`on_machine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from actors.server.history import UNKNOWN, Key, Profile

KEPT_PROFILES = 64
"""Unused profiles that are remembered: a package's last job leaves and the next one enters."""
ANY, ANY_BUILTIN = 0, 1
"""The rows of jobs without history."""
BUILTIN = "builtin"
_COLUMNS = Profile._fields
MAX_CORE_FACTOR = 2.0
MAX_KEPT_MACHINES = 1_000

Floats = NDArray[np.float64]
Machine = tuple[float | None, int | None]
"""A worker's core score and free memory in MiB; None = unknown."""


class Expected(Struct, frozen=True):
    """What a machine makes of each profile."""

    version: int
    machine: Machine
    run_secs: Floats
    """Uncontended, with what running out of memory may cost; where the time is unknown, that
    factor alone."""
    unknown: NDArray[np.bool_]


def core_factor(measured: float | None, mine: float | None) -> float:
    """How much longer a machine takes than the one measured; 1 when either is unknown."""
    if measured is None or mine is None:
        return 1.0
    if mine <= 0:
        return MAX_CORE_FACTOR if measured > 0 else 1.0
    return min(max(measured / mine, 1 / MAX_CORE_FACTOR), MAX_CORE_FACTOR)


class ProfileTable:
    """Profiles of the pending jobs of one kind. `known` gives the history's word on a key."""

    def __init__(self, known: Callable[[Key], Profile | None]) -> None:
        self._known = known
        self._size = 2
        self.version = 0
        """Changes with every change of a column."""
        self._columns = {name: np.full(16, np.nan) for name in _COLUMNS}
        self._output_size = np.zeros(16)
        self._builtin = np.zeros(16, np.bool_)
        self._builtin[ANY_BUILTIN] = True
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._jobs: dict[int, int] = {}
        """How many pending jobs each profile has."""
        self._unused: dict[int, None] = {}
        self._free: list[int] = []
        # Jobs of packages without history: a lone job id, or the set of them.
        self._without: dict[Key, str | set[str]] = {}
        self._expected: dict[int, Expected] = {}
        self._largest: tuple[int, float] = (-1, 0.0)

    def __len__(self) -> int:
        return self._size

    @property
    def has_history(self) -> bool:
        """Whether any profile in use comes from a history."""
        return self._size > 2

    @property
    def largest_peak_mb(self) -> float:
        """Of all profiles; 0 when none is known."""
        version, largest = self._largest
        if version != self.version:
            largest = float(np.nan_to_num(self.column("peak_mb")).max())
            self._largest = (self.version, largest)
        return largest

    def on_machine(self, slot: int, machine: Machine) -> Expected:
        """What a worker with this slot makes of each profile."""
        kept = self._expected.get(slot)
        if kept is None or kept.version != self.version or kept.machine != machine:
            if len(self._expected) >= MAX_KEPT_MACHINES:
                self._expected.clear()
            kept = self._expected[slot] = self._compute(machine)
        return kept

    def _compute(self, machine: Machine) -> Expected:
        core_score, free_mb = machine
        run: Floats = self.column("secs") * self._core_factors(core_score)
        risk = np.nan_to_num(self.column("oom_rate"))
        if free_mb:
            lacking = np.nan_to_num(self.column("peak_mb")) - free_mb
            risk += np.maximum(lacking, 0.0) / free_mb
        unknown = np.isnan(run)
        # A package whose builds were never timed still has its risk.
        run[unknown] = 1.0
        run *= 1 + np.minimum(risk, 1.0)
        return Expected(self.version, machine, run, unknown)

    def _core_factors(self, mine: float | None) -> Floats:
        if mine is None:
            return np.ones(self._size)
        measured = self.column("core_score")
        if mine > 0:
            factors = np.clip(measured / mine, 1 / MAX_CORE_FACTOR, MAX_CORE_FACTOR)
        else:
            factors = np.where(measured > 0, MAX_CORE_FACTOR, 1.0)
        return np.where(np.isnan(measured), 1.0, factors)

    def column(self, name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """A field of `Profile`, by profile id; NaN = unknown."""
        return self._columns[name][: self._size]

    @property
    def output_size(self) -> Floats:
        """By profile id; 0 = unknown, which takes no time either."""
        return self._output_size[: self._size]

    @property
    def builtin(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Whether its jobs are `builtin`, by profile id."""
        return self._builtin[: self._size]

    def acquire(self, key: Key, job_id: str) -> int:
        """The profile of a job that enters."""
        profile = self._ids.get(key)
        if profile is None:
            known = self._known(key)
            if known is None:
                self._add_without(key, job_id)
                return ANY_BUILTIN if key[1] == BUILTIN else ANY
            profile = self._allocate(key, known)
        self._unused.pop(profile, None)
        self._jobs[profile] += 1
        return profile

    def release(self, profile: int, key: Key, job_id: str) -> None:
        """The job left."""
        if profile in (ANY, ANY_BUILTIN):
            self._drop_without(key, job_id)
            return
        self._jobs[profile] -= 1
        if self._jobs[profile]:
            return
        self._unused[profile] = None
        if len(self._unused) > KEPT_PROFILES:
            oldest = next(iter(self._unused))
            del self._unused[oldest], self._jobs[oldest]
            del self._ids[self._keys.pop(oldest)]
            self._set(oldest, UNKNOWN)
            self._free.append(oldest)

    def changed(self, key: Key) -> tuple[int, Collection[str]]:
        """The history has something new of a key. Returns its profile's id and the jobs that are
        to have it from now on."""
        known = self._known(key) or UNKNOWN
        profile = self._ids.get(key)
        if profile is not None:
            self._set(profile, known)
            return profile, ()
        if known is UNKNOWN or key not in self._without:
            return ANY, ()
        jobs = self._without.pop(key)
        waiting = {jobs} if isinstance(jobs, str) else jobs
        profile = self._allocate(key, known)
        del self._unused[profile]
        self._jobs[profile] = len(waiting)
        return profile, waiting

    def _allocate(self, key: Key, known: Profile) -> int:
        if self._free:
            profile = self._free.pop()
        else:
            profile = self._size
            if profile == len(self._builtin):
                self._grow()
            self._size += 1
        self._ids[key], self._keys[profile] = profile, key
        self._jobs[profile] = 0
        self._unused[profile] = None
        self._builtin[profile] = key[1] == BUILTIN
        self._set(profile, known)
        return profile

    def _set(self, profile: int, known: Profile) -> None:
        for name, value in zip(_COLUMNS, known, strict=True):
            self._columns[name][profile] = value
        self._output_size[profile] = 0.0 if math.isnan(known.output_size) else known.output_size
        self.version += 1

    def _grow(self) -> None:
        size = len(self._builtin)
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate((column, np.full(size, np.nan)))
        self._output_size = np.concatenate((self._output_size, np.zeros(size)))
        self._builtin = np.concatenate((self._builtin, np.zeros(size, np.bool_)))

    def _add_without(self, key: Key, job_id: str) -> None:
        others = self._without.get(key)
        if others is None:
            self._without[key] = job_id
        elif isinstance(others, str):
            self._without[key] = {others, job_id}
        else:
            others.add(job_id)

    def _drop_without(self, key: Key, job_id: str) -> None:
        others = self._without[key]
        if isinstance(others, str):
            del self._without[key]
            return
        others.remove(job_id)
        if not others:
            del self._without[key]

    def check(self, profiles: dict[str, int], keys: dict[str, Key]) -> None:
        """Asserts the invariants of this class, given each pending job's profile and key."""
        without = {
            (key, job)
            for key, jobs in self._without.items()
            for job in ({jobs} if isinstance(jobs, str) else jobs)
        }
        for job_id, profile in profiles.items():
            key = keys[job_id]
            if profile in (ANY, ANY_BUILTIN):
                assert (profile == ANY_BUILTIN) == (key[1] == BUILTIN)
                assert key not in self._ids
                assert (key, job_id) in without
            else:
                assert self._ids[key] == profile
                assert self._keys[profile] == key
        assert len(without) == sum(p in (ANY, ANY_BUILTIN) for p in profiles.values())
        for profile, count in self._jobs.items():
            assert count == sum(p == profile for p in profiles.values())
            assert (profile in self._unused) == (not count)
        assert len(self._jobs) + len(self._free) + 2 == self._size
