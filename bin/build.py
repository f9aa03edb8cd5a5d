"""`headrace build`: evaluate a Nix file or flake on the farm, build it, and follow it."""

from __future__ import annotations

import shutil
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import trio

from actors.nix.settings import BadKey, Nix, plain
from bin.client import Steady, connected, steady
from bin.errors import FAILED, CommandError
from bin.options import Target, client_options, json_option, option
from bin.output import note, print_json, say
from bin.parts import cut
from bin.session import run
from bin.summary import clean
from transport.interface import Connector
from transport.messages import (
    CmdCancel,
    CmdCancelReply,
    CmdLogs,
    CmdLogsReply,
    CmdResult,
    CmdResultReply,
    EvalSource,
    SubmittedEvaluation,
)

POLL_SECS = 0.2
ENDED = frozenset({"Completed", "Failed", "TimedOut", "DependencyFailed", "Aborted"})
LOG_LINES = 20
CANCEL_SECS = 2.0


@click.command()
@click.argument("what", metavar="TARGET")
@option("--attr", "-A", "attributes", multiple=True, help="Attribute to build; * is a wildcard.")
@option("--out-link", metavar="NAME", help="Link to the outputs, which are fetched to this store.")
@option("--cache", metavar="URI", help="The farm's binary cache, to fetch the outputs from.")
@option("--project", default="default", show_default=True, help="Project of the jobs.")
@json_option
@client_options
def build(
    target: Target,
    what: str,
    attributes: tuple[str, ...],
    out_link: str | None,
    cache: str | None,
    project: str,
    as_json: bool,
) -> int:
    """Evaluate TARGET on the farm, build it there, and print the output paths.

    TARGET is a Nix file, a directory with a default.nix, or a flake reference with `#attribute`. A
    worker evaluates it and reads it at the very same path: it must be on a path that workers share,
    or on their machine. Ctrl-C cancels what nobody else wants.
    """
    source, wanted = named(what, attributes)
    evaluation = SubmittedEvaluation(source, project=project, attributes=wanted)

    async def work(connector: Connector) -> Mapping[str, Any]:
        async with connected(connector, target.server, target.connect_timeout) as client:
            answer = await client.submit(cut([], [evaluation], interactive=True))
        [job] = answer.evaluations
        note(f"evaluation {job}")
        async with steady(connector, target.server, target.connect_timeout, note) as asker:
            is_over = False
            try:
                result = await _follow(asker, job)
                is_over = True
            finally:
                if not is_over:
                    await _cancel(asker, job)
            if result["status"] != "Completed":
                await _show_logs(asker, result["failed"])
        return result

    result = run(target, work)
    paths = [path for asked in result["targets"] for path in _outputs(asked)]
    if as_json:
        print_json(result)
    _judge(result)
    if out_link is not None:
        _link(paths, out_link, cache)
    if not as_json:
        for path in paths:
            say(clean(path))
    return FAILED if result["errors"] else 0


def named(what: str, attributes: Sequence[str]) -> tuple[EvalSource, list[str]]:
    """What a target on the command line means; raises `CommandError`."""
    reference, fragment, attribute = what.partition("#")
    path = Path(reference).expanduser()
    is_path = path.exists() or reference.startswith((".", "/", "~"))
    if fragment or (not is_path and ":" in reference):
        chosen = [*([attribute] if attribute else []), *attributes]
        return EvalSource("flake", _flake(path) if is_path else reference), chosen
    if not path.exists():
        raise CommandError(f"there is no {what}; name a Nix file, a directory or a flake#attribute")
    path = path.resolve()
    if path.is_dir() and not (path / "default.nix").exists():
        if (path / "flake.nix").exists():
            return EvalSource("flake", _flake(path)), list(attributes)
        raise CommandError(f"{path} has neither a default.nix nor a flake.nix")
    return EvalSource("nix-file", str(path)), list(attributes)


def _flake(path: Path) -> str:
    path = path.resolve()
    if not (path / "flake.nix").exists():
        raise CommandError(f"there is no flake.nix in {path}")
    return f"git+file://{path}" if (path / ".git").exists() else f"path:{path}"


async def _follow(asker: Steady, job: str) -> dict[str, Any]:
    """Tells what changes until the evaluation and its builds have ended; the last result."""
    told: dict[str, str] = {}
    said = 0
    while True:
        reply = await asker.ask(CmdResult(request=0, job=job), CmdResultReply)
        result = reply.result
        talk = [*result["warnings"], *(f"error: {text}" for text in result["errors"])]
        for line in talk[said:]:
            note(clean(line))
        said = len(talk)
        for name, state in _states(result):
            if told.get(name) != state:
                told[name] = state
                note(f"{clean(name)}: {clean(state)}")
        if result["status"] in ENDED:
            return result
        await trio.sleep(POLL_SECS)


def _states(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    states = [("evaluation", result["status"])]
    builds = result["builds"]
    if builds:
        done = builds.get("Completed", 0)
        states.append(("builds", f"{done} of {sum(builds.values())} done"))
    states += [(asked["attribute"], asked["status"] or "waits") for asked in result["targets"]]
    return states


async def _cancel(asker: Steady, job: str) -> None:
    with trio.CancelScope(shield=True, deadline=trio.current_time() + CANCEL_SECS):
        note(f"cancelling {job}")
        await asker.ask(CmdCancel(request=0, targets=[job]), CmdCancelReply)


async def _show_logs(asker: Steady, failed: Sequence[Mapping[str, Any]]) -> None:
    """The end of the log of each build that failed itself."""
    for build_ in failed:
        note(f"{clean(build_['name'])} {clean(build_['status'])}: {clean(build_['error'] or '-')}")
        lines: deque[str] = deque(maxlen=LOG_LINES)
        rest, offset = b"", 0
        while True:
            chunk = await asker.ask(
                CmdLogs(request=0, job=build_["job_id"], offset=offset), CmdLogsReply
            )
            *whole, rest = (rest + chunk.data).split(b"\n")
            lines.extend(line.decode(errors="replace") for line in whole)
            offset = chunk.offset
            if chunk.is_end or not chunk.data:
                break
        if rest:
            lines.append(rest.decode(errors="replace"))
        for line in lines:
            click.echo(f"  {clean(line)}", err=True)
        note(f"the whole log: headrace logs {clean(build_['job_id'])}")


def _judge(result: Mapping[str, Any]) -> None:
    if result["status"] != "Completed":
        why = clean(result["error"] or "a build did not complete")
        raise CommandError(f"{clean(result['status'])}: {why}", FAILED)


def _outputs(asked: Mapping[str, Any]) -> list[str]:
    """The paths of a target, its main output first."""
    outputs: Mapping[str, str] = asked["outputs"]
    return [outputs[name] for name in sorted(outputs, key=lambda name: (name != "out", name))]


def _link(paths: Sequence[str], name: str, cache: str | None) -> None:
    """Fetches the outputs into this machine's store, rooted by links as nix-build makes them."""
    if shutil.which("nix-store") is None:
        raise CommandError("--out-link needs Nix on this machine", FAILED)
    try:
        env = Nix(cache=cache).environment()
    except BadKey as error:
        raise CommandError(str(error)) from None
    done = subprocess.run(  # noqa: S603 - Nix
        ["nix-store", "--realise", "--add-root", name, "--indirect", *paths],  # noqa: S607
        env=env, capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = plain(done.stderr.decode(errors="replace"))
        hint = "" if cache else "; name the farm's cache with --cache"
        raise CommandError(
            f"cannot fetch the outputs to this machine's store: {said}{hint}", FAILED
        )
