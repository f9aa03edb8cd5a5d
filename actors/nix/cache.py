"""Looking into a binary cache without Nix: `file://` and `http(s)://`.

Nix fetches and copies; it does not tell sizes of what is missing, and it never writes an entry
that is there already, even if the file that the entry names is gone. Both need a look at the
entries themselves.
"""

from __future__ import annotations

import hashlib
import http.client
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urljoin, urlsplit

from actors.nix.hashes import BadHash, to_hex
from actors.nix.narinfo import BadNarInfo, NarInfo, name_of, parse

UNTOLD = -1
"""The size of a file of which a server does not say it."""
_TIMEOUT_SECS = 5.0
_MAX_ENTRY_BYTES = 2**20
_PIECE_BYTES = 2**20
_FOUND, _GONE = range(200, 300), (403, 404, 410)
"""Caches in object stores answer 403 for what they do not have, and Nix takes it so."""


class CacheFailed(Exception):
    """The cache does not answer; the text is one line."""


class Cache(Protocol):
    """Blocks, so it belongs into threads, one at a time. Names are relative to the cache."""

    def read(self, name: str) -> bytes | None:
        """A small file, if it is there. Raises `CacheFailed`."""
        ...

    def size(self, name: str) -> int | None:
        """Bytes of a file, if it is there; `UNTOLD` for any. Raises `CacheFailed`."""
        ...

    def sha256(self, name: str) -> str | None:
        """Of a file of any size, in hexadecimal, if it is there. Raises `CacheFailed`."""
        ...

    def put(self, name: str, file: Path) -> None:
        """Writes or replaces a file. Raises `CacheFailed`."""
        ...

    def close(self) -> None: ...


def open_cache(uri: str | None) -> Cache | None:
    """None for a cache that is a store of its own and answers only to Nix."""
    parts = urlsplit(uri or "")
    if parts.scheme == "file":
        return FileCache(Path(unquote(parts.path)))
    if parts.scheme in ("http", "https") and parts.hostname is not None:
        return HttpCache(parts._replace(query="", fragment="").geturl())
    return None


def entry(cache: Cache, store_path: str) -> NarInfo | None:
    """What the cache says of a path; an entry that Nix could not read is none.

    Raises `CacheFailed`.
    """
    data = cache.read(name_of(store_path))
    try:
        found = None if data is None else parse(data.decode(errors="replace"))
    except BadNarInfo:
        return None
    return found if found is not None and found.store_path == store_path else None


def holds(cache: Cache, store_path: str, *, thoroughly: bool = False) -> bool:
    """Whether the file that the entry names is there too, and whole; `thoroughly`: it is read, and
    is what the entry says. Raises `CacheFailed`."""
    found = entry(cache, store_path)
    if found is None:
        return False
    size = cache.size(found.url)
    if not size or (size != UNTOLD and found.file_size not in (None, 0, size)):
        return False
    expected = _sha256_of(found) if thoroughly else None
    return expected is None or cache.sha256(found.url) == expected


def _sha256_of(found: NarInfo) -> str | None:
    """That of the file, where the entry says it."""
    is_plain = found.compression == "none"
    try:
        algorithm, digest = to_hex(found.nar_hash if is_plain else found.file_hash or "")
    except BadHash:
        return None
    return digest if algorithm == "sha256" else None


class FileCache:
    """A folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str) -> bytes | None:
        try:
            with (self._folder / name).open("rb") as file:
                return file.read(_MAX_ENTRY_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheFailed(f"{self._folder / name}: {error.strerror}") from None

    def size(self, name: str) -> int | None:
        try:
            return (self._folder / name).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheFailed(f"{self._folder / name}: {error.strerror}") from None

    def sha256(self, name: str) -> str | None:
        try:
            with (self._folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheFailed(f"{self._folder / name}: {error.strerror}") from None

    def put(self, name: str, file: Path) -> None:
        target = self._folder / name
        whole = target.with_name(f".{target.name}.new")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            whole.write_bytes(file.read_bytes())
            whole.replace(target)
        except OSError as error:
            raise CacheFailed(f"{target}: {error.strerror}") from None

    def close(self) -> None:
        """Holds nothing."""


class HttpCache:
    """A web server; the connection is kept between requests."""

    def __init__(self, url: str) -> None:
        """`url` without parameters."""
        self._url = url.rstrip("/") + "/"
        self._connection: http.client.HTTPConnection | None = None

    def read(self, name: str) -> bytes | None:
        status, body, _ = self._request("GET", name)
        return body if self._is_there(status, name) else None

    def size(self, name: str) -> int | None:
        status, _, length = self._request("HEAD", name)
        if not self._is_there(status, name):
            return None
        return UNTOLD if length is None else length

    def sha256(self, name: str) -> str | None:
        digest = hashlib.sha256()
        try:
            self.close()
            response = self._send("GET", name)
            if not self._is_there(response.status, name):
                return None
            while piece := response.read(_PIECE_BYTES):
                digest.update(piece)
        except (OSError, http.client.HTTPException) as error:
            raise CacheFailed(f"{self._url}{name}: {error or type(error).__name__}") from None
        finally:
            self.close()
        return digest.hexdigest()

    def put(self, name: str, file: Path) -> None:
        status, _, _ = self._request("PUT", name, file.read_bytes())
        if status not in _FOUND:
            raise CacheFailed(f"{self._url}{name}: the server answered PUT with {status}")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _is_there(self, status: int, name: str) -> bool:
        if status not in _FOUND and status not in _GONE:
            raise CacheFailed(f"{self._url}{name}: the server answered {status}")
        return status in _FOUND

    def _request(
        self, method: str, name: str, body: bytes | None = None
    ) -> tuple[int, bytes, int | None]:
        """Status, body and length; once more if a kept connection turns out to be closed."""
        was_kept = self._connection is not None
        try:
            return self._ask(method, name, body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not was_kept:
                raise CacheFailed(f"{self._url}{name}: {error or type(error).__name__}") from None
        return self._request(method, name, body)

    def _ask(self, method: str, name: str, body: bytes | None) -> tuple[int, bytes, int | None]:
        response = self._send(method, name, body)
        data = response.read(_MAX_ENTRY_BYTES)
        if not response.isclosed():
            self.close()  # more than an entry has: not worth reading on
        length = response.headers.get("Content-Length", "")
        return response.status, data, int(length) if length.isdigit() else None

    def _send(self, method: str, name: str, body: bytes | None = None) -> http.client.HTTPResponse:
        parts = urlsplit(urljoin(self._url, name))
        if self._connection is None:
            secure = parts.scheme == "https"
            kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
            self._connection = kind(parts.hostname or "", parts.port, timeout=_TIMEOUT_SECS)
        self._connection.request(method, parts.path, body)
        return self._connection.getresponse()
