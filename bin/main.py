"""The `headrace` command: finds the command's module, and turns every end into an exit code.

A command's module, and with it all that is slow to import, is imported only when the command is
asked for: `headrace --version` and `--help` answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import click

from bin.errors import BROKEN_PIPE, FAILED, INTERRUPTED, USAGE, CommandError
from bin.options import option

COMMANDS = {
    "demo": ("demo", "Run a whole farm on this machine and build a sample graph."),
    "chaos": ("chaos.command", "Break a farm on this machine in every way, and check it."),
    "server": ("server", "Run the assignment server."),
    "worker": ("worker", "Run a worker on a build machine."),
    "build": ("build", "Evaluate and build a Nix file or flake on the farm."),
    "submit": ("submit", "Queue the jobs of a file."),
    "status": ("status", "Watch workers and jobs."),
    "health": ("health", "Tell whether the server is well."),
    "jobs": ("jobs", "List jobs."),
    "wait": ("jobs", "Wait until jobs have ended."),
    "logs": ("logs", "Print the log of a job."),
    "explain": ("explain", "Tell why a job waits, or why it went where it went."),
    "rules": ("rules", "List policies and rules."),
    "cluster": ("cluster", "List, show and cancel clusters of jobs."),
    "cancel": ("operate", "Cancel jobs or submissions."),
    "prioritize": ("operate", "Put jobs in front of all others."),
    "drain": ("operate", "Give a worker no more jobs."),
    "undrain": ("operate", "Give a drained worker jobs again."),
    "hook": ("hook", "Answer Nix's build hook; Nix starts it."),
    "machines": ("machines", "Print a nix.machines file of the workers."),
    "keygen": ("keygen", "Make CURVE keys."),
}
"""Name of each command: its module, and its line in the list of commands."""


class LazyGroup(click.Group):
    """The commands of `COMMANDS`; a module is imported when its command is asked for."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """The names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"bin.{COMMANDS[cmd_name][0]}")
        command: click.Command = getattr(module, cmd_name)
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name when there is no such command."""
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"no such command: {name!r}{hint}")
        return super().resolve_command(ctx, args)


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"headrace {version('headrace')}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and exit.",
)
@option("--debug", is_flag=True, help="Print the traceback of an error too.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """The job feed of a Nix build farm: workers pull, the best job is claimed at once."""
    ctx.obj["debug"] = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main(args: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (see `bin.errors`)."""
    settings: dict[str, Any] = {"debug": False}
    try:
        with cli.make_context(
            "headrace", list(sys.argv[1:] if args is None else args), obj=settings
        ) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
    except click.exceptions.Exit as end:
        return end.exit_code
    # The one place where every failure ends, whatever it is.
    except BaseException as error:  # noqa: BLE001
        if settings["debug"]:
            traceback.print_exc()
        return _explain(_cause(error))
    return result if isinstance(result, int) else 0


def _cause(error: BaseException) -> BaseException:
    """The one failure to speak of: of a group an interrupt, else what we know, else the first."""
    leaves: list[BaseException] = []
    pending = [error]
    while pending:
        leaf = pending.pop()
        if isinstance(leaf, BaseExceptionGroup):
            pending.extend(reversed(leaf.exceptions))
        else:
            leaves.append(leaf)
    for known in (KeyboardInterrupt, SystemExit, CommandError):
        for leaf in leaves:
            if isinstance(leaf, known):
                return leaf
    return leaves[0]


def _explain(error: BaseException) -> int:
    text, code = str(error), FAILED
    match error:
        case KeyboardInterrupt() | click.Abort():
            return INTERRUPTED
        case SystemExit():
            raise error
        case BrokenPipeError():
            # Nobody reads the rest; the interpreter's own flush at exit must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return BROKEN_PIPE
        case CommandError():
            code = error.code
        case click.ClickException():
            text, code = error.format_message().rstrip("."), USAGE
            if isinstance(error, click.UsageError) and error.ctx is not None:
                text += f"; see `{error.ctx.command_path} --help`"
        case OSError() if error.filename is not None:
            text, code = f"{error.filename}: {error.strerror}", USAGE
        case _:
            text = f"{type(error).__name__}: {text} (a bug; --debug shows where)"
    click.echo(f"headrace: {' '.join(text.split())}", err=True)
    return code


def run() -> NoReturn:
    """For `python -m bin.main`."""
    sys.exit(main())


if __name__ == "__main__":
    run()
