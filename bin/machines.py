"""`headrace machines`: a nix.machines file, for those who stay on Nix's ssh builders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bin.client import connected
from bin.options import Target, client_options, option
from bin.output import note, say
from bin.session import run
from bin.summary import clean
from transport.interface import Connector
from transport.messages import CmdStatus, CmdStatusReply


@click.command()
@option("--protocol", type=click.Choice(["ssh", "ssh-ng"]), default="ssh-ng", show_default=True)
@option("--user", help="User to log in as.")
@option("--ssh-key", metavar="FILE", default="-", help="Key file on the machine that builds.")
@client_options
def machines(target: Target, protocol: str, user: str | None, ssh_key: str) -> None:
    """Print the connected workers as lines of /etc/nix/machines.

    A worker's host is its --endpoint without the port, else its name. Workers that are draining or
    take no builds are left out.
    """

    async def work(connector: Connector) -> Mapping[str, Any]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            return (await client.ask(CmdStatus(request=0), CmdStatusReply)).status

    for worker in run(target, work)["workers"]:
        text = line(worker, protocol, user, ssh_key)
        if text is None:
            note(f"left out: {clean(worker['name'])}")
        else:
            say(text)


def line(worker: Mapping[str, Any], protocol: str, user: str | None, ssh_key: str) -> str | None:
    """A worker's line; None for one that builds nothing now.

    Fields: URI, systems, key, slots, speed factor (tenths of a common core), features, mandatory
    features, host key.
    """
    slots = worker["slots"]["build"]["max"]
    if worker["state"] != "active" or not slots or not worker["architectures"]:
        return None
    host = _host(worker["endpoint"] or worker["name"])
    speed = max(1, round(10 * (worker["cpu_core_score"] or 1)))
    return " ".join(
        (
            f"{protocol}://{f'{user}@' if user else ''}{host}",
            ",".join(worker["architectures"]),
            ssh_key,
            str(slots),
            str(speed),
            ",".join(worker["system_features"]) or "-",
            "-",
            "-",
        )
    )


def _host(endpoint: str) -> str:
    """`tcp://host:port`, `host:port`, `[v6]:port` or a name, without all but the host."""
    address = clean(endpoint).rpartition("//")[2]
    if address.startswith("["):
        return address[: address.find("]") + 1]
    return address.partition(":")[0] if address.count(":") == 1 else address
