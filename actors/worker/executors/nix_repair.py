"""Putting back what a binary cache has lost of an entry that it still lists.

`nix copy` skips whatever has an entry, so a file that is gone or damaged behind its entry would
never come back: everybody who needs the path would fail for ever. Nix writes the path once more,
into an empty folder, and what it wrote there replaces what is in the cache.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from actors.nix.cache import Cache, CacheFailed, entry, holds, open_cache
from actors.nix.narinfo import name_of
from actors.nix.serve import PathInfo
from actors.nix.settings import Nix, plain

_COPY_LIMIT_SECS = 3600


def holds_all(uri: str, paths: Sequence[str], thoroughly: bool) -> bool:
    """Whether the cache has these paths, files and all; false when it cannot be looked into.

    Blocks. Raises `CacheFailed`.
    """
    cache = open_cache(uri)
    if cache is None:
        return False
    try:
        return all(holds(cache, path, thoroughly=thoroughly) for path in paths)
    finally:
        cache.close()


def put_back(
    nix: Nix,
    env: Mapping[str, str],
    infos: Sequence[PathInfo],
    thoroughly: bool,
) -> None:
    """Writes those paths anew whose entries name files that are gone or cut short; `thoroughly`:
    or not what the entries say, for which the files are read.

    Blocks. The paths are valid in the store of `nix`, their references in its cache.

    Raises:
        CacheFailed: the cache or Nix did not take part; the text is one line.
    """
    cache = open_cache(nix.cache)
    if cache is None:
        return
    try:
        for info in infos:
            if not holds(cache, info.path, thoroughly=thoroughly):
                _write_anew(nix, env, info, cache)
    finally:
        cache.close()


def _write_anew(nix: Nix, env: Mapping[str, str], info: PathInfo, cache: Cache) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-cache-") as made:
        folder = Path(made)
        # Nix insists on seeing the entries of what the path refers to.
        for reference in info.references:
            told = None if reference == info.path else cache.read(name_of(reference))
            if told is not None:
                (folder / name_of(reference)).write_bytes(told)
        command = [*nix.copy_to_folder(folder), "--no-recursive", info.path]
        try:
            done = subprocess.run(  # noqa: S603 - Nix
                command, env=dict(env), capture_output=True, check=False, timeout=_COPY_LIMIT_SECS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CacheFailed(f"cannot copy {info.path}: {error}") from None
        if done.returncode:
            said = plain(done.stderr.decode(errors="replace"))
            raise CacheFailed(f"cannot copy {info.path}: {said}")
        written = entry(open_cache(f"file://{folder}") or cache, info.path)
        if written is None:
            raise CacheFailed(f"cannot copy {info.path}: Nix wrote no entry")
        cache.put(written.url, folder / written.url)
        cache.put(name_of(info.path), folder / name_of(info.path))
