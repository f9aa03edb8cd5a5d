"""`headrace cluster`: jobs that start together, listed, shown and cancelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import click

from actors.ledger.records import ClusterStatus
from bin.client import Client, connected
from bin.operate import print_cancelled
from bin.options import Target, client_options, json_option, option
from bin.output import print_json, print_table, say
from bin.session import run
from bin.summary import clean
from transport.interface import Connector
from transport.messages import (
    CmdCancelReply,
    CmdCluster,
    CmdClusterCancel,
    CmdClusterReply,
    CmdClusters,
    CmdClustersReply,
)

COLUMNS = (
    "id", "status", "members", "attempts", "retry_budget", "attempt", "created_at", "ended_at"
)  # fmt: skip
MEMBERS = ("role", "index", "primary", "pin", "job_id", "name", "status", "worker")
SEATS = ("role", "index", "worker", "assignment_id", "outcome", "error")


@click.group()
def cluster() -> None:
    """Jobs that start together on distinct workers, or not at all."""


@cluster.command("list")
@json_option
@option(
    "--status",
    type=click.Choice(get_args(ClusterStatus), case_sensitive=False),
    help="Only clusters of this status.",
)
@client_options
def list_clusters(target: Target, as_json: bool, status: str | None) -> None:
    """List clusters, in the order of their ids."""

    async def work(connector: Connector) -> list[dict[str, Any]]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            return await all_clusters(client, status)

    rows = run(target, work)
    if as_json:
        print_json(rows)
    else:
        print_table(COLUMNS, [[row.get(name) for name in COLUMNS] for row in rows])


async def all_clusters(client: Client, status: str | None = None) -> list[dict[str, Any]]:
    """Every cluster, page by page; those of one status when it is given."""
    rows: list[dict[str, Any]] = []
    after: str | None = None
    while True:
        request = CmdClusters(request=0, status=status, after=after)
        page = await client.ask(request, CmdClustersReply)
        rows += page.clusters
        after = page.next
        if after is None:
            return rows


@cluster.command()
@click.argument("name", metavar="CLUSTER")
@json_option
@client_options
def show(target: Target, name: str, as_json: bool) -> None:
    """Show CLUSTER (id or unique prefix): its members, why it waits, its attempts and seats."""

    async def work(connector: Connector) -> dict[str, Any]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            reply = await client.ask(CmdCluster(request=0, cluster=name), CmdClusterReply)
        return reply.cluster

    shown = run(target, work)
    if as_json:
        print_json(shown)
    else:
        _print(shown)


@cluster.command()
@click.argument("names", metavar="CLUSTER...", nargs=-1, required=True)
@json_option
@client_options
def cancel(target: Target, names: tuple[str, ...], as_json: bool) -> None:
    """Cancel clusters (ids or unique prefixes) with all their members."""

    async def work(connector: Connector) -> CmdCancelReply:
        async with connected(connector, target.server, target.connect_timeout) as client:
            request = CmdClusterCancel(request=0, clusters=list(names))
            return await client.ask(request, CmdCancelReply)

    print_cancelled(run(target, work), as_json=as_json)


def _print(shown: Mapping[str, Any]) -> None:
    zone = ", in one zone" if shown["same_zone"] else ""
    say(
        f"cluster {clean(shown['id'])} is {clean(shown['status'])}{zone}: "
        f"{shown['attempts']} attempts, {shown['retry_budget']} retries left"
    )
    if shown["reason"] is not None:
        say(f"{clean(shown['reason']['code'])}: {clean(shown['reason']['text'])}")
    say("")
    print_table(MEMBERS, [[row.get(name) for name in MEMBERS] for row in shown["members"]])
    for attempt in shown["history"]:
        outcome = attempt["outcome"] or ("running" if attempt["started_at"] else "preparing")
        say("")
        say(
            f"attempt {clean(attempt['attempt'])}: {clean(outcome)}, made "
            f"{clean(attempt['created_at'])}, started {clean(attempt['started_at'] or '-')}, "
            f"finished {clean(attempt['finished_at'] or '-')}"
        )
        print_table(SEATS, [[seat.get(name) for name in SEATS] for seat in attempt["seats"]])
