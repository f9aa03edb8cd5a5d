"""Build logs stay within their quota, and those of running jobs stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from actors.server import log_quota
from actors.server.log_quota import keep_quota, trim

NOW, HOUR = 1_000_000.0, 3_600.0
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "logs"


def write(folder: Path, job: str, *runs: tuple[float, int]) -> None:
    """Logs of a job: how many hours ago each was last written, and its bytes."""
    (folder / job).mkdir(parents=True)
    for number, (ago, size) in enumerate(runs):
        path = folder / job / f"a{number}.log"
        path.write_bytes(b"x" * size)
        os.utime(path, (NOW - ago * HOUR,) * 2)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_oldest_go_until_a_tenth_is_free_again(folder):
    for job in range(10):
        write(folder, f"job{job}", (50 - job, 100))
    assert trim(folder, 1_000, NOW) == 0
    write(folder, "new", (2, 50))
    assert trim(folder, 1_000, NOW) == 200  # 50 too much, and room for 100 more
    assert left(folder) == [*(f"job{job}" for job in range(2, 10)), "new"]


def test_a_job_is_as_old_as_its_newest_run_and_goes_whole(folder):
    write(folder, "retried", (90, 100), (1.5, 100))
    write(folder, "old", (80, 100))
    assert trim(folder, 250, NOW) == 100
    assert left(folder) == ["retried"]
    assert trim(folder, 150, NOW) == 200
    assert left(folder) == []


def test_what_may_still_run_stays_however_large(folder):
    write(folder, "running", (0.2, 10_000))
    write(folder, "old", (30, 10))
    assert trim(folder, 100, NOW) == 10
    assert left(folder) == ["running"]


def test_no_folder_and_strange_files_are_no_reason_to_fail(folder):
    assert trim(folder, 0, NOW) == 0
    write(folder, "job", (30, 10))
    (folder / "stray").write_text("not a job")
    (folder / "empty").mkdir()
    assert trim(folder, 5, NOW) == 10
    assert left(folder) == ["empty", "stray"]


async def test_it_looks_again_and_again(folder, autojump_clock, monkeypatch):
    write(folder, "first", (30, 100))
    looks = []

    async def here(function, *arguments):
        await trio.lowlevel.checkpoint()
        looks.append(function(*arguments[:2], NOW))
        return looks[-1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_quota, folder, 50.0, here)
        await trio.sleep(1.0)
        write(folder, "second", (20, 100))
        await trio.sleep(log_quota.LOOK_EVERY_SECS)
        nursery.cancel_scope.cancel()
    assert looks == [100, 100]
