"""What a run found: its figures, their goals, and how they are shown, kept and compared.

A figure is a value with a unit. One with a baseline of the same run has a ratio to it, and its goal
may be one of the ratio: that is what can be compared between machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

WORSE = 0.10
"""By more than this share a figure counts as worse than an earlier one."""
HEAD = ("measured", "value", "baseline", "ratio", "goal", "met")
COMPARED_HEAD = ("old", "new", "change")


class Goal(Struct, frozen=True):
    """A limit for the ratio, or for the value."""

    limit: float
    of_ratio: bool = False
    at_least: bool = False

    def is_met(self, number: float) -> bool:
        return number >= self.limit if self.at_least else number <= self.limit


class Figure(Struct, frozen=True, kw_only=True):
    """One line of the table."""

    key: str
    """What it is compared by, the same whatever the sizes of the run."""
    what: str
    value: float | None = None
    unit: str
    baseline: float | None = None
    """In the same unit, of the same run."""
    against: str = ""
    """What the baseline is."""
    goal: Goal | None = None
    missing: str = ""
    """Why there is no value."""

    @property
    def ratio(self) -> float | None:
        if self.value is None or not self.baseline:
            return None
        return self.value / self.baseline

    @property
    def judged(self) -> float | None:
        """What the goal is about, and what is compared: the ratio or the value."""
        return self.ratio if self.goal is not None and self.goal.of_ratio else self.value

    @property
    def is_met(self) -> bool | None:
        """None without a goal, or with nothing to judge."""
        if self.goal is None or self.judged is None:
            return None
        return self.goal.is_met(self.judged)

    @property
    def more_is_better(self) -> bool:
        return self.unit == "jobs/s"


class Point(Struct, frozen=True):
    """A point of the curves: latency and throughput at so many pending jobs and workers."""

    pending: int
    workers: int
    echo_us: float
    p50_us: float
    p99_us: float
    jobs_per_sec: float


class Run(Struct, kw_only=True):
    """All of a run."""

    machine: dict[str, str | int]
    sizes: dict[str, float]
    is_quick: bool
    figures: list[Figure]
    by_pending: list[Point] = []
    by_workers: list[Point] = []

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        """Raises `OSError`, `msgspec.DecodeError`."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


# -- tables --------------------------------------------------------------------------------------


def table(run: Run, old: Run | None = None, *, markdown: bool = False) -> str:
    """The figures, beside those of an earlier run if there is one."""
    earlier = {figure.key: figure for figure in old.figures} if old is not None else {}
    head = HEAD if old is None else (*HEAD, *COMPARED_HEAD)
    rows: list[Sequence[str]] = [head]
    for figure in run.figures:
        cells = _cells(figure)
        rows.append(cells if old is None else (*cells, *_compared(figure, earlier)))
    return "\n".join(_markdown(rows) if markdown else _columns(rows)) + "\n"


def remarks(run: Run, old: Run | None = None) -> list[str]:
    """What a reader of the table must know."""
    told = [", ".join(f"{name} {value}" for name, value in run.machine.items())]
    if run.is_quick:
        told.append("A quick run: small sizes, which the goals are not meant for.")
    if old is not None and old.sizes != run.sizes:
        told.append("The earlier run had other sizes: its figures cannot be compared with these.")
    if old is not None and old.machine.get("cores") != run.machine.get("cores"):
        told.append("The earlier run was on another machine: compare ratios only.")
    return told


def worse(run: Run, old: Run) -> list[Figure]:
    """The figures that are worse by more than 10 % than in an earlier run."""
    earlier = {figure.key: figure for figure in old.figures}
    return [
        figure
        for figure in run.figures
        if (change := _change(figure, earlier)) is not None and _is_worse(figure, change)
    ]


def _change(figure: Figure, earlier: dict[str, Figure]) -> float | None:
    """The share by which what is judged has grown since."""
    before = earlier.get(figure.key)
    old, new = None if before is None else before.judged, figure.judged
    return None if not old or new is None else new / old - 1


def _is_worse(figure: Figure, change: float) -> bool:
    return (-change if figure.more_is_better else change) > WORSE


def _compared(figure: Figure, earlier: dict[str, Figure]) -> tuple[str, str, str]:
    before = earlier.get(figure.key)
    change = _change(figure, earlier)
    if before is None or change is None:
        return "", "", ""
    mark = " WORSE" if _is_worse(figure, change) else ""
    return _judged(before), _judged(figure), f"{100 * change:+.0f} %{mark}"


def _judged(figure: Figure) -> str:
    if figure.goal is not None and figure.goal.of_ratio:
        return _times(figure.ratio)
    return _amount(figure.value, figure.unit)


def _cells(figure: Figure) -> tuple[str, ...]:
    if figure.value is None:
        return figure.what, figure.missing, "", "", _goal(figure), ""
    baseline = _amount(figure.baseline, figure.unit)
    return (
        figure.what,
        _amount(figure.value, figure.unit),
        f"{figure.against} {baseline}" if baseline else "",
        _times(figure.ratio),
        _goal(figure),
        {True: "yes", False: "NO", None: ""}[figure.is_met],
    )


def _goal(figure: Figure) -> str:
    goal = figure.goal
    if goal is None:
        return ""
    sign = ">=" if goal.at_least else "<="
    return f"{sign} {goal.limit:g} x" if goal.of_ratio else (
        f"{sign} {_amount(goal.limit, figure.unit)}"
    )  # fmt: skip


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    number = f"{value:,.0f}".replace(",", " ") if abs(value) >= 100 else f"{value:.3g}"
    return f"{number} {unit}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f} x"


def _markdown(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for number, row in enumerate(rows):
        yield "| " + " | ".join(row) + " |"
        if number == 0:
            yield "|" + "---|" * len(row)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
