"""`.narinfo`: what a binary cache says of one store path.

StorePath: /nix/store/<hash>-hello
URL: nar/<file hash>.nar.xz
Compression: xz
FileHash: sha256:<nix32>
FileSize: 120
NarHash: sha256:<nix32>
NarSize: 400
References: <base names, blank separated>
Deriver: <base name> | unknown-deriver
Sig: <key name>:<base64>
CA: <content address>
"""

from __future__ import annotations

from msgspec import Struct

_DEFAULT_COMPRESSION = "bzip2"
_SEVERAL = "Sig"
_KNOWN = frozenset((
    "StorePath", "URL", "Compression", "FileHash", "FileSize", "NarHash", "NarSize", "References",
    "Deriver", "CA",
))  # fmt: skip


class BadNarInfo(ValueError):
    """Not a narinfo; the text is one line."""


class NarInfo(Struct, frozen=True):
    """One entry of a binary cache. Sizes are bytes."""

    store_path: str
    url: str
    """Of the compressed NAR, relative to the cache."""
    nar_hash: str
    nar_size: int
    compression: str = _DEFAULT_COMPRESSION
    file_hash: str | None = None
    file_size: int | None = None
    """Of the compressed NAR; not known if 0."""
    references: tuple[str, ...] = ()
    """Base names."""
    deriver: str | None = None
    """Base name."""
    signatures: tuple[str, ...] = ()
    ca: str | None = None


def name_of(store_path: str) -> str:
    """The name of the file that speaks of a store path."""
    return f"{store_path.rpartition('/')[2][:32]}.narinfo"


def parse(text: str) -> NarInfo:
    """Raises `BadNarInfo`. Unknown fields are ignored, as Nix does."""
    fields: dict[str, str] = {}
    signatures = []
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        value = value.strip()
        if not colon:
            raise BadNarInfo(f"a line without a field: {line[:80]!r}")
        if key == _SEVERAL:
            signatures.append(value)
        elif key not in _KNOWN:
            continue
        elif key in fields:
            raise BadNarInfo(f"{key} is there twice")
        else:
            fields[key] = value
    for needed in ("StorePath", "URL", "NarHash", "NarSize"):
        if not fields.get(needed):
            raise BadNarInfo(f"no {needed}")
    deriver = fields.get("Deriver", "unknown-deriver")
    size = _size(fields, "NarSize")
    assert size is not None
    return NarInfo(
        store_path=fields["StorePath"],
        url=fields["URL"],
        nar_hash=fields["NarHash"],
        nar_size=size,
        compression=fields.get("Compression") or _DEFAULT_COMPRESSION,
        file_hash=fields.get("FileHash"),
        file_size=_size(fields, "FileSize"),
        references=tuple(fields.get("References", "").split()),
        deriver=None if deriver == "unknown-deriver" else deriver,
        signatures=tuple(signatures),
        ca=fields.get("CA") or None,
    )


def _size(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or int(text) >= 2**63:
        raise BadNarInfo(f"{name} is {text[:80]!r}, not a size")
    return int(text)
