"""Hashes as Nix writes them: hexadecimal, its own base 32, base 64, and SRI."""

from __future__ import annotations

import base64
import binascii

_SIZES = {"md5": 16, "sha1": 20, "sha256": 32, "sha512": 64, "blake3": 32}
_NIX32 = "0123456789abcdfghijklmnpqrsvwxyz"
_VALUES = {digit: value for value, digit in enumerate(_NIX32)}


class BadHash(ValueError):
    """Not a hash that Nix takes; the text is one line."""


def to_hex(text: str, algorithm: str = "") -> tuple[str, str]:
    """(algorithm, lower-case hexadecimal) of a hash in any of Nix's notations, `algorithm:hash` and
    SRI `algorithm-base64` included. Raises `BadHash`."""
    for separator in ":-":
        named, found, rest = text.partition(separator)
        if found and named in _SIZES:
            if algorithm not in ("", named):
                raise BadHash(f"the hash {text!r} is not one of {algorithm}")
            algorithm, text = named, rest
            break
    if algorithm not in _SIZES:
        raise BadHash(f"the hash {text!r} names no algorithm that is known")
    return algorithm, _digest(text, _SIZES[algorithm]).hex()


def _digest(text: str, size: int) -> bytes:
    try:
        if len(text) == 2 * size:
            return bytes.fromhex(text)
        if len(text) == nix32_length(size):
            return from_nix32(text, size)
        digest = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        digest = b""
    if len(digest) != size:
        raise BadHash(f"{text!r} is not a hash of {size} bytes")
    return digest


def nix32_length(size: int) -> int:
    """Digits of a hash of `size` bytes."""
    return (size * 8 - 1) // 5 + 1


def from_nix32(text: str, size: int) -> bytes:
    """Raises `ValueError` for other digits, or bits beyond the size."""
    value = 0
    for digit in text:
        if digit not in _VALUES:
            raise ValueError(f"{digit!r} is no digit of Nix's base 32")
        value = value * 32 + _VALUES[digit]
    try:
        return value.to_bytes(size, "little")
    except OverflowError:
        raise ValueError(f"{text!r} has more than {size} bytes") from None


def to_nix32(digest: bytes) -> str:
    value = int.from_bytes(digest, "little")
    digits = []
    for _ in range(nix32_length(len(digest))):
        value, digit = divmod(value, 32)
        digits.append(_NIX32[digit])
    return "".join(reversed(digits))
