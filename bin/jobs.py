"""`headrace jobs` and `headrace wait`."""

from __future__ import annotations

from typing import Any, get_args

import click

from actors.ledger.records import Status
from bin.client import Client, connected, steady
from bin.options import SECONDS, Target, client_options, json_option, option
from bin.output import note, print_json, print_table
from bin.session import run
from bin.waiting import wait_for
from transport.interface import Connector
from transport.messages import CmdJobs, CmdJobsReply

COLUMNS = ("job_id", "kind", "status", "name", "worker", "assignment_id", "attempts", "cluster")


@click.command()
@json_option
@option(
    "--status",
    type=click.Choice(get_args(Status), case_sensitive=False),
    help="Only jobs of this status.",
)
@client_options
def jobs(target: Target, as_json: bool, status: str | None) -> None:
    """List jobs, in the order of their ids."""

    async def work(connector: Connector) -> None:
        async with connected(connector, target.server, target.connect_timeout) as client:
            rows = await all_jobs(client, status)
        if as_json:
            print_json(rows)
        else:
            print_table(COLUMNS, [[row.get(name) for name in COLUMNS] for row in rows])

    run(target, work)


async def all_jobs(client: Client, status: str | None = None) -> list[dict[str, Any]]:
    """Every job, page by page; those of one status when it is given."""
    rows: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        page = await client.ask(CmdJobs(request=0, status=status, after=after), CmdJobsReply)
        rows += page.jobs
        after = page.next
        if after is None:
            return rows


@click.command()
@click.argument("jobs", nargs=-1)
@option("--timeout", type=SECONDS, help="Seconds to wait at most.")
@json_option
@client_options
def wait(target: Target, jobs: tuple[str, ...], timeout: float | None, as_json: bool) -> None:
    """Wait until JOBS have ended, or all jobs; fails if one did not complete."""

    async def work(connector: Connector) -> None:
        async with steady(connector, target.server, target.connect_timeout, note) as asker:
            waited = await wait_for(asker, jobs, timeout)
        if as_json:
            print_json({"open": waited.open, "failed": waited.failed})
        waited.check(timeout)

    run(target, work)
