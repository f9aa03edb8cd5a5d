"""`headrace chaos`: break a farm in every way, and check that nothing is lost."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

import click
import msgspec

from bin.chaos.run import Run, Settings
from bin.chaos.verdict import Report, report_lines
from bin.errors import FAILED, CommandError
from bin.interrupts import stopped_by_signals
from bin.options import FILE, Target, json_option, option
from bin.output import note, print_json, say
from bin.session import run
from transport.interface import Connector

DEFAULT_SECONDS = 60.0
_POSITIVE = click.FloatRange(min=0, min_open=True)
_SEEDS = 1_000_000


@click.command()
@option("--minutes", type=_POSITIVE, help="How long there are faults.")
@option("--seconds", type=_POSITIVE, help="The same in seconds; 60 when neither is given.")
@option("--seed", type=click.IntRange(min=0), help="Decides faults and jobs; random by default.")
@option("--workers", type=click.IntRange(1, 50), default=3, show_default=True, help="Workers.")
@option(
    "--jobs",
    type=click.IntRange(min=1),
    default=40,
    show_default=True,
    help="Jobs that are kept open.",
)
@option("--state-dir", type=FILE, help="Directory for everything, empty or new; it is kept.")
@json_option
def chaos(
    minutes: float | None,
    seconds: float | None,
    seed: int | None,
    workers: int,
    jobs: int,
    state_dir: Path | None,
    as_json: bool,
) -> int:
    """Run a server and workers, break them in every way, and check that nothing is lost.

    Kills, stops and pauses processes, kills actors, cuts and holds connections, fills disks and
    locks the ledger, by a schedule that the seed decides, while jobs are submitted; then lets
    all end, and checks every job, output, claim and process. Fails unless all holds. As root
    the disks are file systems of their own, mounted for as long as it runs.
    """
    if minutes is not None and seconds is not None:
        raise click.UsageError("give --minutes or --seconds, not both")
    settings = Settings(
        seed=secrets.randbelow(_SEEDS) if seed is None else seed,
        seconds=(minutes * 60 if minutes is not None else seconds) or DEFAULT_SECONDS,
        workers=workers,
        jobs=jobs,
    )
    # The address is known only once the server runs; no keys on the loopback.
    target = Target("", None, None, 0)
    report = run(target, lambda connector: _chaos(connector, settings, state_dir))
    if as_json:
        print_json(msgspec.to_builtins(report))
    else:
        for line in report_lines(report):
            say(line)
    return FAILED if report.violations else 0


async def _chaos(connector: Connector, settings: Settings, state_dir: Path | None) -> Report:
    async with stopped_by_signals():
        home = _home(state_dir)
        keep = state_dir is not None
        try:
            report = await Run(settings, home, connector, note, keep=keep).go()
            if keep or report.violations:
                keep = True
                report.directory = str(home)
        finally:
            if not keep:
                shutil.rmtree(home, ignore_errors=True)
        return report


def _home(state_dir: Path | None) -> Path:
    if state_dir is None:
        return Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    state_dir.mkdir(parents=True, exist_ok=True)
    if any(state_dir.iterdir()):
        raise CommandError(f"--state-dir {state_dir} is not empty: give a new directory")
    return state_dir.absolute()
