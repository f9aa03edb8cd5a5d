"""`headrace worker`: one per build machine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from actors.worker.config import ConfigError, ExecutorName, WorkerConfig, parse_list
from actors.worker.run import default_executor, run_worker
from bin.errors import CommandError
from bin.log_options import log_option, start_logging
from bin.options import DEFAULT_SERVER, ENDPOINT, FILE, Target, option
from bin.session import run

DEFAULT_STATE_DIR = Path("headrace-worker")
SLOTS = click.IntRange(min=0)


def _list(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
    return None if text is None else parse_list(text)


@click.command()
@option(
    "--server",
    type=ENDPOINT,
    default=DEFAULT_SERVER,
    show_default=True,
    help="Address of the server.",
)
@option(
    "--state-dir",
    type=FILE,
    default=DEFAULT_STATE_DIR,
    show_default=True,
    help="Directory of the worker's id, store and builds.",
)
@option("--id", help="Worker id, instead of the one kept in the state directory.")
@option("--name", help="Name for people; the machine's name by default.")
@option(
    "--executor",
    type=click.Choice(["nix", "process"]),
    help="How jobs are run: by Nix, which is the default where it is installed, or by process,"
    " which is embedded and needs no Nix.",
)
@option("--store", metavar="URI", help="Nix store; for process a directory workers may share.")
@option("--cache", metavar="URI", help="Binary cache for inputs and outputs (with nix).")
@option("--cache-key", type=FILE, help="Secret key that signs what is written to the cache.")
@option(
    "--build-max-concurrent",
    also="GRADIENT_WORKER_BUILD_MAX_CONCURRENT",
    type=SLOTS,
    default=1,
    show_default=True,
    help="Builds at a time.",
)
@option(
    "--eval-max-concurrent",
    also="GRADIENT_WORKER_EVAL_MAX_CONCURRENT",
    type=SLOTS,
    default=1,
    show_default=True,
    help="Evaluations at a time.",
)
@option(
    "--eval-max-memory",
    "eval_max_memory_mb",
    type=SLOTS,
    default=0,
    show_default=True,
    metavar="MIB",
    help="Memory that one evaluation by Nix may take; 0 = no limit.",
)
@option(
    "--systems",
    also="GRADIENT_WORKER_SYSTEM_ARCHITECTURES",
    metavar="LIST",
    callback=_list,
    help="Systems it builds for, instead of the detected ones.",
)
@option(
    "--features",
    also="GRADIENT_WORKER_SYSTEM_FEATURES",
    metavar="LIST",
    callback=_list,
    help="System features, instead of the detected ones.",
)
@option(
    "--cpu-core-score",
    also="GRADIENT_WORKER_SYSTEM_CPU_CORE_SCORE",
    type=float,
    help="Speed of a core, 1 = a common one; measured when not given.",
)
@option("--zone", also="GRADIENT_WORKER_ZONE", help="Zone, for clusters that stay within one.")
@option(
    "--endpoint",
    also="GRADIENT_WORKER_ENDPOINT",
    help="Address at which other cluster members reach this machine.",
)
@option("--peers-file", type=FILE, help="Tokens, one PEER:TOKEN a line; * for every peer.")
@option("--server-key", type=FILE, help="File with the server's public CURVE key.")
@option("--key", type=FILE, help="File with the worker's own CURVE key pair.")
@log_option
def worker(
    log_level: str,
    executor: ExecutorName | None,
    server_key: Path | None,
    key: Path | None,
    **settings: Any,
) -> int:
    """Run a worker: it asks the server for jobs and runs them, until SIGTERM."""
    start_logging(log_level)
    try:
        executor = executor or default_executor(settings["store"])
        config = WorkerConfig(executor=executor, **settings)
        target = Target(config.server, server_key, key, 0)
        return run(target, partial(run_worker, config))
    except ConfigError as error:
        raise CommandError(str(error)) from None
