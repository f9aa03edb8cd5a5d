"""The store path of a fixed output, computed as Nix does.

Nix 2.33 and newer leave the path of a fixed output out of their JSON, since it follows from the
hash, the way of hashing and the name.
"""

from __future__ import annotations

import hashlib

from actors.nix.hashes import to_hex, to_nix32

_PATH_HASH_BYTES = 20
_PREFIXES = {"flat": "", "nar": "r:", "git": "git:"}


def fixed_output_path(
    store: str, name: str, digest: str, algorithm: str | None, method: str | None
) -> str:
    """The path in `store` of the only output, `out`, of a fixed-output derivation.

    Args:
        store: `/nix/store`.
        name: of the derivation.
        digest: in any of Nix's notations; without an algorithm of its own it needs `algorithm`.
        algorithm: `sha256`, or with the method in front of it as older Nix does: `r:sha256`.
        method: `flat`, `nar`, `text` or `git`; none where `algorithm` says it.

    Raises:
        ValueError: the hash cannot be read; the message says why.
    """
    prefix, _, bare = (algorithm or "").rpartition(":")
    method = method or {"r": "nar", "": "flat"}.get(prefix, prefix)
    algo, hexadecimal = to_hex(digest, bare)
    if method == "text" and algo == "sha256":
        kind, inner = "text", hexadecimal
    elif method == "nar" and algo == "sha256":
        kind, inner = "source", hexadecimal
    elif method in _PREFIXES:
        kind = "output:out"
        inner = _sha256(f"fixed:out:{_PREFIXES[method]}{algo}:{hexadecimal}:").hex()
    else:
        raise ValueError(f"unknown method {method!r} for {algo}; expected flat, nar, text or git")
    return f"{store}/{short_hash(f'{kind}:sha256:{inner}:{store}:{name}')}-{name}"


def short_hash(fingerprint: str) -> str:
    """The 32 characters that Nix puts in front of a name for a path with this fingerprint."""
    return to_nix32(_fold(_sha256(fingerprint)))


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _fold(digest: bytes) -> bytes:
    folded = bytearray(_PATH_HASH_BYTES)
    for i, byte in enumerate(digest):
        folded[i % _PATH_HASH_BYTES] ^= byte
    return bytes(folded)
