"""What a worker says of its machine's load."""

from __future__ import annotations

import psutil
import pytest

from actors.worker import metrics
from actors.worker.metrics import MIN_INTERVAL_SECS, MachineMetrics


@pytest.fixture
def machine(monkeypatch):
    """A clock to set, and the CPU use that is found."""
    found = {"now": 100.0, "cpu": 100.0, "reads": 0}

    def cpu_percent(interval):
        found["reads"] += 1
        return found["cpu"]

    monkeypatch.setattr(psutil, "cpu_percent", cpu_percent)
    monkeypatch.setattr(metrics.time, "monotonic", lambda: found["now"])
    return found


def test_a_first_report_at_once_says_nothing_of_the_cpu(machine):
    """A few milliseconds of a worker's own start are no load; they would bar it from builds."""
    read = MachineMetrics().read({})
    assert read.cpu_usage_pct is None
    assert read.ram_free_mb > 0


def test_the_next_report_covers_all_since_the_start(machine):
    reader = MachineMetrics()
    reader.read({})
    # An interval that was too short is not ended, so what comes next is measured from its start.
    assert machine["reads"] == 1
    machine["now"] += 10
    machine["cpu"] = 37.5
    assert reader.read({}).cpu_usage_pct == 37.5


def test_an_interval_just_long_enough_counts(machine):
    reader = MachineMetrics()
    machine["now"] += MIN_INTERVAL_SECS
    assert reader.read({"j1": 64}).cpu_usage_pct == 100.0
    assert reader.read({}).cpu_usage_pct is None
