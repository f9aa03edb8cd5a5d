"""The server's settings, checked once at start."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class ServerConfig(Struct, frozen=True, kw_only=True):
    """Every option of `headrace server`; durations in seconds."""

    state_dir: Path
    listen: str = "tcp://127.0.0.1:7420"
    ready_file: Path | None = None
    policy: str = "resource-aware"
    fair_share: bool = False
    """With the rule `fair-share`."""
    heartbeat_timeout: float = 120.0
    """Silence after which a worker is dropped; 0 = never."""
    tick: float = 5.0
    resync: float = 60.0
    page_size: int = 1000
    idle_slot_ttl: float = 25.0
    cluster_prepare_timeout: float = 30.0
    cluster_retry_delay: float = 30.0
    cluster_reserve_after: float = 600.0
    cluster_reserve_timeout: float = 1800.0
    retry_backoff: float = 30.0
    max_attempts: int = 3
    answer_timeout: float = 10.0
    reconnect_grace: float = 30.0
    abort_timeout: float = 300.0
    """How long an abort may stay unconfirmed before the claim is freed."""
    max_losses: int = 5
    registry: Path | None = None
    curve: bool = False
    insecure: bool = False
    max_workers: int = 0
    """0 = no limit."""
    chaos: bool = False
    """Takes `CmdKillActor`, for tests under faults."""

    keep_finished: float = 30.0
    """Days for which jobs that ended are kept; 0 = for ever."""
    log_quota: float = 20.0
    """GiB that all build logs may take; 0 = any."""

    @property
    def orphan_grace(self) -> float:
        """How long a dead server's claims wait for their worker's return."""
        return self.heartbeat_timeout or 120.0
