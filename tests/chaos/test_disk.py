"""Disks that can be full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from bin.chaos.disk import FileSizeLimit, Tmpfs

WRITER = """
import sys
for _ in sys.stdin:
    try:
        with open(sys.argv[1], "ab", buffering=0) as file:
            file.write(b"x")
        print("ok", flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""


@pytest.mark.parametrize("keep", [True, False])
def test_a_small_file_system_fills_up_and_is_given_up(tmp_path, keep):
    directory = tmp_path / "disk"
    directory.mkdir()
    disk = Tmpfs.mounted(directory, 1)
    if disk is None:
        pytest.skip("nothing can be mounted here: only root may, and not everywhere")
    try:
        (directory / "before").write_text("kept")
        disk.fill()
        disk.fill()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            (directory / "more").write_bytes(b"x" * 5000)
        disk.free()
        (directory / "more").write_bytes(b"x" * 5000)
    finally:
        disk.close(keep=keep)
    assert not os.path.ismount(directory)
    assert sorted(p.name for p in directory.iterdir()) == (["before", "more"] if keep else [])


def test_a_process_may_write_nothing_for_a_while(tmp_path):
    file = tmp_path / "file"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip

        def write() -> str:
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        disk = FileSizeLimit(lambda: process.pid)
        assert write() == "ok"
        disk.fill()
        assert write() == str(errno.EFBIG)
        disk.free()
        assert write() == "ok"
        process.stdin.close()
    disk.fill()  # it is gone: nothing to limit
    disk.close(keep=True)
    assert file.read_bytes() == b"xx"


def test_where_nothing_can_be_mounted_there_is_none(tmp_path):
    assert Tmpfs.mounted(tmp_path / "nowhere", 1) is None
