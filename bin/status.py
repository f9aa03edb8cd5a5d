"""`headrace status`: who is here, and what runs, waits and failed."""

from __future__ import annotations

import click

from bin import summary
from bin.client import steady
from bin.live import ask_status, follow
from bin.options import Target, client_options, json_option, option
from bin.output import note, print_json, say
from bin.session import run
from transport.interface import Connector


@click.command()
@option("--once", is_flag=True, help="Print one plain block and exit.")
@json_option
@option("--watch", is_flag=True, help="Follow the status (without --once and --json the default).")
@option("--interval", type=click.FloatRange(min=0.1), help="Seconds between two looks.")
@client_options
def status(target: Target, once: bool, as_json: bool, watch: bool, interval: float | None) -> None:
    """Watch workers and jobs.

    On a terminal a live view, q ends it. Elsewhere plain lines, one block per change.
    """
    if watch and (once or as_json):
        raise click.UsageError("--watch follows, --once and --json print once; choose one")

    async def work(connector: Connector) -> None:
        async with steady(connector, target.server, target.connect_timeout, note) as asker:
            if as_json:
                print_json(await ask_status(asker))
            elif once:
                say("\n".join(summary.lines(await ask_status(asker))))
            else:
                await follow(asker, interval=interval)

    run(target, work)
