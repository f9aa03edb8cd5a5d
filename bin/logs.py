"""`headrace logs`: what a job's newest run printed."""

from __future__ import annotations

import sys

import click
import trio

from bin.client import Steady, steady
from bin.options import Target, client_options, option
from bin.output import note
from bin.session import run
from transport.interface import Connector
from transport.messages import CmdLogs, CmdLogsReply

POLL_SECS = 0.3


@click.command()
@click.argument("job")
@option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@client_options
def logs(target: Target, job: str, follow: bool) -> None:
    """Print the log of JOB, byte for byte."""

    async def work(connector: Connector) -> None:
        async with steady(connector, target.server, target.connect_timeout, note) as asker:
            await print_log(asker, job, follow)

    run(target, work)


async def print_log(steady: Steady, job: str, follow: bool) -> None:
    """Write the log to stdout as it comes; without `follow` only what there is by now."""
    offset = 0
    while True:
        chunk = await steady.ask(CmdLogs(request=0, job=job, offset=offset), CmdLogsReply)
        # The answer tells the whole id; a prefix may become ambiguous while we follow.
        job, offset = chunk.job_id, chunk.offset
        sys.stdout.buffer.write(chunk.data)
        sys.stdout.buffer.flush()
        if chunk.is_end or not (chunk.data or follow):
            return
        if not chunk.data:
            await trio.sleep(POLL_SECS)
