"""Minimum-cost matchings against all permutations, and what depends on them."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from actors.server.clusters.placement import (
    Seats,
    cheapest,
    costs,
    load_solver,
    match,
    seatable,
)

load_solver()  # or it counts against hypothesis' deadline
SIZES = st.integers(0, 2**62)


@st.composite
def seats(draw, unreported=True):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    shape = rows, columns
    flags = st.lists(st.booleans(), min_size=rows * columns, max_size=rows * columns)
    sizes = st.lists(SIZES, min_size=rows * columns, max_size=rows * columns)
    allowed = np.array(draw(flags), bool).reshape(shape)
    reported = np.array(draw(flags), bool).reshape(shape) if unreported else np.ones(shape, bool)
    return Seats(allowed, reported, np.array(draw(sizes), float).reshape(shape))


def placements(matrix):
    """Every full matching with its exact cost."""
    rows, columns = matrix.shape
    for chosen in itertools.permutations(range(columns), rows):
        cost = [matrix[row, column] for row, column in enumerate(chosen)]
        if all(map(math.isfinite, cost)):
            yield sum(map(int, cost)), list(chosen)


@given(seats())
def test_the_cheapest_of_all_placements_exactly(given_seats):
    matrix = costs(given_seats)
    found, best = match(matrix), min(placements(matrix), default=None)
    assert (found is None) == (best is None)
    if found is not None:
        columns, cost = found
        assert cost == best[0] < 2**53
        assert [cost, columns] in [list(p) for p in placements(matrix)]
        assert match(matrix) == found


@given(seats())
def test_a_seat_that_was_not_reported_is_dearer_than_any_placement_that_was(given_seats):
    matrix = costs(given_seats)
    known = [cost for cost, chosen in placements(matrix)
             if all(given_seats.reported[r, c] for r, c in enumerate(chosen))]  # fmt: skip
    unknown = matrix[given_seats.allowed & ~given_seats.reported]
    if known and unknown.size:
        assert max(known) < unknown.min()


@given(seats(), st.data())
def test_with_busy_seats_as_few_of_them_as_can_be(given_seats, data):
    shape = given_seats.allowed.shape
    idle = np.array(
        data.draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))),
        bool,
    ).reshape(shape)
    matrix = costs(given_seats, idle)
    found = match(matrix)
    if found is None:
        return

    def busy(chosen) -> int:
        return sum(not idle[row, column] for row, column in enumerate(chosen))

    assert busy(found[0]) == min(busy(chosen) for _, chosen in placements(matrix))
    assert found[1] == min(cost for cost, _ in placements(matrix)) < 2**53


@given(seats(), st.data())
def test_zones(given_seats, data):
    columns = given_seats.allowed.shape[1]
    zone_names = st.sampled_from([None, "a", "b"])
    zones = data.draw(st.lists(zone_names, min_size=columns, max_size=columns))
    matrix = costs(given_seats)
    in_zone = [(cost, chosen) for cost, chosen in placements(matrix)
               if len({zones[c] for c in chosen}) == 1]  # fmt: skip
    found = cheapest(matrix, zones)
    assert (found is None) == (not in_zone)
    if found is not None:
        assert [cost for cost, chosen in in_zone if chosen == found] == [min(in_zone)[0]]


@given(seats())
def test_how_many_could_sit(given_seats):
    allowed = given_seats.allowed
    rows, columns = allowed.shape
    best = 0
    for size in range(1, rows + 1):
        for subset in itertools.combinations(range(rows), size):
            for chosen in itertools.permutations(range(columns), size):
                if all(allowed[r, c] for r, c in zip(subset, chosen, strict=True)):
                    best = size
    assert seatable(allowed, None) == (best, None)


def test_equal_zones_go_to_the_first_by_name_the_unnamed_before_all():
    matrix = np.zeros((1, 3))
    assert cheapest(matrix, ["b", "a", None]) == [2]
    assert cheapest(matrix, ["b", "a", "c"]) == [1]
