"""Keeps the build logs on disk within a quota: the logs that were last written longest ago go."""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

import trio
from msgspec import Struct

from actors.ledger.port import Offload

log = logging.getLogger("headrace.logbook")

LOOK_EVERY_SECS = 600.0
SPARED_SECS = 3_600.0
"""A log that was written this recently may be of a job that runs: it stays."""
FILLED_AFTER = 0.9
"""What is left of the quota, so that not every look has something to do."""


class _Logs(Struct, frozen=True):
    """The logs of one job."""

    written_at: float
    size: int
    folder: Path


async def keep_quota(folder: Path, quota: float, offload: Offload) -> None:
    """Trims at every `LOOK_EVERY_SECS`, until cancelled. `quota` is in bytes."""
    while True:
        freed = await offload(trim, folder, quota, time.time())
        if freed:
            log.info(
                "build logs were over %.0f MiB: %.0f MiB removed", quota / 2**20, freed / 2**20
            )
        await trio.sleep(LOOK_EVERY_SECS)


def trim(folder: Path, quota: float, now: float) -> int:
    """Removes whole jobs' logs until the rest is well within the quota; returns the bytes freed.

    Blocks. What cannot be read or removed stays and counts for nothing.
    """
    logs = sorted(_logs_in(folder), key=lambda found: (found.written_at, found.folder))
    excess = sum(found.size for found in logs) - quota
    if excess <= 0:
        return 0
    excess += (1 - FILLED_AFTER) * quota
    freed = 0
    for found in logs:
        if freed >= excess or found.written_at > now - SPARED_SECS:
            break
        shutil.rmtree(found.folder, ignore_errors=True)
        freed += found.size
    return freed


def _logs_in(folder: Path) -> list[_Logs]:
    found = []
    for job in _listed(folder):
        stats = [stat for path in _listed(job) if (stat := _stat(path)) is not None]
        if stats:
            written_at = max(at for at, _ in stats)
            found.append(_Logs(written_at, sum(size for _, size in stats), job))
    return found


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _stat(path: Path) -> tuple[float, int] | None:
    """When it was last written, and its bytes."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime, found.st_size
