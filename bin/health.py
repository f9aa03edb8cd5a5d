"""`headrace health`: exit code 0 when every actor lives and the ledger takes writes."""

from __future__ import annotations

import click

from bin.client import connected
from bin.errors import FAILED, ServerUnreachable
from bin.options import SECONDS, Target, client_options, json_option, option
from bin.output import print_json, say
from bin.session import run
from bin.summary import clean
from transport.interface import Connector
from transport.messages import CmdHealth, CmdHealthReply


@click.command()
@option(
    "--timeout",
    type=SECONDS,
    default=10.0,
    show_default=True,
    help="Seconds within which the server must answer.",
)
@json_option
@client_options
def health(target: Target, timeout: float, as_json: bool) -> int:
    """Ask the server whether it is well; fails unless it surely is.

    Every actor must show that it lives, and the ledger must take a write and make it durable.
    """

    async def work(connector: Connector) -> list[str]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            reply = await client.ask(CmdHealth(request=0), CmdHealthReply, timeout)
        return reply.problems

    try:
        problems = run(target, work)
    except ServerUnreachable as error:
        problems = [str(error)]
    if as_json:
        print_json({"ok": not problems, "problems": problems})
    else:
        say("; ".join(map(clean, problems)) or "ok")
    return FAILED if problems else 0
