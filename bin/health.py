"""`headrace health`: whether a server does all of its work, for whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bin.client import connected
from bin.errors import FAILED
from bin.options import Target, client_options, json_option
from bin.output import print_json, say
from bin.session import run
from transport.interface import Connector
from transport.messages import CmdStatus, CmdStatusReply


@click.command()
@json_option
@client_options
def health(target: Target, as_json: bool) -> int:
    """Tell whether the server is well: 0 if it is, 1 with the reasons if not, 3 if it is not there.

    It is not while an actor is down or restarting, while the ledger refuses writes, and once it
    was told to stop.
    """

    async def work(connector: Connector) -> dict[str, Any]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            return (await client.ask(CmdStatus(request=0), CmdStatusReply)).status

    wrong = ailments(run(target, work)["server"])
    if as_json:
        print_json({"ok": not wrong, "reasons": wrong})
    else:
        say("; ".join(wrong) or "ok")
    return FAILED if wrong else 0


def ailments(server: Mapping[str, Any]) -> list[str]:
    """What is wrong, by the `server` part of a status."""
    wrong = [
        f"actor {name} is down"
        for name, actor in server.get("actors", {}).items()
        if not actor.get("up", True)
    ]
    if server.get("ledger_refuses_writes"):
        wrong.append("the ledger refuses writes: see the server's log")
    if server.get("is_stopping"):
        wrong.append("the server is stopping")
    return wrong
