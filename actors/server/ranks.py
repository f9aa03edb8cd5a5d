"""Numbers that sort like job ids, so that one vector operation finds the smallest id."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

_GAP = 2**40
"""Between appended labels. 2**22 appends fit below the limit before all are given out anew."""
_LIMIT = 2**62
_RUN_SHARE = 1024
"""Of its gap, what an insertion beside the previous one takes: ids that arrive in order then
fill a gap with some 20 000 labels, where halving it is through after 40."""
_KEPT = 1024


class Ranks:
    """Order-maintenance labels: label(a) < label(b) exactly when a < b in code point order.

    Ids that the server makes ascend, so that appending is the common case; others go in between
    at the price of a list insertion. A dropped id keeps its label for a while, because jobs that
    were declined or lost come back.
    """

    def __init__(self) -> None:
        self._labels: dict[str, int] = {}
        self._ids: list[str] = []
        self._dropped: set[str] = set()
        self._previous = ""

    def __getitem__(self, job_id: str) -> int:
        return self._labels[job_id]

    def add(self, job_id: str) -> bool:
        """Labels an id. True when that changed the labels of others."""
        if job_id in self._labels:
            self._dropped.discard(job_id)
            return False
        if not self._ids or job_id > self._ids[-1]:
            label: int | None = self._labels[self._ids[-1]] + _GAP if self._ids else 0
            self._ids.append(job_id)
        else:
            at = bisect_left(self._ids, job_id)
            label = self._label_before(at)
            self._ids.insert(at, job_id)
        self._previous = job_id
        if label is None or not -_LIMIT < label < _LIMIT:
            self._labels = {job_id: at * _GAP for at, job_id in enumerate(self._ids)}
            return True
        self._labels[job_id] = label
        return False

    def drop(self, job_id: str) -> None:
        """The id left; it may be forgotten from now on."""
        self._dropped.add(job_id)
        if len(self._dropped) > _KEPT and 2 * len(self._dropped) > len(self._ids):
            for forgotten in self._dropped:
                del self._labels[forgotten]
            self._dropped.clear()
            self._ids = [job_id for job_id in self._ids if job_id in self._labels]

    def check(self) -> None:
        """Asserts the invariants of this class."""
        assert len(self._ids) == len(self._labels)
        assert self._dropped <= self._labels.keys()
        assert self._ids == sorted(self._ids)
        labels = [self._labels[job_id] for job_id in self._ids]
        assert all(low < high for low, high in pairwise(labels))

    def _label_before(self, at: int) -> int | None:
        """A label for what goes in before position `at`; None when the gap is used up."""
        high = self._labels[self._ids[at]]
        if at == 0:
            return high - _GAP
        low = self._labels[self._ids[at - 1]]
        if high - low < 2:
            return None
        step = (high - low) // _RUN_SHARE or 1
        if self._ids[at - 1] == self._previous:
            return low + step
        if self._ids[at] == self._previous:
            return high - step
        return (low + high) // 2
