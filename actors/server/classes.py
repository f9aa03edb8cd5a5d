"""Which worker is eligible for which class of jobs, decided once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from actors.server.model import JobClass, WorkerView, eligible

KEPT_CLASSES = 64
"""Unused classes that are remembered: the last job of a class leaves and the next one enters."""


class ClassTable:
    """Small numbers for the classes of pending jobs, and a byte for each (class, worker slot)."""

    def __init__(self, slots: int) -> None:
        self._ids: dict[JobClass, int] = {}
        self._classes: list[JobClass | None] = []
        self._jobs: list[int] = []
        """How many pending jobs each class has, by id."""
        self._unused: dict[int, None] = {}
        self._free: list[int] = []
        self._eligible = np.zeros((16, slots), np.uint8)

    def __getitem__(self, cls: JobClass) -> int:
        return self._ids[cls]

    def acquire(self, cls: JobClass, workers: Iterable[tuple[int, WorkerView]]) -> int:
        """The id of a class, which has one job more from now on. `workers` are all (slot, view)."""
        class_id = self._ids.get(cls)
        if class_id is None:
            class_id = self._add(cls)
            for slot, view in workers:
                self._eligible[class_id, slot] = eligible(cls, view)
        self._unused.pop(class_id, None)
        self._jobs[class_id] += 1
        return class_id

    def release(self, class_id: int) -> None:
        """The class has one job less; an id may be given to another class some time after its
        last job left."""
        self._jobs[class_id] -= 1
        if self._jobs[class_id]:
            return
        self._unused[class_id] = None
        if len(self._unused) > KEPT_CLASSES:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            cls = self._classes[oldest]
            assert cls is not None
            del self._ids[cls]
            self._classes[oldest] = None
            self._free.append(oldest)

    def of_class(self, class_id: int, slots: int) -> NDArray[np.uint8]:
        """1 or 0 for each of the first `slots` workers."""
        return self._eligible[class_id, :slots]

    def of_worker(self, slot: int) -> NDArray[np.uint8]:
        """1 or 0 for each class id."""
        return np.ascontiguousarray(self._eligible[:, slot])

    def figures(self, figure: Callable[[JobClass], float]) -> NDArray[np.float64]:
        """A figure of each class, by class id; 0 for ids that are free."""
        return np.array([0.0 if cls is None else figure(cls) for cls in self._classes])

    def judge(self, slot: int, view: WorkerView | None) -> None:
        """Decides anew what a worker is eligible for; None = the slot is empty."""
        self._eligible[:, slot] = 0
        if view is not None:
            for cls, class_id in self._ids.items():
                self._eligible[class_id, slot] = eligible(cls, view)

    def grow(self, slots: int) -> None:
        """Makes room for more workers."""
        grown = np.zeros((len(self._eligible), slots), np.uint8)
        grown[:, : self._eligible.shape[1]] = self._eligible
        self._eligible = grown

    def check(self, jobs: dict[JobClass, int]) -> None:
        """Asserts the invariants of this class, given how many jobs each class has."""
        for cls, class_id in self._ids.items():
            assert self._classes[class_id] == cls
            assert self._jobs[class_id] == jobs.get(cls, 0)
            assert (class_id in self._unused) == (not self._jobs[class_id])
        assert jobs.keys() <= self._ids.keys()
        assert len(self._unused) <= KEPT_CLASSES
        assert len(self._ids) + len(self._free) == len(self._classes)

    def _add(self, cls: JobClass) -> int:
        if self._free:
            class_id = self._free.pop()
            self._classes[class_id] = cls
        else:
            class_id = len(self._classes)
            self._classes.append(cls)
            self._jobs.append(0)
            if class_id == len(self._eligible):
                self._eligible = np.concatenate((self._eligible, np.zeros_like(self._eligible)))
        self._ids[cls] = class_id
        return class_id
