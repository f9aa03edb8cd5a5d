"""The store path of a fixed output, computed as Nix does.

Nix 2.33 and newer leave the path of a fixed output out of their JSON, since it follows from the
hash, the way of hashing and the name.
"""

from __future__ import annotations

import base64
import binascii
import hashlib

_DIGITS = "0123456789abcdfghijklmnpqrsvwxyz"
_PATH_HASH_BYTES = 20
_DIGEST_BYTES = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64, "blake3": 32}
_PREFIXES = {"flat": "", "nar": "r:", "git": "git:"}


def fixed_output_path(
    store: str, name: str, digest: str, algorithm: str | None, method: str | None
) -> str:
    """The path in `store` of the only output, `out`, of a fixed-output derivation.

    Args:
        store: `/nix/store`.
        name: of the derivation.
        digest: `sha256-<base64>`, or hexadecimal with an `algorithm`.
        algorithm: `sha256`, or with the method in front of it as older Nix does: `r:sha256`.
        method: `flat`, `nar`, `text` or `git`; none where `algorithm` says it.

    Raises:
        ValueError: the hash cannot be read; the message says why.
    """
    prefix, _, bare = (algorithm or "").rpartition(":")
    method = method or {"r": "nar", "": "flat"}.get(prefix, prefix)
    algo, hexadecimal = _digest(digest, bare)
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
    return _base32(_fold(_sha256(fingerprint)))


def _digest(digest: str, algorithm: str) -> tuple[str, str]:
    """The algorithm and the digest in hexadecimal."""
    algo, dash, encoded = digest.partition("-")
    try:
        raw = base64.b64decode(encoded, validate=True) if dash else bytes.fromhex(digest)
    except (binascii.Error, ValueError):
        raw = b""
    algo = algo if dash else algorithm
    if len(raw) != _DIGEST_BYTES.get(algo, -1):
        raise ValueError(
            "not a hash; expected <algorithm>-<base64>, or hexadecimal with a hashAlgo"
        )
    return algo, raw.hex()


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _fold(digest: bytes) -> bytes:
    folded = bytearray(_PATH_HASH_BYTES)
    for i, byte in enumerate(digest):
        folded[i % _PATH_HASH_BYTES] ^= byte
    return bytes(folded)


def _base32(data: bytes) -> str:
    """Nix's base 32: own digits, the last five bits first."""
    number = int.from_bytes(data, "little")
    count = (len(data) * 8 + 4) // 5
    return "".join(_DIGITS[number >> 5 * i & 31] for i in reversed(range(count)))
