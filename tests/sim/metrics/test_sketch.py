"""Quantiles of a sketch are within its error; moments are exact."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.sim.metrics.sketch import ERROR, FLUSH_AT, SMALLEST, Sketch
from plexrl.sim.results.result import CDF_POINTS
from tests.examples import examples

VALUES = st.floats(-1e9, 1e9).filter(lambda value: value == 0 or abs(value) > 2 * SMALLEST)


def sketch_of(values: list[float]) -> Sketch:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch


def nearest_rank(values: list[float], part: float) -> float:
    return sorted(values)[max(1, math.ceil(part * len(values))) - 1]


@given(values=st.lists(VALUES, min_size=1, max_size=200), part=st.floats(0, 1))
def test_any_quantile_is_right_to_the_relative_error(values: list[float], part: float) -> None:
    exact = nearest_rank(values, part)
    assert sketch_of(values).quantile(part) == pytest.approx(exact, rel=ERROR * 1.0001)


@given(values=st.lists(VALUES, min_size=1, max_size=200))
@settings(max_examples=examples(50))
def test_count_mean_and_maximum_are_exact(values: list[float]) -> None:
    found = sketch_of(values).distribution()
    assert found.count == len(values)
    assert found.mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-12)
    assert found.highest == max(values)


@given(values=st.lists(VALUES, min_size=1, max_size=200))
def test_a_point_of_the_curve_tells_the_part_that_is_at_most_so(values: list[float]) -> None:
    points = sketch_of(values).distribution().cdf
    assert [point for point in points if point[1] == 1.0] == [(max(values), 1.0)]
    assert points == tuple(sorted(points))
    for value, part in points:
        below = sum(each <= value + abs(value) * 1e-9 for each in values)
        assert below / len(values) == pytest.approx(part)


def test_a_million_orders_of_magnitude_stay_few_points_of_one_distribution() -> None:
    random = Random(7)
    values = [random.lognormvariate(3, 2) for _ in range(5 * FLUSH_AT + 17)]
    found = sketch_of(values).distribution()
    assert 100 < len(found.cdf) <= CDF_POINTS
    for told, part in ((found.median, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        assert told == pytest.approx(nearest_rank(values, part), rel=ERROR)


def test_what_rounding_leaves_beside_zero_is_zero() -> None:
    found = sketch_of([0.0, -1e-13, 3e-9, -SMALLEST, SMALLEST]).distribution()
    assert found.median == 0.0
    assert sketch_of([-1e-13] * 3).distribution().p99 == pytest.approx(0.0, abs=SMALLEST)


def test_without_values_there_is_an_empty_distribution() -> None:
    found = Sketch().distribution()
    assert (found.count, found.mean, found.highest, found.cdf) == (0, 0.0, 0.0, ())


def test_memory_is_bounded_by_the_range_and_not_by_the_count() -> None:
    sketch = sketch_of([1.0 + number % 1000 for number in range(20 * FLUSH_AT)])
    assert len(sketch._buckets) <= math.ceil(math.log(1001) / math.log(1.01 / 0.99)) + 1
    assert len(sketch._buffer) < FLUSH_AT
