"""What processes of the hook share, and what is left when one is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from bin.hook_slots import NoSlots, Slots

HOLDER = """
import sys, time
from pathlib import Path
from bin.hook_slots import Slots
print(Slots(Path(sys.argv[1])).take(2), flush=True)
time.sleep(60)
"""

GUARDED = """
import os, sys
from pathlib import Path
from bin.hook_guard import Guard
guard = Guard(lambda job: Path(sys.argv[1]).write_text(f"{job} {os.getsid(0) == os.getpid()}"))
for word in sys.argv[2:]:
    if word == "release":
        guard.release()
    else:
        guard.watch(word)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_slot_is_held_until_its_process_has_ended_however(tmp_path):
    folder = tmp_path / "slots"
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        assert [holder.stdout.readline() for holder in holders] == ["True\n"] * 2
        assert not Slots(folder).take(2)
        holders[0].kill()
        holders[0].wait()
        assert Slots(folder).take(2)
        assert not Slots(folder).take(2)
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_directory_that_others_made_is_not_used(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / "link"
    link.symlink_to(elsewhere)
    with pytest.raises(NoSlots, match="belongs to somebody else"):
        Slots(link).take(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(NoSlots, match="file"):
        Slots(tmp_path / "file").take(1)


@pytest.mark.parametrize(
    ("words", "cancelled"),
    [(["j1"], "j1 True"), ([], None), (["j1", "release"], None)],
    ids=["killed with its job", "killed before", "killed after"],
)
def test_the_job_of_a_killed_hook_is_cancelled(tmp_path, words, cancelled):
    note = tmp_path / "cancelled"
    # As Nix ends a hook: its whole process group.
    hook = subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(note), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with hook:
        assert hook.stdout.readline() == b"ready\n"
        [guard] = psutil.Process(hook.pid).children()
        os.killpg(hook.pid, signal.SIGKILL)
        # The guard holds none of the hook's files: else this would wait for it.
        assert hook.stdout.read() == b""
    deadline = time.monotonic() + 30
    while _is_alive(guard):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert (note.read_text() if note.exists() else None) == cancelled


def _is_alive(process: psutil.Process) -> bool:
    """A container's init may leave it a zombie."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
