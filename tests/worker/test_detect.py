from __future__ import annotations

import json
import logging
import os
import stat

import pytest

from actors.nix import settings as nix_settings
from actors.worker.config import WorkerConfig
from actors.worker.detect import as_sent, core_score, detect, nix_systems, own_system
from actors.worker.metrics import MachineMetrics, oom_kills, session_members, session_rss

SETTINGS = {
    "system": {"value": "x86_64-linux"},
    "extra-platforms": {"value": ["i686-linux", "x86_64-v2-linux"]},
    "system-features": {"value": ["big-parallel", "kvm"]},
}


def config(tmp_path, **fields):
    return WorkerConfig(
        server="tcp://127.0.0.1:1", state_dir=tmp_path / "state", executor="process", **fields
    )


@pytest.fixture
def nix(tmp_path, monkeypatch):
    """Puts a `nix` on PATH that is this shell script."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", f"{bin_dir}:/usr/bin:/bin")

    def write(script):
        file = bin_dir / "nix"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(stat.S_IRWXU)

    return write


def test_settings_come_from_the_newer_command(nix):
    nix(f"test \"$3 $4\" = 'config show' || exit 1; echo '{json.dumps(SETTINGS)}'")
    found = nix_systems()
    assert found.architectures == ("x86_64-linux", "i686-linux")
    assert found.features == ("big-parallel", "kvm")


def test_settings_come_from_the_older_command(nix):
    nix(f"test \"$3\" = show-config || exit 1; echo '{json.dumps(SETTINGS)}'")
    assert nix_systems().features == ("big-parallel", "kvm")


@pytest.mark.parametrize("script", ["exit 3", "echo no json", "echo '[]'", "echo '{}'"])
def test_nix_without_an_answer_means_no_features_and_a_line(nix, tmp_path, caplog, script):  # 27
    nix(script)
    caplog.set_level(logging.INFO)
    found = detect(config(tmp_path, cpu_core_score=1.0))
    assert found.architectures == [own_system()]
    assert found.system_features == []
    assert "no features" in caplog.text


def test_nix_that_hangs_is_not_waited_for(nix, monkeypatch, caplog):
    monkeypatch.setattr(nix_settings, "_CONFIG_LIMIT_SECS", 0.2)
    nix("exec sleep 60")
    assert nix_systems() is None
    assert "no answer within" in caplog.text


def test_machine_without_nix_starts_all_the_same(tmp_path, monkeypatch, caplog):  # 27
    monkeypatch.setenv("PATH", str(tmp_path))
    caplog.set_level(logging.INFO)
    found = detect(config(tmp_path, cpu_core_score=1.0))
    assert found.architectures == [own_system()]
    assert found.system_features == []
    assert "no nix" in caplog.text


def test_overrides_replace_the_lists_whole_and_ask_nothing(nix, tmp_path):  # 28
    nix(f"touch {tmp_path}/asked")
    found = detect(
        config(tmp_path, systems=("aarch64-macos", "a-linux"), features=(), cpu_core_score=2.5)
    )
    assert found.architectures == ["aarch64-darwin", "a-linux"]
    assert found.system_features == []
    assert found.cpu_core_score == 2.5
    assert not (tmp_path / "asked").exists()


def test_one_override_leaves_the_other_list_detected(nix, tmp_path):
    nix(f"echo '{json.dumps(SETTINGS)}'")
    found = detect(config(tmp_path, features=("gpu",), cpu_core_score=1.0))
    assert found.architectures == ["x86_64-linux", "i686-linux"]
    assert found.system_features == ["gpu"]


def test_machine_and_empty_texts(tmp_path):
    found = detect(config(tmp_path, systems=("s",), features=(), zone="", endpoint="",
                          build_max_concurrent=7, cpu_core_score=1.0))  # fmt: skip
    assert found.max_concurrent_builds == 7
    assert found.cpu_count == os.cpu_count()
    assert found.ram_total_mb > 0
    assert found.zone is None
    assert found.endpoint is None


@pytest.mark.parametrize(
    ("machine", "platform", "expected"),
    [
        ("x86_64", "linux", "x86_64-linux"),
        ("AMD64", "freebsd14", "x86_64-freebsd"),
        ("arm64", "darwin", "aarch64-darwin"),
    ],
)
def test_own_system(monkeypatch, machine, platform, expected):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", platform)
    assert own_system() == expected


def test_macos_is_sent_as_darwin():
    assert as_sent("x86_64-macos") == "x86_64-darwin"
    assert as_sent("x86_64-linux") == "x86_64-linux"
    assert as_sent("builtin") == "builtin"


def test_core_score_is_measured_once(tmp_path, monkeypatch):
    first = core_score(tmp_path)
    assert first > 0
    monkeypatch.setattr("actors.worker.detect._measure", lambda: 99.0)
    assert core_score(tmp_path) == first
    (tmp_path / "cpu-core-score").write_text("nan")
    assert core_score(tmp_path) == 99.0


def test_metrics_are_within_their_ranges():
    metrics = MachineMetrics().read({"j1": 5})
    assert metrics.cpu_usage_pct is None  # too soon to say
    assert metrics.ram_free_mb > 0
    assert metrics.build_peak_ram_mb == {"j1": 5}
    assert MachineMetrics().read({}).build_peak_ram_mb is None


def test_own_session_has_members_and_memory():
    leader = os.getsid(0)
    assert os.getpid() in session_members(leader)
    assert session_rss(leader) > 2**20


def test_oom_counter_can_be_read_or_is_unknown():
    count = oom_kills()
    assert count is None or count >= 0
