"""CURVE: key files, and the authenticator that says which client keys may connect.

Keys are Z85 text of 40 characters, one a file. Encryption alone does not keep anybody out; the
authenticator (ZeroMQ's ZAP protocol) does, and it must exist before a socket binds: without it
every handshake of that socket fails.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth.base
from zmq.utils import z85

from transport.adapter import NOBLOCK, Context, Doorbell

ZAP_DOMAIN = "headrace"
_KEY_LENGTH = 40


class KeyFileError(Exception):
    """A key file cannot be used; the text is one line that names the file and the cause."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair in Z85; the secret stays out of its repr."""

    public: str
    secret: str = field(repr=False)


def ephemeral() -> KeyPair:
    """A key pair for one process, for clients whose key nobody asks for."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def generate(path_secret: Path, path_public: Path) -> KeyPair:
    """Makes a key pair and writes it to two new files of mode 0600.

    Raises `KeyFileError`, also when a file exists: keys are never overwritten.
    """
    pair = ephemeral()
    _create(path_secret, pair.secret)
    try:
        _create(path_public, pair.public)
    except KeyFileError:
        path_secret.unlink()
        raise
    return pair


def load(path_secret: Path) -> KeyPair:
    """Reads a secret key, and derives its public one.

    Raises `KeyFileError`, also when others than the owner may read or write the file.
    """
    secret = _read(path_secret, is_secret=True)
    return KeyPair(zmq.curve_public(secret.encode("ascii")).decode("ascii"), secret)


def load_public(path_public: Path) -> str:
    """Reads a public key; raises `KeyFileError`."""
    return _read(path_public, is_secret=False)


def read_authorized(path: Path) -> set[str]:
    """Reads a list of public keys: one a line, whatever follows it on the line is a comment.

    So is a line that starts with `#`; within a key it is a digit of Z85, but never the first:
    five digits that start with it exceed 32 bits. Raises `KeyFileError`, which names the line
    that is neither.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(f"cannot read {path}: {error}") from None
    keys = set()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = line.split(maxsplit=1)[0]
        if not is_key(key):
            raise KeyFileError(
                f"{path}, line {number}: {key!r} is not a Z85 public key (headrace keygen)"
            )
        keys.add(key)
    return keys


def is_key(text: str) -> bool:
    """Whether the text is a key in Z85."""
    if len(text) != _KEY_LENGTH or not text.isascii():
        return False
    try:
        z85.decode(text.encode("ascii"))
    except (KeyError, struct.error):  # no character of Z85; five that exceed 32 bits
        return False
    return True


def _create(path: Path, key: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileError(f"key file {path} exists; keys are not overwritten") from None
    except OSError as error:
        raise KeyFileError(f"cannot create key file {path}: {error.strerror}") from None
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(key + "\n")
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise KeyFileError(f"cannot write key file {path}: {error.strerror}") from None


def _read(path: Path, *, is_secret: bool) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(_KEY_LENGTH + 3)
    except OSError as error:
        raise KeyFileError(f"cannot read key file {path}: {error.strerror}") from None
    if is_secret and stat.S_IMODE(mode) & 0o077:
        raise KeyFileError(f"key file {path} is open to others; run: chmod 600 {path}")
    text = data.decode("ascii", "replace").strip()
    if not is_key(text):
        raise KeyFileError(f"key file {path} does not hold a key of {_KEY_LENGTH} characters (Z85)")
    return text


class Authenticator:
    """Answers ZeroMQ's question whether a client's key may connect; one a context.

    `keys` are the public keys that may (Z85), none for any key. A change holds from the next
    handshake on; connections that stand are the registry's to end.
    """

    def __init__(self, context: Context, keys: Iterable[str] | None) -> None:
        self._context = context
        self._keys: frozenset[str] | None = None
        self.allow(keys)
        self._zap = zmq.auth.base.Authenticator(context.raw)
        self._zap.configure_curve_callback(ZAP_DOMAIN, self)
        self._zap.start()
        self._bell = Doorbell(self._zap.zap_socket)
        context.opened(self)

    def allow(self, keys: Iterable[str] | None) -> None:
        """Replaces the keys that may connect."""
        self._keys = None if keys is None else frozenset(keys)

    def callback(self, domain: str, key: bytes) -> bool:
        """What pyzmq asks of a credentials provider; `key` is Z85."""
        if domain != ZAP_DOMAIN:
            return False
        return self._keys is None or key.decode("ascii") in self._keys

    async def run(self) -> None:
        """Answers until cancelled; handshakes wait while it does not run."""
        while True:
            try:
                request = self._zap.zap_socket.recv_multipart(NOBLOCK)
            except zmq.Again:
                await self._bell.wait()
            else:
                await self._zap.handle_zap_message(request)

    def close(self) -> None:
        """For the context, which closes it last of all that it owns."""
        self._context.closed(self)
        self._bell.notify_closing()
        self._zap.stop()
