"""What the heartbeat says of the machine, and how much memory a build's processes take."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from transport import messages as m

MIN_INTERVAL_SECS = 1.0
"""What a shorter time was busy with says nothing of the machine, and least of all at a start."""


class MachineMetrics:
    """CPU use between two calls of `read`, and memory now."""

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first value has no earlier one to compare with
        self._since = time.monotonic()

    def read(self, build_peaks_mb: Mapping[str, int]) -> m.WorkerMetrics:
        """`build_peaks_mb`: by job id, of each running build."""
        return m.WorkerMetrics(
            cpu_usage_pct=self._cpu_usage_pct(),
            ram_free_mb=psutil.virtual_memory().available // 2**20,
            build_peak_ram_mb=dict(build_peaks_mb) or None,
        )

    def _cpu_usage_pct(self) -> float | None:
        """None while the interval is too short; it then goes on."""
        now = time.monotonic()
        if now - self._since < MIN_INTERVAL_SECS:
            return None
        self._since = now
        return min(100.0, max(0.0, psutil.cpu_percent(interval=None)))


def session_members(leader: int) -> list[int]:
    """Process ids of the session that `leader` leads, whatever their process groups."""
    members = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                members.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return members


def session_rss(leader: int) -> int:
    """Bytes of memory that the processes of a session have resident, shared pages counted
    for each."""
    total = 0
    for pid in session_members(leader):
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.Error:
            continue
    return total


def oom_kills() -> int | None:
    """How often this machine killed a process for want of memory since its start."""
    try:
        with Path("/proc/vmstat").open(encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        return None
    return None
