"""What may go wrong in a simulated farm: one frozen value, and presets by name."""

from __future__ import annotations

from msgspec import Struct


class Faults(Struct, frozen=True, kw_only=True):
    """Rates are per second of virtual time, chances per occasion, delays in seconds."""

    delay: tuple[float, float] = (0.0005, 0.005)
    cuts: float = 0.0
    """A connection is lost, with all that is under way on it, both ways."""
    worker_crashes: float = 0.0
    """A worker loses all memory, its jobs included."""
    worker_drains: float = 0.0
    server_crashes: float = 0.0
    """The server loses all memory between two steps, or between a commit and its sends."""
    server_stops: float = 0.0
    """SIGTERM, and a new server."""
    dispatch_restarts: float = 0.0
    pager_restarts: float = 0.0
    cancels: float = 0.0
    cordons: float = 0.0
    failing_commits: float = 0.0
    deferred_commits: float = 0.0
    """The lock was not had on the loop: results come later."""
    slow_commits: float = 0.0
    """The disk takes seconds: the loop stands still over a commit, syncs and deferred commits
    come late."""
    power_losses: float = 0.0
    """A crash of the server takes the machine along, and with it what was not synced."""
    wall_jumps: float = 0.0
    """The wall clock is set, by seconds or by years, either way."""
    failures: float = 0.05
    """A job ends otherwise than well."""
    declines: float = 0.0
    full_peers: float = 0.0
    """A peer does not read for a while: its messages wait."""
    full_channels: float = 0.0
    """An actor's inbox is full: the pager starts anew, submissions and questions are refused."""
    duplicate_reports: float = 0.0
    stale_reports: float = 0.0
    """A worker reports a job as completed under an assignment that it lost."""
    clusters: float = 0.0
    """A submission has clusters; workers are more then, and sit in zones."""
    deaf_seats: float = 0.0
    """A cluster's `AssignJob` is never answered."""
    deaths: float = 0.0
    """A worker that crashed never comes back; the first two always do."""


PRESETS: dict[str, Faults] = {
    "calm": Faults(),
    "slow": Faults(delay=(0.01, 2.0), full_peers=0.05),
    "cuts": Faults(cuts=0.08, duplicate_reports=0.2, stale_reports=0.3),
    "workers": Faults(
        worker_crashes=0.06, worker_drains=0.04, declines=0.2, deaths=0.4, stale_reports=0.1
    ),
    "servers": Faults(server_crashes=0.05, server_stops=0.02),
    "actors": Faults(dispatch_restarts=0.08, pager_restarts=0.1, full_channels=0.02, cuts=0.02),
    "ledger": Faults(failing_commits=0.05, deferred_commits=0.2, slow_commits=0.02),
    "power": Faults(
        server_crashes=0.05, power_losses=0.7, wall_jumps=0.02, slow_commits=0.01,
        deferred_commits=0.05, failing_commits=0.02, cuts=0.02,
    ),
    "clusters": Faults(
        clusters=1.0, delay=(0.0005, 0.3), cuts=0.008, worker_crashes=0.002, worker_drains=0.002,
        server_crashes=0.004, server_stops=0.002, dispatch_restarts=0.006, pager_restarts=0.01,
        cancels=0.02, cordons=0.004, failing_commits=0.02, deferred_commits=0.1, declines=0.05,
        deaf_seats=0.12, duplicate_reports=0.1, stale_reports=0.05, failures=0.12,
    ),
    "people": Faults(cancels=0.1, cordons=0.05, failures=0.15),
    "storm": Faults(
        delay=(0.0005, 0.5), cuts=0.04, worker_crashes=0.02, worker_drains=0.02,
        server_crashes=0.02, server_stops=0.01, dispatch_restarts=0.03, pager_restarts=0.03,
        cancels=0.03, cordons=0.02, failing_commits=0.02, deferred_commits=0.1, declines=0.1,
        full_peers=0.02, full_channels=0.005, slow_commits=0.005, power_losses=0.5,
        wall_jumps=0.01, duplicate_reports=0.1, stale_reports=0.05, deaths=0.2, failures=0.1,
    ),
}  # fmt: skip
