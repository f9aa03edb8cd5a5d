"""`nix-store --serve`: the protocol of a store that answers on a pipe.

Requests are bytes, replies are read by the generators of `wire`. `BlockingServe` and `ServeProcess`
are the two that talk: one for threads, one for Trio.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import IO, TypeVar

import psutil
import trio
from msgspec import Struct

from actors.nix import wire
from actors.nix.aterm import DrvOutput
from actors.nix.hashes import to_hex
from actors.nix.settings import plain
from actors.nix.wire import BadFrame, Reply, Writer

HELLO, ANSWER = 0x390C9DEB, 0x5452EECB
VERSION = 0x206
"""2.6: results of builds name outputs; every Nix since 2.4 takes it."""
_QUERY_VALID_PATHS, _QUERY_PATH_INFOS, _DUMP = 1, 2, 3
_BUILD_PATHS, _BUILD_DERIVATION, _ADD = 6, 8, 9
BUILT, SUBSTITUTED, ALREADY_VALID = 0, 1, 2
(
    PERMANENT_FAILURE, INPUT_REJECTED, OUTPUT_REJECTED, TRANSIENT_FAILURE, _CACHED_FAILURE,
    TIMED_OUT, MISC_FAILURE, DEPENDENCY_FAILED, LOG_LIMIT_EXCEEDED, NOT_DETERMINISTIC,
    RESOLVES_TO_VALID, NO_SUBSTITUTERS,
) = range(3, 15)  # fmt: skip

_TERM_GRACE_SECS = 1.0
_READ_BYTES = 2**16
_TAIL_BYTES = 4_096

T = TypeVar("T")
Send = Callable[[bytes], Awaitable[None]]


class ServeFailed(Exception):
    """The process has ended or talks nonsense; the text is one line."""


class PathInfo(Struct, frozen=True):
    """What a store knows of a valid path."""

    path: str
    deriver: str
    references: list[str]
    nar_size: int
    nar_hash: str
    """`sha256:<nix32>`."""
    ca: str = ""
    """Content address, of a fixed output."""
    signatures: list[str] = []


class Settings(Struct, frozen=True):
    """Of one build; seconds and bytes, 0 = no limit."""

    max_silent_secs: int = 0
    timeout_secs: int = 0
    max_log_bytes: int = 0


class BasicDerivation(Struct, frozen=True):
    """A derivation whose inputs are paths: all that a store needs to build it."""

    drv_path: str
    outputs: dict[str, DrvOutput]
    input_paths: list[str]
    system: str
    builder: str
    args: list[str]
    env: dict[str, str]


class BuildResult(Struct, frozen=True):
    status: int
    error: str


# -- messages --------------------------------------------------------------------------------------


def hello() -> bytes:
    return Writer().integer(HELLO).integer(VERSION).done()


def greeted() -> Reply[int]:
    """The version that both speak."""
    magic = yield from wire.integer()
    if magic != ANSWER:
        raise BadFrame("not a Nix store: it answered something else")
    version = yield from wire.integer()
    if version >> 8 != VERSION >> 8:
        raise BadFrame(f"speaks version {version >> 8} of the serve protocol, not {VERSION >> 8}")
    return min(version, VERSION)


def query_valid_paths(paths: Iterable[str], *, lock: bool, substitute: bool) -> bytes:
    """Which are valid; with `lock` they stay while the process lives, with `substitute` missing
    ones are fetched first."""
    request = Writer().integer(_QUERY_VALID_PATHS).boolean(lock).boolean(substitute)
    return request.strings(paths).done()


def query_path_infos(paths: Iterable[str]) -> bytes:
    return Writer().integer(_QUERY_PATH_INFOS).strings(paths).done()


def path_infos() -> Reply[list[PathInfo]]:
    """Of the valid ones among the paths asked."""
    found = []
    while path := (yield from wire.string()):
        deriver = yield from wire.string()
        references = yield from wire.strings()
        yield from wire.integer()  # the size of a download
        nar_size = yield from wire.integer()
        nar_hash = yield from wire.string()
        ca = yield from wire.string()
        signatures = yield from wire.strings()
        found.append(PathInfo(path, deriver, references, nar_size, nar_hash, ca, signatures))
    return found


def _settings(request: Writer, settings: Settings) -> bytes:
    request.integer(settings.max_silent_secs).integer(settings.timeout_secs)
    request.integer(settings.max_log_bytes)
    return request.integer(0).integer(0).done()  # repetitions, and that they must agree


def build_paths(paths: Sequence[str], settings: Settings) -> bytes:
    """Builds `<drv>!<outputs>`, whose `.drv` files are in the store."""
    return _settings(Writer().integer(_BUILD_PATHS).strings(paths), settings)


def paths_built() -> Reply[BuildResult]:
    status = yield from wire.integer()
    return BuildResult(status, (yield from wire.string()) if status else "")


def build_derivation(drv: BasicDerivation, settings: Settings) -> bytes:
    request = Writer().integer(_BUILD_DERIVATION).string(drv.drv_path)
    request.integer(len(drv.outputs))
    for name, output in sorted(drv.outputs.items()):
        request.string(name).string(output.path)
        request.string(output.hash_algorithm).string(output.hash)
    request.strings(sorted(drv.input_paths)).string(drv.system).string(drv.builder)
    request.strings(drv.args).pairs(dict(sorted(drv.env.items())))
    return _settings(request, settings)


def derivation_built() -> Reply[BuildResult]:
    status = yield from wire.integer()
    error = yield from wire.string()
    for _ in range(4):  # times built, is not deterministic, start, stop
        yield from wire.integer()
    yield from wire.pairs()  # realisations of content-addressed outputs
    return BuildResult(status, error)


def _add(info: PathInfo) -> bytes:
    """The NAR follows it; answered by 1."""
    _, digest = to_hex(info.nar_hash)
    request = Writer().integer(_ADD).string(info.path).string(info.deriver).string(digest)
    request.strings(info.references).integer(0)  # when it was registered
    request.integer(info.nar_size).boolean(False)  # built here, so that others are not asked
    return request.strings(info.signatures).string(info.ca).done()


# -- who talks -------------------------------------------------------------------------------------


def command(store: str | None) -> list[str]:
    return ["nix-store", "--serve", "--write", *(["--store", store] if store else [])]


class BlockingServe:
    """A process for queries, used from one thread at a time. Started at the first request and again
    after it ended."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self._argv = list(argv)
        self._env = dict(env)
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None

    def ask(self, request: bytes, reply: Callable[[], Reply[T]]) -> T:
        """Raises `ServeFailed`."""
        if self._process is not None:
            try:
                return self._ask(self._process, request, reply())
            except ServeFailed:  # it may have ended long ago: once more, with a new one
                pass
        return self._ask(None, request, reply())

    def _ask(self, process: subprocess.Popen[bytes] | None, request: bytes, reply: Reply[T]) -> T:
        try:
            process = process or self._start()
            assert process.stdin is not None
            process.stdin.write(request)
            process.stdin.flush()
            return wire.read(reply, self._read_exactly)
        except (OSError, BadFrame) as error:
            said = self._complaint()
            self.close()
            raise ServeFailed(f"{self._argv[0]}: {said or error}") from None
        except BaseException:
            self.close()  # half a reply is left in the pipe
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        # A pipe that nobody reads could fill up.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(  # noqa: S603 - Nix
            self._argv, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(hello())
        self._process.stdin.flush()
        wire.read(greeted(), self._read_exactly)
        return self._process

    def _read_exactly(self, size: int) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise BadFrame("it ended")
        return data

    def _complaint(self) -> str:
        """The end of what it wrote to standard error."""
        if self._said is None:
            return ""
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _TAIL_BYTES))
        return plain(self._said.read().decode(errors="replace"))

    def close(self) -> None:
        process, self._process = self._process, None
        said, self._said = self._said, None
        if said is not None:
            said.close()
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # it had ended before it read all
                    continue
        process.kill()
        process.wait()


class ServeProcess:
    """A process for builds, on Trio; its standard error is the builders' log."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._buffer = bytearray()
        assert process.stdin is not None
        assert process.stdout is not None
        assert isinstance(process.stderr, trio.lowlevel.FdStream)
        self._to, self._from, self._log = process.stdin, process.stdout, process.stderr
        self._itself: psutil.Process | None = None
        self._family: list[psutil.Process] = []

    @classmethod
    async def start(cls, argv: Sequence[str], env: Mapping[str, str]) -> ServeProcess:
        """Raises `ServeFailed`."""
        try:
            process = await trio.lowlevel.open_process(
                list(argv), env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ServeFailed(f"cannot run {argv[0]}: {error.strerror}") from None
        started = cls(process)
        try:
            await started.ask(hello(), greeted())
        except BaseException:
            await started.close()
            raise
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(
        self,
        request: bytes,
        reply: Reply[T],
        on_log: Callable[[bytes], Awaitable[None]] | None = None,
        body: Callable[[Send], Awaitable[None]] | None = None,
    ) -> T:
        """Passes all of the log on before it returns, and reads no more of it than `on_log` takes.
        `body` sends what belongs to the request and is too large for it.

        Raises `ServeFailed`; a request that is cancelled leaves the process useless.
        """
        answer: list[T] = []
        failure: BadFrame | trio.BrokenResourceError | trio.ClosedResourceError | None = None
        pump = _Pump(self._log.fileno(), on_log)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pump.run)
            try:
                await self._to.send_all(request)
                if body is not None:
                    await body(self._to.send_all)
                answer.append(await self._read(reply))
            except (BadFrame, trio.BrokenResourceError, trio.ClosedResourceError) as error:
                failure = error
            pump.finish()
        if failure is None:
            return answer[0]
        said = plain(pump.tail.decode(errors="replace"))
        if isinstance(failure, BadFrame) and not isinstance(failure, _Ended):
            said = f"{failure}; {said}" if said else str(failure)
        raise ServeFailed(f"nix-store --serve: {said or 'it has ended'}")

    async def _read(self, reply: Reply[T]) -> T:
        try:
            wanted = next(reply)
            while True:
                wanted = reply.send(await self._read_exactly(wanted))
        except StopIteration as done:
            value: T = done.value
            return value

    async def _read_exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = await self._from.receive_some(_READ_BYTES)
            if not data:
                raise _Ended("it has ended")
            self._buffer += data
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def dump(self, path: str, nar_size: int, take: Send) -> None:
        """Passes on the NAR of a valid path, piece by piece.

        Raises `ServeFailed`, and what `take` raises: after the last piece, so that the process
        stays good for other requests.
        """
        failure: Exception | None = None
        left = nar_size
        try:
            await self._to.send_all(Writer().integer(_DUMP).string(path).done())
            while left:
                piece = await self._read_exactly(min(left, _READ_BYTES))
                left -= len(piece)
                if failure is None:
                    try:
                        await take(piece)
                    except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                        failure = error
        except (BadFrame, trio.BrokenResourceError, trio.ClosedResourceError):
            raise ServeFailed(f"nix-store --serve ended while it wrote {path}") from None
        if failure is not None:
            raise failure

    def waited_cpu_secs(self) -> float:
        """Processor time of the builders that have ended; 0 when that cannot be told."""
        try:
            self._itself = self._itself or psutil.Process(self.pid)
            times = self._itself.cpu_times()
        except psutil.Error:
            return 0.0
        return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))

    def look_around(self) -> int:
        """Bytes of memory that its builder takes now. Reads /proc: call it in a thread.

        Remembers the processes, so that `close` finds them when Nix is no longer there to end
        them.
        """
        try:
            self._family = psutil.Process(self.pid).children(recursive=True) or self._family
        except psutil.Error:
            return 0
        return sum(map(_rss, self._family))

    async def close(self) -> None:
        """Ends it, and the builder that it runs, within `_TERM_GRACE_SECS` and a bit."""
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(self.look_around)
            # Nix ends its builder when its client goes; killed at once it would leave it behind.
            await self._to.aclose()
            self._signal(signal.SIGTERM)
            with trio.move_on_after(_TERM_GRACE_SECS):
                await self._process.wait()
            if self._process.returncode is None:
                self._signal(signal.SIGKILL)
            await self._process.wait()
            await trio.to_thread.run_sync(_end, self._family)
            await self._from.aclose()
            await self._log.aclose()

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return


async def copy(info: PathInfo, source: ServeProcess, target: ServeProcess) -> None:
    """Copies a path from one store to another that has all it refers to. Raises `ServeFailed`."""
    failures: list[ServeFailed] = []

    async def body(send: Send) -> None:
        try:
            await source.dump(info.path, info.nar_size, send)
        except ServeFailed as error:
            failures.append(error)
            raise trio.BrokenResourceError from None

    try:
        await target.ask(_add(info), wire.integer(), body=body)
    except ServeFailed:
        if failures:
            raise failures[0] from None
        raise


class _Ended(BadFrame):
    """Not nonsense: nothing at all."""


class _Pump:
    """Passes on what comes out of a pipe, no faster than it is taken."""

    def __init__(self, handle: int, take: Callable[[bytes], Awaitable[None]] | None) -> None:
        self._handle = handle
        self._take = take
        self._waiting = trio.CancelScope()
        self._is_last = False
        self.tail = b""

    async def run(self) -> None:
        while True:
            try:
                data = os.read(self._handle, _READ_BYTES)
            except BlockingIOError:
                if self._is_last:
                    return
                with trio.CancelScope() as self._waiting:
                    await trio.lowlevel.wait_readable(self._handle)
                continue
            if not data:
                return
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
            if self._take is not None:
                await self._take(data)

    def finish(self) -> None:
        """Ends it once all that is in the pipe by now was passed on."""
        self._is_last = True
        self._waiting.cancel()


def _end(family: Sequence[psutil.Process]) -> None:
    """Kills what is left of a builder and waits until it is gone."""
    left = list(family)
    for process in family:
        try:
            left += process.children(recursive=True)
        except psutil.Error:  # it is gone
            continue
    for process in left:
        try:
            process.kill()
        except psutil.Error:
            continue
    psutil.wait_procs(left, timeout=_TERM_GRACE_SECS)


def _rss(process: psutil.Process) -> int:
    try:
        size: int = process.memory_info().rss
    except psutil.Error:
        return 0
    return size
