"""The server as a process: its files, its socket, its signals and its end."""

from __future__ import annotations

import gc
import ipaddress
import json
import logging
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

import trio

from actors.ledger.errors import LedgerError
from actors.ledger.sqlite import SqliteLedger
from actors.server.assembly import Server
from actors.server.authorization import BadRegistry, Registration, read_registry
from actors.server.config import ServerConfig
from actors.server.effects import Neighbours, RegistryFileChanged
from actors.server.ids import epoch
from actors.server.locks import ServerLocks
from actors.server.policies import PolicyError, load_policy, with_fair_share
from actors.server.scoring import Policy
from actors.server.watchdog import Watchdog, end_process
from actors.supervision import GaveUp, leaves
from transport.adapter import Context
from transport.curve import Authenticator, KeyFileError, KeyPair, generate, load, read_authorized
from transport.interface import BindFailed, Router
from transport.zmq_sockets import ZmqRouter

log = logging.getLogger("headrace.server")

STOP_SECS = 20.0
SETTLE_POLL_SECS = 0.02
FAREWELL_SECS = 0.1
REGISTRY_POLL_SECS = 1.0
COLLECTOR_THRESHOLDS = (2_000, 10, 10_000)
"""New objects, and passes of the generation before, between two passes of Python's collector. One
of the second looks at 20 000 objects, in less than a millisecond; one of the third looks at all."""


class CannotStart(Exception):
    """The server cannot start so; the text is one line that says what to do."""


def run_server(config: ServerConfig) -> int:
    """Runs a server until a signal or a failure; returns the exit code.

    Raises `CannotStart` before anything is served.
    """
    check_exposure(config)
    try:
        policy = load_policy(config.policy)
        if config.fair_share:
            policy = with_fair_share(policy)
    except PolicyError as error:
        raise CannotStart(str(error)) from None
    if config.registry is not None:
        _read_registrations(config.registry)
    config.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    server = secrets.token_hex(8)
    locks = ServerLocks(config.state_dir / "servers", server)
    try:
        ledger = _open_ledger(config.state_dir / "ledger.sqlite3", server, locks)
        try:
            _tune_collector()
            with Watchdog() as watchdog:
                return trio.run(_main, config, policy, server, ledger, locks, watchdog)
        finally:
            ledger.close()
    finally:
        locks.release()


def _tune_collector() -> None:
    """Lets Python look for garbage in cycles less often: 100 000 jobs are a million objects, none
    in a cycle, and looking at all of them stops the loop for half a second. As Python comes, a
    quarter of the time of a large submission goes there. What is loaded by now stays for ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTOR_THRESHOLDS)


def check_exposure(config: ServerConfig) -> None:
    """Refuses to listen beyond this machine without encryption; raises `CannotStart`."""
    if config.curve or config.insecure or config.listen.startswith("ipc://"):
        return
    host = urlsplit(config.listen).hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise CannotStart(
            f"--listen {config.listen} is open to the network: add --curve, or --insecure if "
            "everyone who can reach it may use it"
        )


async def _main(
    config: ServerConfig,
    policy: Policy,
    server: str,
    ledger: SqliteLedger,
    locks: ServerLocks,
    watchdog: Watchdog,
) -> int:
    # Until the very end: what holds up the end is to be found too.
    trio.lowlevel.spawn_system_task(watchdog.beat)
    keys = _server_keys(config.state_dir) if config.curve else None
    client_keys = _client_keys(config) if config.curve else None
    failure: BindFailed | None = None
    code = 1
    async with Context() as context, trio.open_nursery() as nursery:
        if keys is not None:
            nursery.start_soon(Authenticator(context, client_keys).run)
        try:
            router = ZmqRouter(context, config.listen, keys)
        except BindFailed as error:
            failure = error  # raised outside: a nursery would wrap it
        else:
            code = await _serve(config, policy, server, ledger, locks, router, keys, watchdog)
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise CannotStart(str(failure))
    return code


def _server_keys(state_dir: Path) -> KeyPair:
    """The server's key pair, made at its first start with --curve."""
    secret, public = state_dir / "server.key", state_dir / "server.pub"
    try:
        return load(secret) if secret.exists() else generate(secret, public)
    except KeyFileError as error:
        raise CannotStart(str(error)) from None


def _client_keys(config: ServerConfig) -> set[str] | None:
    """The keys that may connect: those of `<state-dir>/authorized_keys` and of the registry's
    workers; any key while there is no such file."""
    path = config.state_dir / "authorized_keys"
    try:
        keys = read_authorized(path) if path.exists() else None
    except KeyFileError as error:
        raise CannotStart(str(error)) from None
    if keys is None:
        log.warning("any key may connect: there is no %s", path)
        return None
    keys.update(r.key for r in (_registrations(config) or {}).values() if r.key is not None)
    return keys


async def _serve(
    config: ServerConfig,
    policy: Policy,
    server: str,
    ledger: SqliteLedger,
    locks: ServerLocks,
    router: Router,
    keys: KeyPair | None,
    watchdog: Watchdog,
) -> int:
    clock = trio.lowlevel.current_clock()  # the ledger's threads read it too
    whole = Server(
        config,
        server=server,
        epoch=epoch(time.time_ns() // 1_000_000, secrets.randbits(16)),
        policy=policy,
        ledger=ledger,
        router=router,
        wall_offset=lambda: time.time() - clock.current_time(),
        load_registrations=lambda: _registrations(config),
        others_alive=lambda: locks.others()[0],
        version=version("headrace"),
        end_process=end_process,
        ending=watchdog.expect_end,
    )
    code = 0
    try:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(whole.run)
                nursery.start_soon(_watch_registry, config, whole)
                nursery.start_soon(_watch_neighbours, config, whole, locks)
                await whole.dispatch.started.wait()
                if config.ready_file is not None:
                    _write_ready_file(config.ready_file, router.endpoint, keys)
                log.info("listening on %s", router.endpoint)
                async for number in signals:
                    code = 130 if number == signal.SIGINT else 0
                    break
                nursery.start_soon(_force_on_second_signal, signals)
                await _settle(whole)
                # What is sent in the instant of a close may be lost with the connection.
                await trio.sleep(FAREWELL_SECS)
                nursery.cancel_scope.cancel()
    except* GaveUp as group:
        for error in leaves(group):
            log.critical("%s", error)
        code = 1
    try:
        ledger.sync()
    except LedgerError as error:
        log.critical("%s", error)
        code = 1
    return code


async def _settle(whole: Server) -> None:
    """Waits until what the server was told is durable, for `STOP_SECS` at most."""
    whole.stop()
    with trio.move_on_after(STOP_SECS) as scope:
        await trio.sleep(SETTLE_POLL_SECS)
        while not whole.dispatch.is_settled:
            await trio.sleep(SETTLE_POLL_SECS)
    if scope.cancelled_caught:
        log.warning("stopping with claims unanswered; the next server sorts them out")


async def _force_on_second_signal(signals: AsyncIterator[int]) -> None:
    async for number in signals:
        log.warning("second signal: exiting at once")
        os._exit(128 + number)


async def _watch_registry(config: ServerConfig, whole: Server) -> None:
    """Reads the registry file again when it changes; a bad one changes nothing."""
    if config.registry is None:
        return
    seen = _stamp(config.registry)
    while True:
        await trio.sleep(REGISTRY_POLL_SECS)
        stamp = _stamp(config.registry)
        if stamp is None or stamp == seen:
            continue
        seen = stamp
        try:
            registrations = _read_registrations(config.registry)
        except CannotStart as error:
            log.error("registry file not taken: %s", error)  # noqa: TRY400 - one line
            continue
        whole.world.post(RegistryFileChanged(registrations))


async def _watch_neighbours(config: ServerConfig, whole: Server, locks: ServerLocks) -> None:
    """Looks at every tick whether other servers use the ledger, or have died."""
    had_others = False
    while True:
        await trio.sleep(config.tick)
        alive, dead = locks.others()
        if alive or dead or had_others:
            wall = time.time()
            whole.world.post(Neighbours(dead, wall, wall - trio.current_time()))
            locks.forget(dead)
        had_others = bool(alive or dead)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _registrations(config: ServerConfig) -> dict[str, Registration] | None:
    return None if config.registry is None else _read_registrations(config.registry)


def _read_registrations(path: Path) -> dict[str, Registration]:
    try:
        return read_registry(path.read_text("utf-8"), str(path))
    except BadRegistry as error:
        raise CannotStart(str(error)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"--registry {path} cannot be read: {error}") from None


def _open_ledger(path: Path, server: str, locks: ServerLocks) -> SqliteLedger:
    try:
        ledger = SqliteLedger.open(path, server)
        _, dead = locks.others()
        ledger.recover(dead)
    except LedgerError as error:
        raise CannotStart(str(error)) from None
    locks.forget(dead)
    return ledger


def _write_ready_file(path: Path, endpoint: str, keys: KeyPair | None) -> None:
    public_key = keys.public if keys is not None else None
    ready = {"endpoint": endpoint, "pid": os.getpid(), "curve_public_key": public_key}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(ready))
    temporary.replace(path)
