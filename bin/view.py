"""The status as a live terminal view shows it: snapshot in, renderable out. Pure.

Everything is cropped to the terminal's size before a table is built, so that a thousand running
jobs cost no more than a screenful.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bin import summary
from bin.summary import Status, clean

MIN_WIDTH = 20
MIN_HEIGHT = 8
# From this width on there is room for columns that are only nice to have.
WIDE = 60
WIDEST = 100

_STYLES = {
    "running": "cyan", "completed": "green", "failed": "bold red", "dependency failed": "red",
    "draining": "yellow",
}  # fmt: skip


def render(status: Status, width: int, height: int) -> RenderableType:
    """The view of one status in at most `width` columns and `height` lines."""
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    head = [_line(summary.heading(status), width, "bold"), *_counts(status, width)]
    troubles = summary.troubles(status)
    if troubles:
        head.append(_line(", ".join(troubles), width, "yellow"))
    clusters: Sequence[Mapping[str, Any]] = status.get("clusters", ())
    if clusters:
        head.append(_line(f"clusters: {_by_status(clusters)}", width))

    workers: Sequence[Mapping[str, Any]] = status.get("workers", ())
    running: Sequence[Mapping[str, Any]] = status.get("running", ())
    room = max(height - len(head), 4)
    # The running jobs get what the workers leave, and at least half.
    for_workers = min(1 + len(workers), room - min(1 + len(running), room // 2))
    parts: list[RenderableType] = [*head, _workers(workers, width, for_workers)]
    if running:
        parts.append(_running(status, running, width, room - for_workers))
    return Group(*parts)


def _line(text: str, width: int, style: str = "") -> Text:
    line = Text(text, style=style, no_wrap=True, end="\n")
    line.truncate(width, overflow="ellipsis")
    return line


def _counts(status: Status, width: int) -> list[Text]:
    packed: list[Text] = [Text(no_wrap=True)]
    for part in summary.counts(status):
        number, _, kind = part.partition(" ")
        styled = Text(part, style=_STYLES.get(kind, "") if number != "0" else "dim")
        if packed[-1].cell_len and packed[-1].cell_len + 2 + styled.cell_len > width:
            packed.append(Text(no_wrap=True))
        if packed[-1].cell_len:
            packed[-1].append("  ")
        packed[-1].append_text(styled)
    return packed


def _by_status(clusters: Sequence[Mapping[str, Any]]) -> str:
    numbers: dict[str, int] = {}
    for cluster in clusters:
        state = clean(cluster.get("status", "?"))
        numbers[state] = numbers.get(state, 0) + 1
    return ", ".join(f"{number} {state}" for state, number in numbers.items())


def _table(width: int, columns: Sequence[str], flexible: int) -> Table:
    """Plain columns without borders; `flexible` says how many, from the left, may shrink."""
    table = Table(box=None, width=width, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for i, name in enumerate(columns):
        table.add_column(
            name,
            no_wrap=True,
            overflow="ellipsis",
            ratio=(3 if i == 0 else 2) if i < flexible else None,
        )
    return table


def _crop(rows: Sequence[Any], lines: int) -> tuple[Sequence[Any], int]:
    """The rows that fit under a header in `lines` lines, and how many are left out."""
    if 1 + len(rows) <= lines:
        return rows, 0
    kept = max(lines - 2, 0)
    return rows[:kept], len(rows) - kept


def _workers(workers: Sequence[Mapping[str, Any]], width: int, lines: int) -> RenderableType:
    if not workers:
        return _line("no workers: start one with `headrace worker`", width, "yellow")
    shown, hidden = _crop(workers, lines)
    columns = ["worker", "state", "build"]
    columns += ["eval", "cpu", "ram free"] if width >= WIDE else []
    columns += ["systems", "zone", "seen"] if width >= WIDEST else []
    table = _table(width, columns, 1)
    for worker in shown:
        state = clean(worker.get("state", "?"))
        cells = [clean(worker.get("name") or worker.get("id", "?")), state, summary.slots(worker)]
        if width >= WIDE:
            metrics = worker.get("metrics") or {}
            cpu, ram = metrics.get("cpu_usage_pct"), metrics.get("ram_free_mb")
            cells += [
                str(summary.evaluations(worker)),
                "" if cpu is None else f"{cpu:.0f}%",
                "" if ram is None else f"{ram / 1024:.1f} GiB",
            ]
        if width >= WIDEST:
            cells += [
                " ".join(map(clean, worker.get("architectures", ()))),
                clean(worker.get("zone") or ""),
                summary.duration(worker.get("last_seen_secs")),
            ]
        table.add_row(*map(Text, cells), style=_STYLES.get(state, ""))
    return _with_rest(table, hidden, width)


def _running(
    status: Status, running: Sequence[Mapping[str, Any]], width: int, lines: int
) -> RenderableType:
    shown, hidden = _crop(running, lines)
    names = summary.worker_names(status)
    columns = ["running", "worker", "for"]
    columns += ["progress"] if width >= WIDE else []
    columns += ["job"] if width >= WIDEST else []
    table = _table(width, columns, 2)
    for job in shown:
        worker = job.get("worker", "?")
        cells = [
            clean(job.get("name") or job.get("job_id", "?")),
            names.get(worker, clean(worker)),
            summary.duration(job.get("since_secs")),
        ]
        cells += [summary.progress(job)] if width >= WIDE else []
        cells += [clean(job.get("job_id", ""))] if width >= WIDEST else []
        table.add_row(*map(Text, cells))
    return _with_rest(table, hidden, width)


def _with_rest(table: Table, hidden: int, width: int) -> RenderableType:
    return Group(table, _line(f"... and {hidden} more", width, "dim")) if hidden else table
