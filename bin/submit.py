"""`headrace submit`: queue what a file asks for."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from actors.graph.clusters import by_reference, resolve
from actors.graph.files import BadGraph, read_submission
from bin.client import connected, steady
from bin.errors import CommandError
from bin.options import Target, client_options, json_option, option
from bin.output import note, print_json, say
from bin.parts import cut
from bin.session import run
from bin.summary import clean
from bin.waiting import wait_for
from transport.interface import Connector
from transport.messages import CmdSubmit, CmdSubmitted

MAX_FILE_BYTES = 2**30


@click.command()
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
@json_option
@option("--assume-inputs-built", is_flag=True, help="Take inputs that nobody knows as built.")
@option("--wait", is_flag=True, help="Wait until all jobs of the file have ended.")
@client_options
def submit(
    target: Target, file: Path, as_json: bool, assume_inputs_built: bool, wait: bool
) -> None:
    """Queue the jobs of FILE (- for standard input), all of them or none.

    FILE is the JSON of `nix derivation show -r`, or {"jobs": [...], "evaluations": [...],
    "clusters": [...]}.
    """
    parts = prepare(file, assume_inputs_built)

    async def work(connector: Connector) -> None:
        async with connected(connector, target.server, target.connect_timeout) as client:
            answer = await client.submit(parts)
        _report(answer, as_json)
        if wait:
            jobs = [*answer.jobs.values(), *answer.evaluations]
            async with steady(connector, target.server, target.connect_timeout, note) as asker:
                (await wait_for(asker, jobs, None)).check(None)

    run(target, work)


def prepare(file: Path, assume_inputs_built: bool) -> list[CmdSubmit]:
    """Read, check and cut a file; raises `CommandError` that names the entry and the field."""
    source = "standard input" if str(file) == "-" else str(file)
    try:
        submission = read_submission(_read(file, source), source)
        resolved = resolve(submission.jobs, submission.evaluations, submission.clusters)
    except BadGraph as error:
        text = str(error)
        raise CommandError(text if text.startswith(source) else f"{source}: {text}") from None
    return cut(
        resolved.jobs,
        submission.evaluations,
        by_reference(resolved),
        assume_inputs_built=assume_inputs_built,
    )


def _read(file: Path, source: str) -> bytes:
    if str(file) == "-":
        data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    else:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise CommandError(f"{source}: larger than {MAX_FILE_BYTES} bytes; submit it in parts")
    return data


def _report(answer: CmdSubmitted, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "submission": answer.submission,
                "jobs": answer.jobs,
                "evaluations": answer.evaluations,
                "clusters": answer.clusters,
            }
        )
        return
    counts = [
        (len(answer.jobs), "build"), (len(answer.evaluations), "evaluation"),
        (len(answer.clusters), "cluster"),
    ]  # fmt: skip
    said = [f"{n} {noun}{'' if n == 1 else 's'}" for n, noun in counts if n]
    say(f"submitted {' and '.join(said)} as {answer.submission}")
    for cluster in answer.clusters:
        say(f"cluster {clean(cluster)}")
