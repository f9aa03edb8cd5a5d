"""What goes on failing is said once when it begins, and once when it is over. Pure."""

from __future__ import annotations


class Outage:
    """Of one thing that may fail again and again: a disk that is full, say."""

    def __init__(self) -> None:
        self.is_on = False

    def begins(self) -> bool:
        """It failed; true when it had worked before."""
        begins = not self.is_on
        self.is_on = True
        return begins

    def ends(self) -> bool:
        """It worked; true when it had failed before."""
        ends = self.is_on
        self.is_on = False
        return ends
