"""Which worker each member of a cluster sits on: a minimum-cost matching. Pure.

A matrix has a row per member and a column per worker. Costs are whole numbers, small enough for
sums of them to be exact as floats, so that equal placements compare equal and the choice among
them repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXACT = 2.0**51
"""With room for one level more, sums up to it are exact as floats."""
COST_UNIT_BYTES = 1024

Costs = NDArray[np.float64]
"""Infinite where a member cannot sit on the worker."""


class Seats(NamedTuple):
    """What is known of each member on each worker; rows are members."""

    allowed: NDArray[np.bool_]
    reported: NDArray[np.bool_]
    missing_bytes: NDArray[np.float64]


def load_solver() -> None:
    """Imports the solver, which takes a while: to be called where nobody waits."""
    import scipy.optimize  # noqa: F401, PLC0415 - see above


def costs(seats: Seats, idle: NDArray[np.bool_] | None = None) -> Costs:
    """The cost of each seat: the missing bytes in whole KiB, at a pair that was not reported more
    than all seats of any placement that was. With `idle`, a busy seat costs more than any
    placement on idle ones."""
    members = len(seats.allowed)
    levels = 2 if idle is None else 3
    cap = float(EXACT // max(1, members) ** levels)
    unreported = cap * members
    missing = np.minimum(np.ceil(seats.missing_bytes / COST_UNIT_BYTES), cap - 1)
    found = np.where(seats.reported, missing, unreported)
    if idle is not None:
        found = np.where(idle, found, found + unreported * members + 1)
    return np.where(seats.allowed, found, np.inf)


def match(matrix: Costs) -> tuple[list[int], float] | None:
    """The column of each row in a cheapest full matching, and its cost; None when there is none.

    The same matrix always gives the same answer.
    """
    rows, columns = matrix.shape
    if rows > columns or not np.isfinite(matrix).any(axis=1).all():
        return None
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - see `load_solver`

    try:
        row, column = linear_sum_assignment(matrix)
    except ValueError:
        return None  # there is no full matching; the matrix holds no NaN
    return column.tolist(), float(matrix[row, column].sum())


def cheapest(matrix: Costs, zones: Sequence[str | None] | None) -> list[int] | None:
    """The cheapest full matching: over all columns, or with `zones` (one per column) within one
    zone; of equally cheap zones the first by name, the one without a name before all."""
    if zones is None:
        found = match(matrix)
        return None if found is None else found[0]
    best: tuple[float, list[int]] | None = None
    for columns in by_zone(zones).values():
        found = match(matrix[:, columns])
        if found is not None and (best is None or found[1] < best[0]):
            best = found[1], [columns[i] for i in found[0]]
    return None if best is None else best[1]


def seatable(
    allowed: NDArray[np.bool_], zones: Sequence[str | None] | None
) -> tuple[int, str | None]:
    """How many members could sit at once, in the best zone if one is asked for, and which it
    is."""
    if zones is None:
        return _size(allowed), None
    best: tuple[int, str | None] = (0, None)
    for zone, columns in by_zone(zones).items():
        size = _size(allowed[:, columns])
        if size > best[0]:
            best = size, zone
    return best


def by_zone(zones: Sequence[str | None]) -> dict[str | None, list[int]]:
    """Columns of each zone, in the order of the zones' names."""
    columns: dict[str | None, list[int]] = {}
    for column, zone in enumerate(zones):
        columns.setdefault(zone, []).append(column)
    return dict(sorted(columns.items(), key=lambda item: (item[0] is not None, item[0] or "")))


def _size(allowed: NDArray[np.bool_]) -> int:
    if not allowed.size:
        return 0
    from scipy.optimize import linear_sum_assignment  # noqa: PLC0415 - see `load_solver`

    row, column = linear_sum_assignment(allowed, maximize=True)
    return int(allowed[row, column].sum())
