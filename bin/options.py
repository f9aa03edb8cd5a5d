"""Options that commands share, and the one way to declare an option.

Everything imported here is quick: commands import what they run on when they run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

DEFAULT_SERVER = "tcp://127.0.0.1:7420"

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Target:
    """The server a command talks to, and how."""

    server: str
    server_key: Path | None
    key: Path | None
    connect_timeout: float
    """Seconds until a server that does not answer counts as unreachable."""


class Endpoint(click.ParamType[str]):
    """A ZeroMQ address: tcp://HOST:PORT or ipc://PATH."""

    name = "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The address as it is; anything else is a usage error."""
        text = str(value).strip()
        port = re.fullmatch(r"tcp://(?:\[[^\]]+\]|[^:/\s]+):(\d+|\*)", text)
        is_tcp = port is not None and (port[1] == "*" or int(port[1]) < 2**16)
        if not is_tcp and not re.fullmatch(r"ipc://\S+", text):
            self.fail(
                f"{text!r} is no address; write tcp://HOST:PORT (IPv6 as tcp://[::1]:PORT) "
                "or ipc://PATH",
                param,
                ctx,
            )
        return text


ENDPOINT = Endpoint()
SECONDS = click.FloatRange(min=0)
FILE = click.Path(path_type=Path)


def option(*names: str, also: str | None = None, **settings: Any) -> Callable[[Command], Command]:
    """A click option with the environment variable HEADRACE_<NAME>.

    Args:
        names: as for `click.option`; the first long one gives the variable its name.
        also: a second variable, read when the first is unset or empty.
        settings: as for `click.option`.
    """
    long = next(name for name in names if name.startswith("--")).partition("/")[0]
    variables = [f"HEADRACE_{long[2:].upper().replace('-', '_')}"]
    if also is not None:
        variables.append(also)
    return click.option(*names, envvar=variables, show_envvar=True, **settings)


def json_option(command: Command) -> Command:
    """`--json`, for commands whose result a program might read."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def client_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """What a command that talks to a server takes; it gets one `target: Target`."""

    @option(
        "--server",
        type=ENDPOINT,
        default=DEFAULT_SERVER,
        show_default=True,
        help="Address of the server.",
    )
    @option("--server-key", type=FILE, help="File with the server's public CURVE key.")
    @option("--key", type=FILE, help="File with this client's own CURVE key pair.")
    @option(
        "--connect-timeout",
        type=SECONDS,
        default=5.0,
        show_default=True,
        help="Seconds to try to reach the server.",
    )
    @functools.wraps(command)
    def with_target(
        server: str,
        server_key: Path | None,
        key: Path | None,
        connect_timeout: float,
        **others: Any,
    ) -> Any:
        if key is not None and server_key is None:
            raise click.UsageError("--key needs --server-key, the public key of the server")
        return command(target=Target(server, server_key, key, connect_timeout), **others)

    return with_target
