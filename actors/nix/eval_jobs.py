"""nix-eval-jobs: what it is given to evaluate, and the lines that it prints.

It walks the set that `evaluate.jobs` writes, and prints a JSON object for each derivation and each
error that it finds there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from msgspec import Struct

from actors.nix.evaluate import FILE, joined, messages
from actors.nix.settings import plain

PROGRAM = "nix-eval-jobs"
MAX_PROCESSES = 4
_PROCESS_MIB = 1024
"""One with less would be started anew again and again."""
# Not the colon of https://..., flake:... or channel:...
_BETWEEN_ENTRIES = re.compile(r"(?<!\bflake)(?<!\bchannel):(?!//)")
_PLACE = re.compile(r"a(\d+)")


class Line(Struct, frozen=True):
    """What was found at one place of the set."""

    number: int
    """Of the attribute path asked for."""
    name: str
    """The attribute path of the derivation, which may be below what was asked for."""
    is_below: bool
    drv_path: str = ""
    error: str = ""
    """On one line; either this or the drv path."""


def processes(memory_mib: int, cores: int) -> tuple[int, int]:
    """How many processes evaluate, and after how many MiB each is replaced by a new one."""
    count = max(1, min(cores, MAX_PROCESSES, memory_mib // _PROCESS_MIB))
    return count, max(1, memory_mib // count)


def command(store: str | None, nix_path: str, memory_mib: int, cores: int) -> list[str]:
    """Evaluates the file. The program itself does not look at `NIX_PATH`."""
    count, each_mib = processes(memory_mib, cores)
    chosen = [] if store is None else ["--option", "store", store]
    chosen += [word for entry in _entries(nix_path) for word in ("--include", entry)]
    return [
        PROGRAM, *chosen, "--workers", str(count), "--max-memory-size", str(each_mib), FILE,
    ]  # fmt: skip


def _entries(nix_path: str) -> list[str]:
    return [entry for entry in _BETWEEN_ENTRIES.split(nix_path) if entry]


def read(line: bytes, paths: Sequence[Sequence[str]]) -> Line | None:
    """What a line says; None of one that says nothing of the kind."""
    try:
        said = json.loads(line)
        first, *below = said["attrPath"]
        place = _PLACE.fullmatch(first)
        drv_path, error = said.get("drvPath", ""), said.get("error", "")
        name = joined([*paths[int(place[1])], *below]) if place is not None else ""
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if place is None or not isinstance(drv_path, str) or not isinstance(error, str):
        return None
    if not drv_path and not error:
        return None
    if error:
        error = messages(error.encode(errors="replace"))[1] or plain(error)
    return Line(int(place[1]), name, bool(below), "" if error else drv_path, error)
