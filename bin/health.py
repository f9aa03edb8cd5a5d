"""`headrace health`: whether a server does all of its work, for whoever watches it."""

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
    """Tell whether the server is well: 0 if it is, 1 with the reasons if not, 3 if it is not there.

    It is when every actor shows that it lives and the ledger makes a write durable, now.
    """

    async def work(connector: Connector) -> list[str]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            reply = await client.ask(CmdHealth(request=0), CmdHealthReply, timeout)
        return reply.problems

    code = FAILED
    try:
        wrong = run(target, work)
    except ServerUnreachable as error:
        wrong, code = [str(error)], error.code
    if as_json:
        print_json({"ok": not wrong, "reasons": wrong})
    else:
        say("; ".join(map(clean, wrong)) or "ok")
    return code if wrong else 0
