"""Typed reading of one entry of a file, with errors that name the entry and the field."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from actors.graph.order import BadGraph, shown

T = TypeVar("T")


def convert(entry: Any, type_: type[T], where: str) -> T:
    """`entry` as a `type_`; `where` says in errors which entry it is, `jobs[3]` for example."""
    try:
        return msgspec.convert(entry, type_)
    except msgspec.ValidationError as error:
        raise BadGraph(f"{where}{_drv_path(entry)}: {_named(str(error))}") from None


def kind(value: object) -> str:
    """What a JSON value is, in words."""
    names = {
        dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"
    }  # fmt: skip
    return names.get(type(value), "a number")


def _drv_path(entry: Any) -> str:
    drv = entry.get("drv_path") if isinstance(entry, dict) else None
    return f" ({shown(drv)})" if isinstance(drv, str) else ""


def _named(error: str) -> str:
    """Msgspec writes 'Expected `str`, got `int` - at `$.outputs[...]`'; the field comes first."""
    text, _, path = error.rpartition(" - at ")
    field = path.strip("`").removeprefix("$").removeprefix(".")
    if not text:
        return error[:1].lower() + error[1:]
    return f"field `{shown(field)}`: {text[:1].lower()}{text[1:]}"
