"""`headrace demo`, whole: real server, real workers, real builds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import trio

from bin.children import start
from bin.demo import _summarize
from bin.errors import CommandError

LIMIT_SECS = 90


@pytest.fixture
def demo(tmp_path):
    """Starts `headrace demo ARGS` with its files in `tmp_path`."""
    environment = {n: v for n, v in os.environ.items() if not n.startswith("HEADRACE_")}
    running: list[subprocess.Popen[str]] = []

    def run(*args: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "bin", "demo", *args],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment | {"TMPDIR": str(tmp_path)},
        )  # fmt: skip
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=LIMIT_SECS)


def processes_of(home: Path) -> list[str]:
    """Command lines of processes that work in `home`, or were told of it."""
    running = psutil.process_iter(["cmdline", "cwd"])
    lines = [(" ".join(p.info["cmdline"] or ()), p.info["cwd"] or "") for p in running]
    return [line for line, cwd in lines if str(home) in line or cwd.startswith(str(home))]


def left_behind(home: Path) -> list[str]:
    return [*map(str, home.iterdir()), *processes_of(home)]


@pytest.mark.processes
def test_the_demo_builds_its_graph_and_leaves_nothing(demo, tmp_path):
    process = demo()
    out, err = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == 0, err
    lines = out.splitlines()
    assert lines[-1] == "61 of 61 built exactly once"
    assert lines[-2].startswith("by worker: amber ")
    assert lines[-3].startswith("61 of 61 jobs done in ")
    assert "\x1b" not in out
    states = lines[:-3]
    assert len(states) == len(set(states))
    assert states[-1] == "61/61 built"
    assert left_behind(tmp_path) == []


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"it ended without {text!r}: {process.stderr.read()}")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_demo_that_is_stopped_leaves_nothing(demo, tmp_path, number, code):
    process = demo()
    wait_for_line(process, "running")
    process.send_signal(number)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == code
    assert "Traceback" not in err
    assert left_behind(tmp_path) == []


@pytest.mark.processes
def test_a_demo_whose_worker_dies_says_so(demo, tmp_path):
    process = demo("--keep")
    wait_for_line(process, "running")
    (home,) = tmp_path.iterdir()
    victim = next(
        p for p in psutil.process_iter(["cmdline"])
        if {"worker", str(home / "birch")} <= set(p.info["cmdline"] or ())
    )  # fmt: skip
    victim.kill()
    _, err = process.communicate(timeout=LIMIT_SECS)
    assert process.returncode == 1
    assert "headrace: worker-birch ended with exit code -9" in err
    assert (home / "worker-birch.log").exists()
    assert processes_of(home) == []


# -- its parts -------------------------------------------------------------------------------


def row(name: str, **changes) -> dict:
    return {"name": name, "status": "Completed", "worker": "demo-amber", "error": None} | changes


@pytest.mark.parametrize(
    ("rows", "runs", "said"),
    [
        ([row("a"), row("b")], "a b", None),
        ([row("a"), row("b")], "a b b", "not built as it should be"),
        ([row("a"), row("b", status="Failed", error="exit code 1")], "a b",
         "b ended Failed: exit code 1"),
        ([row("a")], "a", "not built as it should be"),
    ],
)  # fmt: skip
def test_the_verdict(tmp_path, capsys, rows, runs, said):
    history = tmp_path / "history"
    history.write_text("\n".join(runs.split()) + "\n")
    if said is None:
        _summarize(rows, 2, 1.25, history)
        assert capsys.readouterr().out.splitlines() == [
            "2 of 2 jobs done in 1.2 s",
            "by worker: amber 2, birch 0, cedar 0",
            "2 of 2 built exactly once",
        ]
    else:
        with pytest.raises(CommandError, match=said) as error:
            _summarize(rows, 2, 1.0, history)
        assert error.value.code == 1


async def test_a_child_that_ends_is_told_with_its_last_line(tmp_path):
    child = await start("server", ["undrain"], tmp_path / "log")
    with trio.fail_after(LIMIT_SECS), pytest.raises(CommandError) as error:
        await child.watch()
    assert str(error.value).startswith("server ended with exit code 2: headrace: Missing argument")
    await child.stop()
