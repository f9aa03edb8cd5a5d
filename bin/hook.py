"""`headrace hook`: Nix's build hook, which sends derivations to the farm.

Nix gives no options: settings come from the environment or from a TOML file
(`HEADRACE_HOOK_CONFIG`, /etc/headrace/hook.toml) with the keys `server`, `cache`, `cache-key`,
`server-key`, `key`, `project`, `connect-timeout` (seconds) and `max-builds` (at a time).

It never stands in the way of a build: where there is no farm, or no use for it, Nix builds itself.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import tomllib
from collections.abc import Mapping
from math import inf, nan
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
from actors.nix.settings import BadKey, BadStore, Nix, store_root
from actors.nix.wire import BadFrame
from bin.client import Steady, connected, steady
from bin.errors import CommandError
from bin.hook_guard import Guard
from bin.hook_import import LOG_FD, import_outputs, run_nix
from bin.hook_slots import NoSlots, Slots
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
KEYS = (
    "server", "cache", "cache-key", "server-key", "key", "project", "connect-timeout", "max-builds",
)  # fmt: skip
_APART_IN_MACHINES = re.compile(r"[\s;#]")
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.01, 0.3
DEFAULT_MAX_BUILDS = 100
PATIENCE_SECS = 30.0
"""For a farm that was there when it was asked."""
STATUS_AGE_SECS = 1.0
"""Nix may ask for hundreds of derivations in a row."""


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
    if _APART_IN_MACHINES.search(str(found["cache"])):
        raise BadSettings(f"the cache {found['cache']!r}: write blanks, ; and # as %20, %3B, %23")
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
            _number(settings, "connect-timeout", 2),
        )
        self._most = max(1, int(_number(settings, "max-builds", DEFAULT_MAX_BUILDS)))
        self._slots = Slots()
        self._guard = Guard(self._cancel)

    def run(self) -> int:
        try:
            return run(self._target, self._serve)
        except (CommandError, ConnectionLost, BadKey, BadStore, NoSlots) as error:
            _say(f"headrace hook: {error}")
            return EXIT_MISC if self._is_ours else _decline_all()

    async def _serve(self, connector: Connector) -> int:
        drv = await self._negotiate(connector)
        if drv is None:
            return 0
        accepted = await trio.to_thread.run_sync(wire.read, protocol.accepted(), _read)
        job = protocol.job(
            drv, accepted.inputs, self._told, self._settings.get("project", "default")
        )
        # A connection that nobody reads while inputs are copied would be dropped: there is none.
        self._copy_inputs(accepted.inputs)
        async with connected(connector, self._target.server, PATIENCE_SECS) as farm:
            answered = await farm.submit(cut([job], (), interactive=True))
        [job_id] = answered.jobs.values()
        self._guard.watch(job_id)
        async with steady(connector, self._target.server, PATIENCE_SECS, _say) as asker:
            await _pass_log_on(asker, job_id)
            reply = await asker.ask(CmdExplain(request=0, job=job_id), CmdExplainReply)
        self._guard.release()
        status = reply.explanation["status"]
        if status != "Completed":
            _say(f"headrace: {job.drv_path}: {reply.explanation['reason']['text']}")
            return protocol.exit_code(status)
        import_outputs(self._nix, self._told, job, accepted.wanted, self._most)
        return 0

    async def _negotiate(self, connector: Connector) -> SubmittedJob | None:
        """Answers requests; the derivation that was accepted, or None when Nix asks no more."""
        workers: list[dict[str, Any]] = []
        known_at = -inf
        async with connected(connector, self._target.server, self._target.connect_timeout) as farm:
            while True:
                asked = await trio.to_thread.run_sync(_next_request)
                if asked is None:
                    return None
                if trio.current_time() - known_at > STATUS_AGE_SECS:
                    workers = (await farm.ask(CmdStatus(request=0), CmdStatusReply)).status[
                        "workers"
                    ]
                    known_at = trio.current_time()
                answer = protocol.decide(asked, workers)
                drv = self._derivation(asked) if answer == "accept" else None
                if drv is None:
                    answer = "decline"
                elif not self._slots.take(protocol.room(asked, workers, self._most)):
                    answer = "postpone"
                os.write(2, protocol.lines(answer))
                if answer == "accept":
                    self._is_ours = True
                    return drv

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
            command = self._nix.copy_to_cache(inputs)
            run_nix(command, self._nix.environment(), "copy the inputs to the cache")

    def _cancel(self, job_id: str) -> None:
        """In the guard: the hook was killed."""

        async def ask(connector: Connector) -> None:
            async with connected(connector, self._target.server, PATIENCE_SECS) as farm:
                await farm.ask(CmdCancel(request=0, targets=[job_id]), CmdCancelReply)

        run(self._target, ask)


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
        if _is_alone():
            raise CommandError("Nix is gone", EXIT_MISC)
        if not chunk.data:
            await trio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECS)


def _is_alone() -> bool:
    """Whether Nix died without a word to its hook; a silent build would not notice."""
    poll = select.poll()
    poll.register(2, 0)
    return bool(poll.poll(0))


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
    os.write(2, protocol.event(text))


def _number(settings: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(settings.get(key, default))
    except ValueError:
        value = nan
    if not 0 < value < inf:
        raise BadSettings(f"{key} is {settings[key]!r}, not a number above 0")
    return value


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
