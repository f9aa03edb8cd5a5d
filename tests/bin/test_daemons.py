"""What `headrace server` and `headrace worker` make of options and environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

import bin.server
import bin.worker
from actors.server.config import ServerConfig
from actors.server.main import CannotStart
from actors.worker.config import ConfigError, WorkerConfig
from bin.main import main


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    """Nothing of our own environment, and no logging set up for the rest of the tests."""
    for prefix in ("HEADRACE_", "GRADIENT_WORKER_"):
        for name in [n for n in os.environ if n.startswith(prefix)]:
            monkeypatch.delenv(name)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)


@pytest.fixture
def server_config(monkeypatch):
    """Runs `headrace server` up to its start; gives the configuration."""
    seen: list[ServerConfig] = []

    def run_server(config):
        seen.append(config)
        return 0

    monkeypatch.setattr(bin.server, "run_server", run_server)

    def run(*args: str) -> ServerConfig:
        assert main(["server", *args]) == 0
        return seen.pop()

    return run


@pytest.fixture
def worker_config(monkeypatch):
    """Runs `headrace worker` up to its start; gives the configuration."""
    seen: list[WorkerConfig] = []

    async def run_worker(config, _connector):
        seen.append(config)
        return 0

    monkeypatch.setattr(bin.worker, "run_worker", run_worker)

    def run(*args: str) -> WorkerConfig:
        assert main(["worker", *args]) == 0
        return seen.pop()

    return run


def test_the_server_has_the_defaults_of_its_configuration(server_config):
    config = server_config()
    assert config == ServerConfig(state_dir=Path("headrace-state"))


def test_every_setting_of_the_server(server_config):
    config = server_config(
        "--listen", "tcp://127.0.0.1:0", "--state-dir", "/s", "--ready-file", "/r",
        "--policy", "p", "--heartbeat-timeout", "0", "--tick", "1", "--resync", "2",
        "--page-size", "10", "--idle-slot-ttl", "3", "--cluster-prepare-timeout", "4",
        "--cluster-retry-delay", "5", "--cluster-reserve-after", "6",
        "--cluster-reserve-timeout", "7", "--retry-backoff", "8", "--max-attempts", "9",
        "--answer-timeout", "1.5", "--reconnect-grace", "11", "--registry", "/g", "--curve",
        "--insecure", "--max-workers", "12",
    )  # fmt: skip
    assert config == ServerConfig(
        listen="tcp://127.0.0.1:0", state_dir=Path("/s"), ready_file=Path("/r"), policy="p",
        heartbeat_timeout=0, tick=1, resync=2, page_size=10, idle_slot_ttl=3,
        cluster_prepare_timeout=4, cluster_retry_delay=5, cluster_reserve_after=6,
        cluster_reserve_timeout=7, retry_backoff=8, max_attempts=9, answer_timeout=1.5,
        reconnect_grace=11, registry=Path("/g"), curve=True, insecure=True, max_workers=12,
    )  # fmt: skip


def test_the_servers_environment(server_config, monkeypatch):
    monkeypatch.setenv("HEADRACE_STATE_DIR", "/var/lib/headrace")
    monkeypatch.setenv("HEADRACE_CURVE", "1")
    monkeypatch.setenv("HEADRACE_PAGE_SIZE", "7")
    config = server_config("--page-size", "8")
    assert (config.state_dir, config.curve, config.page_size) == (
        Path("/var/lib/headrace"),
        True,
        8,
    )


@pytest.mark.parametrize(
    "args", [["--page-size", "1001"], ["--tick", "-1"], ["--max-attempts", "0"], ["--listen", "x"]]
)
def test_settings_out_of_range(args, capsys):
    assert main(["server", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_cannot_start(monkeypatch, capsys):
    def run_server(_):
        raise CannotStart("--listen is open to the network: add --curve")

    monkeypatch.setattr(bin.server, "run_server", run_server)
    assert main(["server"]) == 2
    assert capsys.readouterr().err == "headrace: --listen is open to the network: add --curve\n"


def test_every_setting_of_a_worker(worker_config):
    config = worker_config(
        "--server", "ipc:///run/h", "--state-dir", "/s", "--id", "w", "--name", "n",
        "--executor", "nix", "--store", "/st", "--cache", "file:///c",
        "--build-max-concurrent", "4", "--eval-max-concurrent", "0",
        "--systems", "x86_64-linux, i686-linux", "--features", "kvm",
        "--cpu-core-score", "1.5", "--zone", "z", "--endpoint", "h:1", "--peers-file", "/p",
    )  # fmt: skip
    assert config == WorkerConfig(
        server="ipc:///run/h", state_dir=Path("/s"), id="w", name="n", executor="nix", store="/st",
        cache="file:///c", build_max_concurrent=4, eval_max_concurrent=0,
        systems=("x86_64-linux", "i686-linux"), features=("kvm",), cpu_core_score=1.5, zone="z",
        endpoint="h:1", peers_file=Path("/p"),
    )  # fmt: skip


@pytest.mark.parametrize("found", ["/usr/bin/nix-store", None])
def test_a_worker_needs_no_option(worker_config, monkeypatch, found):
    monkeypatch.setattr("shutil.which", lambda _: found)
    config = worker_config()
    assert config.executor == ("nix" if found else "process")
    assert (config.build_max_concurrent, config.eval_max_concurrent) == (1, 1)
    assert (config.systems, config.features) == (None, None)


def test_the_environment_of_a_gradient_worker(worker_config, monkeypatch):
    for name, value in {
        "BUILD_MAX_CONCURRENT": "3",
        "EVAL_MAX_CONCURRENT": "2",
        "SYSTEM_ARCHITECTURES": "x86_64-linux aarch64-macos",
        "SYSTEM_FEATURES": "kvm,benchmark",
        "SYSTEM_CPU_CORE_SCORE": "2",
        "ZONE": "z1",
        "ENDPOINT": "host:9",
    }.items():
        monkeypatch.setenv(f"GRADIENT_WORKER_{name}", value)
    monkeypatch.setenv("HEADRACE_ZONE", "z2")
    config = worker_config("--executor", "process")
    assert (config.build_max_concurrent, config.eval_max_concurrent) == (3, 2)
    assert config.systems == ("x86_64-linux", "aarch64-macos")
    assert config.features == ("kvm", "benchmark")
    assert (config.cpu_core_score, config.zone, config.endpoint) == (2, "z2", "host:9")


def test_a_worker_that_cannot_start(monkeypatch, capsys):
    async def run_worker(_config, _connector):
        raise ConfigError("another worker runs in /s; give each its own --state-dir")

    monkeypatch.setattr(bin.worker, "run_worker", run_worker)
    assert main(["worker", "--executor", "process"]) == 2
    assert "headrace: another worker runs in /s" in capsys.readouterr().err
    assert main(["worker", "--executor", "process", "--cache", "file:///c"]) == 2
    assert "--cache needs --executor nix" in capsys.readouterr().err


def test_the_exit_code_of_a_worker_is_the_commands(monkeypatch):
    async def run_worker(_config, _connector):
        return 130

    monkeypatch.setattr(bin.worker, "run_worker", run_worker)
    assert main(["worker", "--executor", "process"]) == 130
