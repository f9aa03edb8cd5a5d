"""What an operator sets for a worker, and the two files that belong to its identity."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ExecutorName = Literal["nix", "process"]

MAX_SLOTS = 10_000
MAX_TOKEN_CHARACTERS = 1_024
_MAX_ID_CHARACTERS = 200
_MAX_PEERS_FILE_BYTES = 2**20
_WORKER_ID_FILE = "worker-id"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class ConfigError(Exception):
    """The worker cannot start so; the text is one line that says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Settings of one worker. None means detected, or not set.

    Raises `ConfigError` when a value cannot be used.
    """

    server: str
    state_dir: Path
    executor: ExecutorName
    id: str | None = None
    """Instead of the id that is kept in the state directory."""
    name: str | None = None
    store: str | None = None
    """For `nix` a store URI, for `process` a directory that workers may share."""
    cache: str | None = None
    cache_key: Path | None = None
    """Secret key that signs what is written to the cache."""
    build_max_concurrent: int = 1
    eval_max_concurrent: int = 1
    eval_max_memory_mb: int = 0
    """Of one evaluation by Nix; 0 = no limit."""
    systems: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    zone: str | None = None
    endpoint: str | None = None
    peers_file: Path | None = None
    cpu_core_score: float | None = None

    def __post_init__(self) -> None:
        for option, slots in (
            ("--build-max-concurrent", self.build_max_concurrent),
            ("--eval-max-concurrent", self.eval_max_concurrent),
        ):
            if not 0 <= slots <= MAX_SLOTS:
                raise ConfigError(f"{option} is {slots}; give a number from 0 to {MAX_SLOTS}")
        if self.build_max_concurrent == self.eval_max_concurrent == 0:
            raise ConfigError("both --build-max-concurrent and --eval-max-concurrent are 0")
        if self.id is not None and not is_valid_id(self.id):
            raise ConfigError("--id must have 1 to 200 characters and no control characters")
        if self.name is not None and not is_valid_id(self.name):
            raise ConfigError("--name must have 1 to 200 characters and no control characters")
        score = self.cpu_core_score
        if score is not None and not 0 < score < 1e6:
            raise ConfigError(f"the CPU core score is {score}; give a number above 0")
        if self.executor == "process" and self.cache is not None:
            raise ConfigError("--cache needs --executor nix; process workers share a --store")
        if self.cache is None and self.cache_key is not None:
            raise ConfigError("--cache-key signs what is written to a cache: add --cache URI")


def parse_list(text: str) -> tuple[str, ...]:
    """Entries separated by commas or blanks, without repetitions, in their order."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def is_valid_id(text: str) -> bool:
    """Whether the protocol takes `text` as an id."""
    return 1 <= len(text) <= _MAX_ID_CHARACTERS and _CONTROL.search(text) is None


def worker_id(config: WorkerConfig) -> str:
    """The configured id, else the one of the state directory, made at the first start.

    Raises:
        ConfigError: the file holds no valid id, or cannot be read or written.
    """
    if config.id is not None:
        return config.id
    path = config.state_dir / _WORKER_ID_FILE
    try:
        config.state_dir.mkdir(parents=True, exist_ok=True)
        try:
            content = _read_start(path)
        except FileNotFoundError:
            _create_whole(path, f"{uuid.uuid4()}\n")
            content = _read_start(path)
    except OSError as error:
        raise ConfigError(f"cannot use {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        content = ""
    found = content.strip("\n")
    if not is_valid_id(found) or found != found.strip():
        raise ConfigError(f"{path} does not hold a valid worker id; correct or delete the file")
    return found


def _read_start(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(2**12).decode()


def _create_whole(path: Path, content: str) -> None:
    """Creates the file, 0600, with its content or not at all; one that exists wins."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        Path(temporary).unlink()


def read_peers(path: Path | None) -> dict[str, str]:
    """Tokens by peer from a peers file; lines that are no `peer:token` are ignored.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is None:
        return {}
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_PEERS_FILE_BYTES).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"cannot read the peers file {path}: {error.strerror}") from None
    return parse_peers(text)


def parse_peers(text: str) -> dict[str, str]:
    """`peer:token` a line, `*` for every other peer; the last line of a peer counts."""
    tokens = {}
    for line in text.splitlines():
        peer, colon, token = line.strip().partition(":")
        peer, token = peer.strip(), token.strip()
        if not colon or peer.startswith("#") or not is_valid_id(peer):
            continue
        if 1 <= len(token) <= MAX_TOKEN_CHARACTERS and token.isprintable() and " " not in token:
            tokens[peer] = token
    return tokens
