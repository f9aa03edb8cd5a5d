"""Locks of servers that share a ledger: a free one means dead, at once and for sure."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from actors.server.locks import ServerLocks


def test_a_held_lock_is_alive_and_one_that_was_released_leaves_nothing(tmp_path: Path):
    first, second = ServerLocks(tmp_path, "a"), ServerLocks(tmp_path, "b")
    assert first.others() == (frozenset({"b"}), frozenset())
    assert second.others() == (frozenset({"a"}), frozenset())
    first.release()
    assert second.others() == (frozenset(), frozenset())
    second.release()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_server_is_dead_at_once_until_it_is_forgotten(tmp_path: Path):
    code = (
        "import sys, time, pathlib; from actors.server.locks import ServerLocks;"
        "locks = ServerLocks(pathlib.Path(sys.argv[1]), 'victim'); print(1, flush=True);"
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout:
        child.stdout.readline()
        locks = ServerLocks(tmp_path, "a")
        assert locks.others() == (frozenset({"victim"}), frozenset())
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert locks.others() == (frozenset(), frozenset({"victim"}))
        assert locks.others() == (frozenset(), frozenset({"victim"})), "looking changes nothing"
        locks.forget(frozenset({"victim", "nobody"}))
        assert locks.others() == (frozenset(), frozenset())
        locks.release()


def test_one_id_has_one_holder(tmp_path: Path):
    locks = ServerLocks(tmp_path / "made" / "here", "a")
    assert (tmp_path / "made" / "here").stat().st_mode & 0o777 == 0o700
    with pytest.raises(BlockingIOError):
        ServerLocks(tmp_path / "made" / "here", "a")
    locks.release()
