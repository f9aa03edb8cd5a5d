"""A worker whose disk is full asks for nothing until there is room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from actors.worker import disks as module
from actors.worker import events as e
from actors.worker.disks import LEAST_BYTES, Disks, is_full
from actors.worker.executors.base import Failed
from transport import messages as m

FULL = "the disk of /builds is full"


@pytest.fixture
def free(monkeypatch):
    """Bytes that are free, by directory; what is not in it cannot be asked."""
    free: dict[str, int] = {}

    def usage(directory):
        if str(directory) not in free:
            raise OSError("stale file handle")
        return SimpleNamespace(free=free[str(directory)])

    monkeypatch.setattr(module.shutil, "disk_usage", usage)
    return free


def test_the_first_full_disk_is_named_and_has_room_again_with_twice_as_much(free, tmp_path):
    disks = Disks([tmp_path / "a", tmp_path / "b"])
    free |= {str(tmp_path / "a"): 2**40, str(tmp_path / "b"): LEAST_BYTES}
    assert disks.trouble() is None
    free[str(tmp_path / "b")] = LEAST_BYTES - 1
    assert disks.trouble() == f"the disk of {tmp_path / 'b'} is full"
    free[str(tmp_path / "b")] = LEAST_BYTES + 1
    assert disks.trouble() is not None
    free[str(tmp_path / "b")] = 2 * LEAST_BYTES
    assert disks.trouble() is None


def test_a_disk_that_cannot_be_asked_is_not_called_full(free, tmp_path):
    assert not is_full(tmp_path)
    assert Disks([tmp_path]).trouble() is None


def test_nothing_is_asked_for_and_what_comes_is_declined(driver):  # FIELD 23
    worker = driver(builds=2)
    worker.serve()
    worker.assign(1)
    told = worker.step(e.DisksChecked(FULL))
    assert told == [m.WorkerMetrics(trouble=FULL)]
    assert [note.level for note in worker.did(e.Note)] == ["warning"]
    assert worker.step(e.DisksChecked(FULL)) == []
    assert m.RequestJob not in map(type, worker.finish(1, Failed("Transient", "no space left")))
    assert m.RequestJob not in map(type, worker.wait_alive(25))
    [answer] = worker.assign(2)
    assert (answer.accepted, answer.reason) == (False, FULL)
    metrics = m.WorkerMetrics(cpu_usage_pct=5.0)
    assert worker.step(e.MetricsReady(metrics)) == [
        m.WorkerMetrics(cpu_usage_pct=5.0, trouble=FULL)
    ]


def test_with_room_again_it_asks_at_once_also_in_a_new_session(driver):
    worker = driver()
    worker.step(e.DisksChecked(FULL))
    assert m.RequestJob not in map(type, worker.serve())
    told = worker.step(e.DisksChecked(None))
    assert told[0] == m.WorkerMetrics()
    assert {r.kind for r in told if isinstance(r, m.RequestJob)} == {"build", "eval"}
