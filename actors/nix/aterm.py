r"""`.drv` files: a derivation as an ATerm.

    Derive([("out","/nix/store/…","","")],[("/nix/store/….drv",["out"])],["/nix/store/…"],
        "x86_64-linux","/bin/sh",["-c","…"],[("name","hello")])

without blanks or newlines. Strings escape `\"`, `\\`, `\n`, `\r` and `\t` and hold any other byte
as it is; text here is UTF-8 with surrogate escapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t"}
_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"})

T = TypeVar("T")


class BadDerivation(ValueError):
    """Not a derivation that is supported; the text is one line."""


class DrvOutput(Struct, frozen=True):
    path: str
    """Empty when it is only known after the build."""
    hash_algorithm: str = ""
    """`sha256` or `r:sha256` of a fixed or content-addressed output; else empty."""
    hash: str = ""
    """Hexadecimal of a fixed output; `impure` of an impure one."""


class StoreDerivation(Struct, frozen=True):
    """All that a `.drv` file holds; its name is in the name of the file."""

    outputs: dict[str, DrvOutput]
    input_drvs: dict[str, list[str]]
    """Names of the outputs wanted, by drv path."""
    input_srcs: list[str]
    system: str
    builder: str
    args: list[str]
    env: dict[str, str]


def parse(data: bytes) -> StoreDerivation:
    """Raises `BadDerivation`."""
    return _Parser(data.decode("utf-8", "surrogateescape")).derivation()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def derivation(self) -> StoreDerivation:
        if self._text.startswith("DrvWithVersion("):
            raise BadDerivation("dynamic derivations are not supported")
        self._skip("Derive(")
        outputs = dict(self._list(self._output))
        self._skip(",")
        input_drvs = dict(self._list(self._input))
        self._skip(",")
        input_srcs = self._list(self._string)
        self._skip(",")
        system = self._string()
        self._skip(",")
        builder = self._string()
        self._skip(",")
        args = self._list(self._string)
        self._skip(",")
        env = dict(self._list(self._pair))
        self._skip(")")
        if self._at != len(self._text):
            raise BadDerivation(f"text after the derivation, at character {self._at}")
        return StoreDerivation(outputs, input_drvs, input_srcs, system, builder, args, env)

    def _output(self) -> tuple[str, DrvOutput]:
        name, path, algorithm, digest = self._tuple(4)
        return name, DrvOutput(path, algorithm, digest)

    def _input(self) -> tuple[str, list[str]]:
        self._skip("(")
        path = self._string()
        self._skip(",")
        names = self._list(self._string)
        self._skip(")")
        return path, names

    def _pair(self) -> tuple[str, str]:
        key, value = self._tuple(2)
        return key, value

    def _tuple(self, count: int) -> list[str]:
        self._skip("(")
        found = [self._string()]
        for _ in range(count - 1):
            self._skip(",")
            found.append(self._string())
        self._skip(")")
        return found

    def _list(self, item: Callable[[], T]) -> list[T]:
        self._skip("[")
        found: list[T] = []
        while not self._text.startswith("]", self._at):
            if found:
                self._skip(",")
            found.append(item())
        self._at += 1
        return found

    def _string(self) -> str:
        match = _STRING.match(self._text, self._at)
        if match is None:
            raise BadDerivation(f"not a derivation: a string is missing at character {self._at}")
        self._at = match.end()
        raw = match[1]
        return _ESCAPE.sub(_unescape, raw) if "\\" in raw else raw

    def _skip(self, text: str) -> None:
        if not self._text.startswith(text, self._at):
            raise BadDerivation(f"not a derivation: {text!r} is missing at character {self._at}")
        self._at += len(text)


def _unescape(match: re.Match[str]) -> str:
    return _ESCAPED.get(match[1], match[1])


def unparse(drv: StoreDerivation) -> bytes:
    """The file; lists but `args` are sorted as Nix sorts them."""
    outputs = (
        f"({_quoted(n)},{_quoted(o.path)},{_quoted(o.hash_algorithm)},{_quoted(o.hash)})"
        for n, o in sorted(drv.outputs.items())
    )
    inputs = (f"({_quoted(p)},{_strings(sorted(n))})" for p, n in sorted(drv.input_drvs.items()))
    env = (f"({_quoted(k)},{_quoted(v)})" for k, v in sorted(drv.env.items()))
    parts = (
        f"[{','.join(outputs)}]", f"[{','.join(inputs)}]", _strings(sorted(drv.input_srcs)),
        _quoted(drv.system), _quoted(drv.builder), _strings(drv.args), f"[{','.join(env)}]",
    )  # fmt: skip
    return f"Derive({','.join(parts)})".encode("utf-8", "surrogateescape")


def _strings(texts: list[str]) -> str:
    return f"[{','.join(map(_quoted, texts))}]"


def _quoted(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
