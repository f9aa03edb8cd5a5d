"""`headrace status` as a process, on a terminal and in a pipe, against a server on the wire."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import termios
from contextlib import asynccontextmanager

import pytest
import trio

from transport import messages as m

LIMIT_SECS = 20
ENVIRONMENT = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith("HEADRACE_") and name not in ("NO_COLOR", "FORCE_COLOR", "CI")
} | {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}


class Terminal:
    """The other end of a terminal of 80 columns, as a person sees it."""

    def __init__(self) -> None:
        self._master, self.slave = os.openpty()
        termios.tcsetwinsize(self.slave, (24, 80))
        os.set_blocking(self._master, False)
        self.settings = termios.tcgetattr(self.slave)
        self.seen = b""

    async def until(self, text: bytes) -> None:
        with trio.fail_after(LIMIT_SECS):
            while text not in self.seen:
                await trio.lowlevel.wait_readable(self._master)
                self.seen += os.read(self._master, 65536)

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def rest(self) -> bytes:
        try:
            while True:
                self.seen += os.read(self._master, 65536)
        except BlockingIOError:
            return self.seen

    def close(self) -> None:
        os.close(self._master)
        os.close(self.slave)


@asynccontextmanager
async def headrace(*args, **settings):
    process = await trio.lowlevel.open_process([sys.executable, "-m", "bin", *args], **settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


async def exit_code(process) -> int:
    with trio.fail_after(LIMIT_SECS):
        return await process.wait()


@pytest.fixture
def terminal():
    made = Terminal()
    yield made
    made.close()


@asynccontextmanager
async def on(terminal, wire, *args, **environment):
    async with headrace(
        "status", "--server", wire.endpoint, *args,
        stdin=terminal.slave, stdout=terminal.slave, stderr=terminal.slave,
        env=ENVIRONMENT | environment, preexec_fn=lambda: os.login_tty(os.dup(terminal.slave)),
    ) as process:  # fmt: skip
        yield process


def answer(server, status) -> None:
    server.on(m.CmdStatus, m.CmdStatusReply(request=0, status=status))


@pytest.mark.parametrize(("keys", "code"), [(b"xq", 0), (b"Q", 0), (b"\x03", 130)])
async def test_leaving_the_view_restores_the_terminal(terminal, server, wire, status, keys, code):
    answer(server, status)
    async with on(terminal, wire) as process:
        await terminal.until(b"amber")
        await terminal.until(b"nixpkgs")
        terminal.type(keys)
        assert await exit_code(process) == code
    seen = terminal.rest()
    assert b"Traceback" not in seen
    assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
    assert termios.tcgetattr(terminal.slave) == terminal.settings


async def test_the_view_follows(terminal, server, wire, status):
    later = copy.deepcopy(status)
    later["running"][0]["name"] = "coreutils-9.5"
    server.on(
        m.CmdStatus,
        m.CmdStatusReply(request=0, status=status),
        m.CmdStatusReply(request=0, status=later),
    )
    async with on(terminal, wire, "--interval", "0.1"):
        await terminal.until(b"hello-2.12.1")
        await terminal.until(b"coreutils-9.5")


async def test_no_colour(terminal, server, wire, status):
    answer(server, status)
    async with on(terminal, wire, NO_COLOR="1") as process:
        await terminal.until(b"nixpkgs")
        terminal.type(b"q")
        assert await exit_code(process) == 0
    assert not any(b"\x1b[3%d" % n in terminal.rest() for n in range(8))


async def test_a_dumb_terminal_gets_plain_lines(terminal, server, wire, status):
    answer(server, status)
    async with on(terminal, wire, TERM="dumb") as process:
        await terminal.until(b"cluster c-1: Waiting")
        process.send_signal(signal.SIGINT)
        assert await exit_code(process) == 130
    assert b"\x1b" not in terminal.rest()


async def read_until(stream, text: bytes, seen: bytes = b"") -> bytes:
    with trio.fail_after(LIMIT_SECS):
        while text not in seen:
            data = await stream.receive_some()
            assert data, seen
            seen += data
    return seen


async def test_a_pipe_gets_a_block_per_change(server, wire, status):
    later = copy.deepcopy(status)
    later["jobs"]["completed"] = 13
    same = copy.deepcopy(status)
    same["server"]["uptime_secs"] = 4_000
    replies = [m.CmdStatusReply(request=0, status=s) for s in (status, same, same, later)]
    server.on(m.CmdStatus, *replies)
    async with headrace(
        "status", "--watch", "--interval", "0.1", "--server", wire.endpoint,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        seen = await read_until(process.stdout, b"13 completed")
        seen = await read_until(process.stdout, b"\n\n", seen.partition(b"13 completed")[2])
        process.send_signal(signal.SIGINT)
        assert await exit_code(process) == 130
        assert await process.stderr.receive_some() == b""
    assert b"\x1b" not in seen
    assert b"12 completed" not in seen


async def test_the_view_outlives_its_server(server, wire, status):
    answer(server, status)
    async with headrace(
        "status", "--watch", "--interval", "0.1", "--server", wire.endpoint,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        await read_until(process.stdout, b"12 completed")
        wire.stop()
        await read_until(process.stderr, b"the server is gone")
        answer(server, status | {"jobs": {"completed": 14}})
        await wire.start()
        await read_until(process.stdout, b"14 completed")
        await read_until(process.stderr, b"is back")


async def test_nobody_listens():
    async with headrace(
        "status", "--once", "--server", "tcp://127.0.0.1:9", "--connect-timeout", "0.3",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT,
    ) as process:  # fmt: skip
        assert await exit_code(process) == 3
        said = await read_until(process.stderr, b"\n")
    assert said.startswith(b"headrace: cannot reach a server at tcp://127.0.0.1:9: connection re")
    assert said.count(b"127.0.0.1") == 1
