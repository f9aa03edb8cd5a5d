"""Whether the disks that jobs write to have room."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

LEAST_BYTES = 16 * 2**20
"""With less free a disk counts as full, and has room again with twice as much."""


def is_full(directory: Path, least: int = LEAST_BYTES) -> bool:
    """Whether fewer bytes than `least` are free; false where nobody can tell."""
    try:
        return shutil.disk_usage(directory).free < least
    except OSError:
        return False


class Disks:
    """The disks of some directories."""

    def __init__(self, directories: Iterable[Path]) -> None:
        self._directories = tuple(directories)
        self._was_full = False

    def trouble(self) -> str | None:
        """Why no job should start here, in one line; none while there is room. Blocks."""
        least = 2 * LEAST_BYTES if self._was_full else LEAST_BYTES
        full = next((d for d in self._directories if is_full(d, least)), None)
        self._was_full = full is not None
        return None if full is None else f"the disk of {full} is full"
