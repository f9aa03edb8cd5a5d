"""`headrace hook`: Nix's build hook, which sends derivations to the farm.

Nix gives no options: settings come from the environment or from a TOML file
(`HEADRACE_HOOK_CONFIG`, /etc/headrace/hook.toml) with the keys `server`, `cache`, `cache-key`,
`server-key`, `key` and `project`.

It never stands in the way of a build: where there is no farm, or no use for it, Nix builds itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import click
import trio

from actors.graph.nix import as_job
from actors.graph.order import BadGraph
from actors.nix import hook as protocol
from actors.nix import wire
from actors.nix.aterm import BadDerivation, parse
from actors.nix.hook import EXIT_MISC, Request
from actors.nix.settings import BadKey, BadStore, Nix, plain, store_root
from actors.nix.wire import BadFrame
from bin.client import Steady, connected, steady
from bin.errors import CommandError
from bin.options import DEFAULT_SERVER, Target
from bin.parts import cut
from bin.session import run
from transport.interface import ConnectionLost, Connector
from transport.messages import (
    CmdCancel,
    CmdCancelReply,
    CmdExplain,
    CmdExplainReply,
    CmdLogs,
    CmdLogsReply,
    CmdStatus,
    CmdStatusReply,
    SubmittedJob,
)

CONFIG = "/etc/headrace/hook.toml"
KEYS = ("server", "cache", "cache-key", "server-key", "key", "project", "connect-timeout")
LOG_FD, LOG_READ_FD = 4, 5
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.01, 0.3
CANCEL_SECS = 2.0


@click.command()
@click.argument("verbosity", default="3", metavar="")
def hook(verbosity: str) -> int:  # noqa: ARG001 - Nix's own argument
    """Answer Nix's build hook: `build-hook = .../headrace-hook` in nix.conf.

    Not for people: Nix starts it. See docs/hook.md.
    """
    try:
        told = wire.read(protocol.settings(), _read)
        settings = read_settings()
        return _Hook(settings, told).run()
    except EOFError:
        return 0
    except (BadFrame, BadSettings) as error:
        _say(f"headrace hook: {error}")
        return _decline_all()


def main() -> None:
    """The program `headrace-hook`."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(hook.main(sys.argv[1:], standalone_mode=False))


class BadSettings(Exception):
    """The hook is not set up; the text is one line."""


def read_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Settings by key; the environment goes before the file. Raises `BadSettings`."""
    path = Path(environment.get("HEADRACE_HOOK_CONFIG", CONFIG))
    found: dict[str, Any] = {}
    try:
        if path.exists():
            found = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadSettings(f"{path}: {error}") from None
    unknown = sorted(set(found) - set(KEYS))
    if unknown:
        raise BadSettings(f"{path}: unknown key {unknown[0]!r}; known are {', '.join(KEYS)}")
    for key in KEYS:
        value = environment.get(f"HEADRACE_{key.upper().replace('-', '_')}")
        if value:
            found[key] = value
    if not found.get("cache"):
        raise BadSettings(f"no cache: set `cache` in {path}, or HEADRACE_CACHE")
    return {key: str(value) for key, value in found.items()}


class _Hook:
    """One run of the program: up to one build."""

    def __init__(self, settings: dict[str, str], told: dict[str, str]) -> None:
        self._settings = settings
        self._told = told
        self._is_ours = False
        """Nix was told that the farm builds."""
        store = told.get("store", "auto")
        key = settings.get("cache-key")
        self._nix = Nix(
            store=None if store in ("", "auto") else store,
            cache=settings["cache"],
            key_file=None if key is None else Path(key),
        )
        self._target = Target(
            settings.get("server", DEFAULT_SERVER),
            _path(settings.get("server-key")),
            _path(settings.get("key")),
            float(settings.get("connect-timeout", "2")),
        )

    def run(self) -> int:
        try:
            return run(self._target, self._serve)
        except (CommandError, ConnectionLost, BadKey, BadStore) as error:
            _say(f"headrace hook: {error}")
            return EXIT_MISC if self._is_ours else _decline_all()

    async def _serve(self, connector: Connector) -> int:
        async with connected(connector, self._target.server, self._target.connect_timeout) as farm:
            while True:
                asked = await trio.to_thread.run_sync(_next_request)
                if asked is None:
                    return 0
                status = (await farm.ask(CmdStatus(request=0), CmdStatusReply)).status
                answer = protocol.decide(asked, status["workers"])
                drv = self._derivation(asked) if answer == "accept" else None
                if drv is not None:
                    break
                os.write(2, protocol.lines("decline"))
            os.write(2, protocol.lines("accept"))
            self._is_ours = True
            accepted = await trio.to_thread.run_sync(wire.read, protocol.accepted(), _read)
            job = protocol.job(
                drv, accepted.inputs, self._told, self._settings.get("project", "default")
            )
            self._copy_inputs(accepted.inputs)
            answered = await farm.submit(cut([job], (), interactive=True))
        [job_id] = answered.jobs.values()
        async with steady(connector, self._target.server, 30.0, _say) as asker:
            ended, why = await self._follow(asker, job_id)
        if ended != "Completed":
            _say(f"headrace: {job.drv_path}: {why}")
            return protocol.exit_code(ended)
        return self._import([job.outputs[name] for name in accepted.wanted])

    def _derivation(self, asked: Request) -> SubmittedJob | None:
        """The derivation; None for one that the farm cannot take."""
        try:
            file = Path(f"{store_root(self._nix.store)}{asked.drv_path}")
            return as_job(asked.drv_path, parse(file.read_bytes()))
        except (OSError, BadDerivation, BadGraph) as error:
            _say(f"headrace hook: {asked.drv_path} is left to Nix: {error}")
            return None

    def _copy_inputs(self, inputs: list[str]) -> None:
        if inputs:
            self._run_nix(self._nix.copy_to_cache(inputs), "copy the inputs to the cache")

    async def _follow(self, asker: Steady, job_id: str) -> tuple[str, str]:
        """Passes the log on until the job has ended; its status, and why."""
        is_over = False
        try:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGHUP) as signals:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_end_on, signals, nursery.cancel_scope)
                    await _pass_log_on(asker, job_id)
                    is_over = True
                    nursery.cancel_scope.cancel()
            if not is_over:
                return "Aborted", "stopped by Nix"
        finally:
            if not is_over:
                with trio.CancelScope(shield=True, deadline=trio.current_time() + CANCEL_SECS):
                    await asker.ask(CmdCancel(request=0, targets=[job_id]), CmdCancelReply)
        told = (await asker.ask(CmdExplain(request=0, job=job_id), CmdExplainReply)).explanation
        return told["status"], told["reason"]["text"]

    def _import(self, outputs: list[str]) -> int:
        # Nix holds the locks of the outputs for us; a program of ours must not wait for them.
        held = {"NIX_HELD_LOCKS": " ".join(outputs)}
        self._run_nix(self._nix.copy_from_cache(outputs), "import the outputs", held)
        return 0

    def _run_nix(
        self, command: list[str], what: str, more: Mapping[str, str] | None = None
    ) -> None:
        env = self._nix.environment() | dict(more or {})
        done = subprocess.run(  # noqa: S603 - Nix
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if done.returncode:
            said = plain(done.stderr.decode(errors="replace"))
            raise CommandError(f"cannot {what}: {said}", EXIT_MISC)


async def _end_on(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    async for _ in signals:
        scope.cancel()
        return


async def _pass_log_on(asker: Steady, job_id: str) -> None:
    offset, pause = 0, FIRST_PAUSE_SECS
    while True:
        chunk = await asker.ask(CmdLogs(request=0, job=job_id, offset=offset), CmdLogsReply)
        offset = chunk.offset
        if chunk.data:
            await trio.to_thread.run_sync(_write_log, chunk.data)
            pause = FIRST_PAUSE_SECS
        if chunk.is_end:
            return
        if not chunk.data:
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECS)


def _next_request() -> Request | None:
    try:
        return wire.read(protocol.request(), _read)
    except EOFError:
        return None


def _decline_all() -> int:
    """Nix builds everything itself."""
    _next_request()
    os.write(2, protocol.lines("decline-permanently"))
    return 0


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _write_log(data: bytes) -> None:
    while data:
        data = data[os.write(LOG_FD, data) :]


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode(errors="replace"))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
