"""`headrace explain`: why a job waits, or why it went where it went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from bin.client import connected
from bin.errors import NOT_RUNNABLE
from bin.options import Target, client_options, json_option, option
from bin.output import print_json, print_table, say
from bin.session import run
from bin.summary import clean, duration
from transport.interface import Connector
from transport.messages import CmdExplain, CmdExplainReply

NEEDS_SOMEBODY = frozenset(
    {"no_worker", "no_system", "no_feature", "wrong_kind", "not_authorized", "drained"}
)
"""Codes of jobs that no worker as it is now will ever run."""


@click.command()
@click.argument("job")
@option("--exit-code", is_flag=True, help="End with 5 while no connected worker can run the job.")
@json_option
@client_options
def explain(target: Target, job: str, as_json: bool, exit_code: bool) -> int:
    """Tell why JOB (id, unique prefix, drv path) waits, or why it went where it went."""

    async def work(connector: Connector) -> dict[str, Any]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            reply = await client.ask(CmdExplain(request=0, job=job), CmdExplainReply)
        return reply.explanation

    told = run(target, work)
    if as_json:
        print_json(told)
    else:
        _print(told)
    return NOT_RUNNABLE if exit_code and told["reason"]["code"] in NEEDS_SOMEBODY else 0


def _print(told: Mapping[str, Any]) -> None:
    reason = told["reason"]
    name = clean(told["name"] or told["job_id"])
    say(f"{clean(told['job_id'])} {name} ({clean(told['kind'])}) is {clean(told['status'])}")
    say(f"{clean(reason['code'])}: {clean(reason['text'])}")
    for needed in reason.get("inputs", ()):
        state = clean(needed["status"] or "not known yet")
        say(f"  needs {clean(needed['name'])} ({clean(needed['job_id'] or '-')}): {state}")
    workers = told.get("workers", ())
    if workers:
        say("")
        header, rows = worker_table(workers)
        print_table(header, rows)
        say("")
        for worker in workers:
            say(f"{clean(worker['name'])}: {clean(worker['why_not'])}; "
                f"would change it: {clean(worker['would_change'])}")  # fmt: skip
            if worker["last_request"] is not None:
                say(f"  {_unanswered(worker['last_request'])}")
    for away in told.get("away", ()):
        seen = duration(away["last_seen_secs"])
        say(f"{clean(away['name'])}: last seen {seen} ago, {clean(away['why_not'])}")
    for decision in told.get("decisions", ()):
        say("")
        _print_decision(decision)


def worker_table(workers: Any) -> tuple[list[str], list[list[object]]]:
    """A row per worker and a column per rule that says anything of any."""
    rules = list(dict.fromkeys(rule for w in workers for rule, s in w["rules"].items() if s))
    header = ["worker", "state", "total", "before it", *rules]
    rows: list[list[object]] = [
        [w["name"], w["code"], _number(w["total"]), w["outranked_by"],
         *(_number(w["rules"].get(rule)) for rule in rules)]
        for w in workers
    ]  # fmt: skip
    return header, rows


def _unanswered(request: Mapping[str, Any]) -> str:
    text = f"it asked {duration(request['secs_ago'])} ago and got nothing"
    if not request["candidates"]:
        return f"{text}: there was no candidate"
    if not request["best"]:
        return f"{text}: all {request['candidates']} candidates were vetoed"
    best = request["best"][0]
    return (
        f"{text}: the best of {request['candidates']} candidates, {clean(best['job_id'])}, "
        f"had {_number(best['total'])}"
    )


def _print_decision(decision: Mapping[str, Any]) -> None:
    outcome = decision["outcome"] or "running"
    say(
        f"{clean(decision['assignment_id'])}: to {clean(decision['worker'])} at "
        f"{clean(decision['claimed_at'])}, {clean(outcome)}"
    )
    if decision["error"]:
        say(f"  {clean(decision['error'])}")
    if decision["total"] is not None:
        parts = [f"{clean(rule)} {_number(s)}" for rule, s in decision["rules"].items() if s]
        say(f"  total {_number(decision['total'])}: {', '.join(parts) or 'no rule said anything'}")
    for rejected in decision["rejected"]:
        say(f"  before {clean(rejected['job_id'])} with {_number(rejected['total'])}")


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.1f}"
