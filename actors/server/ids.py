"""Names for jobs, assignments, sessions and submissions.

Ids of one server sort in the order they were made (code point order), so that equal totals go
to the job submitted first; a random part keeps servers that share a ledger apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator


class Ids:
    """`epoch` is unique to this run of this server: start time in ms and a random part."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._numbers = itertools.count()

    def new(self, letter: str) -> str:
        """The next id, such as `j019af3c2d1e07f4-0000002a`."""
        return f"{letter}{self._epoch}-{next(self._numbers):08x}"

    def many(self, letter: str) -> Iterator[str]:
        """As many as are taken; safe to take from another thread."""
        while True:
            yield self.new(letter)


def epoch(wall_ms: int, random: int) -> str:
    """The epoch of a run that started at `wall_ms`, with 16 random bits."""
    return f"{wall_ms:011x}{random & 0xFFFF:04x}"
