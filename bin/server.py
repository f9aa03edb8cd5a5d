"""`headrace server`: the assignment server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from actors.server.config import ServerConfig
from actors.server.main import CannotStart, run_server
from bin.errors import CommandError
from bin.log_options import log_option, start_logging
from bin.options import DEFAULT_SERVER, ENDPOINT, FILE, SECONDS, Command, option

DEFAULT_STATE_DIR = Path("headrace-state")
AT_LEAST_ONE = click.IntRange(min=1)


def _seconds(name: str, default: float, text: str) -> Callable[[Command], Command]:
    return option(name, type=SECONDS, default=default, show_default=True, help=f"Seconds {text}")


@click.command()
@option(
    "--listen",
    type=ENDPOINT,
    default=DEFAULT_SERVER,
    show_default=True,
    help="Address to listen on; port 0 lets the system choose.",
)
@option(
    "--state-dir",
    type=FILE,
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="Directory of the ledger, keys and logs.",
)
@option(
    "--ready-file",
    type=FILE,
    help="Written once the server accepts: endpoint, pid and public key, as JSON.",
)
@option("--policy", default="resource-aware", show_default=True, help="How jobs are scored.")
@option(
    "--fair-share", is_flag=True, help="Score jobs lower, the more of the farm their project has."
)
@_seconds("--heartbeat-timeout", 120, "of silence after which a worker is dropped; 0 = never.")
@_seconds("--tick", 5, "between two looks at what can start.")
@_seconds("--resync", 60, "between two full comparisons with the ledger.")
@option(
    "--page-size",
    type=click.IntRange(1, 1000),
    default=1000,
    show_default=True,
    help="Candidates a page.",
)
@_seconds("--idle-slot-ttl", 25, "that an unanswered request counts as a free cluster seat.")
@_seconds("--cluster-prepare-timeout", 30, "until all members of a cluster must have accepted.")
@_seconds("--cluster-retry-delay", 30, "until a cluster is tried again.")
@_seconds("--cluster-reserve-after", 600, "that a cluster waits before seats are kept for it.")
@_seconds("--cluster-reserve-timeout", 1800, "that seats are kept at most.")
@_seconds("--retry-backoff", 30, "until a failed job is retried, doubling.")
@option(
    "--max-attempts",
    type=AT_LEAST_ONE,
    default=3,
    show_default=True,
    help="Attempts that a job has in all.",
)
@_seconds("--answer-timeout", 10, "in which a worker must answer an assignment.")
@_seconds("--reconnect-grace", 30, "that a lost worker keeps its jobs.")
@option(
    "--keep-finished",
    type=click.FloatRange(min=0),
    default=30,
    show_default=True,
    metavar="DAYS",
    help="Days for which jobs that ended and their logs are kept; 0 = for ever.",
)
@option(
    "--log-quota",
    type=click.FloatRange(min=0),
    default=20,
    show_default=True,
    metavar="GIB",
    help="What all build logs may take on disk; beyond it the oldest go. 0 = any.",
)
@option("--registry", type=FILE, help="File of projects and their workers; none = open to all.")
@option("--curve", is_flag=True, help="Encrypt, and admit known keys only.")
@option("--insecure", is_flag=True, help="Allow any address without --curve.")
@option(
    "--max-workers",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Workers admitted at a time; 0 = no limit.",
)
@option("--chaos", is_flag=True, hidden=True, help="Let clients kill actors (headrace chaos).")
@log_option
def server(log_level: str, **settings: Any) -> int:
    """Run the assignment server; it never runs Nix itself.

    SIGTERM ends it once all it was told is durable; running builds go on and are taken up by the
    next server.
    """
    start_logging(log_level)
    try:
        return run_server(ServerConfig(**settings))
    except CannotStart as error:
        raise CommandError(str(error)) from None
