"""What commands print: results to stdout, all other talk to stderr, each line at once."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

from bin.summary import clean


def say(text: str) -> None:
    """A line of the result."""
    click.echo(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line of talk."""
    click.echo(f"headrace: {text}", err=True)


def print_json(value: Any) -> None:
    """One JSON document on one line."""
    say(json.dumps(value, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns; cut to the terminal's width on a terminal, whole in a pipe."""
    cells = [list(header), *([clean("-" if c in (None, "") else c) for c in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for row in cells:
        line = "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        say(line[:limit])
