"""What an operator does to jobs and workers: `cancel`, `prioritize`, `drain`, `undrain`."""

from __future__ import annotations

from typing import TypeVar

import click

from bin.client import connected
from bin.options import Target, client_options, json_option, option
from bin.output import print_json, say
from bin.session import run
from bin.summary import clean
from transport.interface import Connector
from transport.messages import (
    CmdCancel,
    CmdCancelReply,
    CmdDone,
    CmdDrain,
    CmdPrioritize,
    CmdUndrain,
    Message,
)

M = TypeVar("M", bound=Message)


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@json_option
@client_options
def cancel(target: Target, targets: tuple[str, ...], as_json: bool) -> None:
    """Cancel jobs (ids, unique prefixes, drv paths), whole submissions or clusters.

    A member of a cluster takes all of it along. A job that another submission wants too goes on.
    A running one has ended only once its worker confirms: until then it is reported as requested.
    """
    reply = _ask(target, CmdCancel(request=0, targets=list(targets)), CmdCancelReply)
    print_cancelled(reply, as_json=as_json)


def print_cancelled(reply: CmdCancelReply, *, as_json: bool) -> None:
    """What became of cancelled jobs."""
    if as_json:
        print_json(
            {"aborted": reply.aborted, "requested": reply.requested, "unchanged": reply.unchanged}
        )
        return
    for job in reply.aborted:
        say(f"{clean(job)} aborted")
    for job in reply.requested:
        say(f"{clean(job)} abort requested")
    for job in reply.unchanged:
        say(f"{clean(job)} unchanged: it has ended, or another submission wants it")


@click.command()
@click.argument("targets", metavar="TARGET...", nargs=-1, required=True)
@option("--off", is_flag=True, help="Take the priority away again.")
@client_options
def prioritize(target: Target, targets: tuple[str, ...], off: bool) -> None:
    """Put jobs (ids, unique prefixes, drv paths) or submissions in front of all others."""
    request = CmdPrioritize(request=0, targets=list(targets), prioritized=not off)
    _done(target, request, "no longer prioritized" if off else "prioritized")


@click.command()
@click.argument("worker")
@option("--reason", default="", help="Shown in the status.")
@client_options
def drain(target: Target, worker: str, reason: str) -> None:
    """Give WORKER (its id) no more jobs; what it runs goes on. Kept until `undrain`."""
    _done(target, CmdDrain(request=0, worker=worker, reason=reason), f"{worker} is drained")


@click.command()
@click.argument("worker")
@client_options
def undrain(target: Target, worker: str) -> None:
    """Give WORKER (its id) jobs again."""
    _done(target, CmdUndrain(request=0, worker=worker), f"{worker} takes jobs again")


def _done(target: Target, request: Message, otherwise: str) -> None:
    """Asks, and says what the server says, or `otherwise` if that is nothing."""
    say(clean(_ask(target, request, CmdDone).message or otherwise))


def _ask(target: Target, request: Message, answer: type[M]) -> M:
    async def work(connector: Connector) -> M:
        async with connected(connector, target.server, target.connect_timeout) as client:
            return await client.ask(request, answer)

    return run(target, work)
