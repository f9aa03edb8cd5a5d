"""`run_worker` with its signals, files and the embedded executor, against a server in memory."""

from __future__ import annotations

import os
import signal

import pytest
import trio

from actors.worker.config import ConfigError, WorkerConfig
from actors.worker.run import default_executor, run_worker
from tests.nix.real import needs_nix
from transport import messages as m
from transport.codec import Decoder, encode
from transport.loopback import Network

ENDPOINT = "loop://server"
CAPABILITIES = m.Capabilities(fetch=False, eval=True, build=True)


def config(tmp_path, **fields):
    given = {"systems": ("x86_64-linux",), "features": (), "cpu_core_score": 1.0}
    return WorkerConfig(
        server=ENDPOINT, state_dir=tmp_path / "state", executor="process", **(given | fields)
    )


class Server:
    def __init__(self, network):
        self.router = network.router(ENDPOINT)
        self.decoder = Decoder(m.WORKER_MESSAGES)
        self.inbox = []

    async def until(self, kind):
        with trio.fail_after(20):
            while True:
                while not self.inbox:
                    for peer, frames, _ in await self.router.receive():
                        self.peer = peer
                        self.inbox += [self.decoder.decode(frame) for frame in frames]
                message = self.inbox.pop(0)
                if isinstance(message, kind):
                    return message

    def send(self, *messages):
        self.router.send(self.peer, [encode(x) for x in messages])

    async def handshake(self):
        hello = await self.until(m.InitConnection)
        self.send(m.InitAck(1, "s", CAPABILITIES, ["*"], [], [], 120.0))
        announced = await self.until(m.WorkerCapabilities)
        self.send(m.JobListChunk([], is_final=True))
        return hello, announced


class Running:
    """A worker in a task; `code` is its exit code."""

    def __init__(self, nursery, network, config):
        self.code = None
        self.ended = trio.Event()
        nursery.start_soon(self.run, network, config)

    async def run(self, network, config):
        self.code = await run_worker(config, network.connector())
        self.ended.set()

    async def wait(self):
        with trio.fail_after(10):
            await self.ended.wait()
        return self.code


def assign(number, script):
    name = f"p{number}"
    job = m.BuildJob(
        "default", f"/nix/store/{name}.drv", name, {"out": f"/nix/store/{name}"},
        m.Requirement("x86_64-linux", []), [], 0, 0,
        {"builder": "/bin/sh", "args": ["-c", script]},
    )  # fmt: skip
    return m.AssignJob(f"j{number}", f"a{number}", job)


async def test_worker_builds_and_ends_on_sigterm(nursery, tmp_path):
    network = Network()
    server = Server(network)
    worker = Running(nursery, network, config(tmp_path, name="box"))
    hello, announced = await server.handshake()
    assert hello.id == (tmp_path / "state/worker-id").read_text().strip()
    assert hello.name == "box"
    assert hello.agent.startswith("headrace")
    assert hello.capabilities == CAPABILITIES
    assert announced.architectures == ["x86_64-linux"]
    server.send(assign(1, "echo hello; echo built > $out"))
    assert (await server.until(m.LogChunk)).data == b"hello\n"
    completed = await server.until(m.JobCompleted)
    assert [span.phase for span in completed.spans] == ["build"]
    server.send(m.Recorded("j1", "a1"))
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(m.Goodbye)
    assert await worker.wait() == 0


async def test_sigint_drains_too_and_is_told_apart(nursery, tmp_path):
    network = Network()
    server = Server(network)
    worker = Running(nursery, network, config(tmp_path))
    await server.handshake()
    server.send(assign(1, "echo $$; sleep 60"))
    pid = int((await server.until(m.LogChunk)).data)
    os.kill(os.getpid(), signal.SIGINT)
    assert (await server.until(m.JobFailed)).kind == "Canceled"
    assert await worker.wait() == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_second_signal_ends_at_once(nursery, tmp_path):
    network = Network()
    server = Server(network)
    worker = Running(nursery, network, config(tmp_path))
    await server.handshake()
    server.send(assign(1, "trap '' TERM; echo $$; sleep 60"))
    pid = int((await server.until(m.LogChunk)).data)
    os.kill(os.getpid(), signal.SIGTERM)
    await server.until(m.Draining)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await worker.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_second_worker_in_one_state_directory_is_refused(nursery, tmp_path):
    network = Network()
    server = Server(network)
    worker = Running(nursery, network, config(tmp_path))
    await server.handshake()
    with pytest.raises(ConfigError, match="another worker runs"):
        await run_worker(config(tmp_path), network.connector())
    os.kill(os.getpid(), signal.SIGTERM)
    assert await worker.wait() == 0


async def test_store_that_cannot_be_used_is_one_clear_error(tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(ConfigError, match="store cannot be used"):
        await run_worker(config(tmp_path, store=str(tmp_path / "store")), Network().connector())


async def test_unreadable_peers_file_is_refused_before_anything_starts(tmp_path):
    with pytest.raises(ConfigError, match="peers file"):
        await run_worker(config(tmp_path, peers_file=tmp_path / "none"), Network().connector())
    assert not (tmp_path / "state/builds").exists()


def test_nix_is_the_default_where_it_can_be_used(tmp_path, monkeypatch, caplog):
    assert default_executor(None) in ("nix", "process")
    program = tmp_path / "nix-store"
    program.write_text("#!/bin/sh\necho 'error: no such store' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert default_executor(None) == "process"
    assert "error: no such store" in caplog.text
    monkeypatch.setenv("PATH", "/nonexistent")
    assert default_executor(None) == "process"


@needs_nix
def test_nix_is_the_default_with_a_store_that_works(tmp_path, nix_env, monkeypatch):
    monkeypatch.setenv("NIX_CONFIG", nix_env["NIX_CONFIG"])
    assert default_executor(str(tmp_path / "store")) == "nix"


async def test_without_nix_its_executor_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    nix = WorkerConfig(server=ENDPOINT, state_dir=tmp_path, executor="nix")
    with pytest.raises(ConfigError, match="--executor process"):
        await run_worker(nix, Network().connector())
