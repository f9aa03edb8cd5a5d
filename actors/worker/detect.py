"""What this machine is: systems, features, processors, memory, the speed of a core."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from actors.nix.settings import NixFailed, show_config
from actors.worker.config import WorkerConfig
from transport import messages as m

log = logging.getLogger("headrace.worker")

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "i386": "i686", "armv8l": "armv7l"}

# One core of a common server processor of the early 2020s, in MiB/s of SHA-256.
_REFERENCE_MIB_PER_SECOND = 1_800
_SCORE_SECS = 0.1
_SCORE_ROUNDS = 5
_SCORE_FILE = "cpu-core-score"


class Systems(Struct, frozen=True):
    """What a machine can build."""

    architectures: tuple[str, ...]
    features: tuple[str, ...]


def detect(config: WorkerConfig) -> m.WorkerCapabilities:
    """What the worker announces: detected, each value replaced by the configured one.

    Blocks for up to some seconds, for Nix's answer.
    """
    systems, features = config.systems, config.features
    if systems is None or features is None:
        found = nix_systems() or Systems((own_system(),), ())
        systems = found.architectures if systems is None else systems
        features = found.features if features is None else features
    score = config.cpu_core_score
    return m.WorkerCapabilities(
        architectures=list(dict.fromkeys(map(as_sent, systems))),
        system_features=list(dict.fromkeys(features)),
        max_concurrent_builds=config.build_max_concurrent,
        cpu_count=os.cpu_count(),
        ram_total_mb=psutil.virtual_memory().total // 2**20,
        cpu_core_score=core_score(config.state_dir) if score is None else score,
        zone=config.zone or None,
        endpoint=config.endpoint or None,
    )


def as_sent(system: str) -> str:
    """The name that Nix has for a system: `macos` is its `darwin`."""
    cpu, dash, kernel = system.rpartition("-")
    return f"{cpu}{dash}darwin" if kernel == "macos" else system


def own_system() -> str:
    """The system of this machine as Python knows it."""
    machine = platform.machine().lower()
    kernel = "darwin" if sys.platform == "darwin" else sys.platform.rstrip("0123456789")
    return f"{_MACHINES.get(machine, machine)}-{kernel}"


def nix_systems() -> Systems | None:
    """Systems and features by Nix's own settings; none, and a log line, without an answer."""
    if shutil.which("nix") is None:
        log.info("no nix on PATH: this machine's own system is announced, and no features")
        return None
    try:
        return _systems_of(show_config(os.environ))
    except (NixFailed, LookupError, TypeError) as error:
        log.warning("%s; no features are announced", error)
        return None


def _systems_of(settings: dict[str, Any]) -> Systems:
    def words(name: str) -> list[str]:
        value = settings.get(name, [])
        return value.split() if isinstance(value, str) else [str(word) for word in value]

    system = settings["system"]
    if not isinstance(system, str) or not system:
        raise TypeError("the setting `system` is no text")
    # Listed for cross building of single instructions sets; no job is ever for one of these.
    extra = [p for p in words("extra-platforms") if not p.startswith("x86_64-v")]
    return Systems((system, *extra), tuple(words("system-features")))


def core_score(state_dir: Path) -> float:
    """Speed of one core, about 1.0 for a common one; measured once and kept in the state
    directory, so that a busy start does not make the machine look slow."""
    path = state_dir / _SCORE_FILE
    try:
        kept = float(path.read_text())
        if 0 < kept < 1e6:
            return kept
    except (OSError, ValueError):
        pass
    score = round(_measure(), 2)
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{score}\n")
    except OSError as error:
        log.warning("cannot keep the core score in %s: %s", path, error.strerror)
    return score


def _measure() -> float:
    """The best of several short rounds, each of compiled code only."""
    block = bytes(2**20)
    best = 0.0
    for _ in range(_SCORE_ROUNDS):
        blocks, start, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < _SCORE_SECS / _SCORE_ROUNDS:
            hashlib.sha256(block).digest()
            blocks += 1
            elapsed = time.perf_counter() - start
        best = max(best, blocks / elapsed)
    return max(0.01, best / _REFERENCE_MIB_PER_SECOND)
