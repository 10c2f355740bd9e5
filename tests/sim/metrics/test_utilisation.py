"""Bins hold exact sums, however often they are merged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.sim.metrics.utilisation import FLUSH_AT, Series
from plexrl.sim.results.result import SERIES_BINS

STRETCHES = st.lists(
    st.tuples(st.floats(0, 5000), st.floats(0, 3000), st.integers(1, 64)), min_size=1, max_size=30
)


def amount(stretches: list[tuple[float, float, int]], start_s: float, end_s: float) -> float:
    """By the definition: level times overlap, summed."""
    return sum(
        level * max(0.0, min(start + length, end_s) - max(start, start_s))
        for start, length, level in stretches
    )


@given(stretches=STRETCHES)
def test_each_bin_has_what_overlaps_it(stretches: list[tuple[float, float, int]]) -> None:
    series = Series()
    for start, length, gpus in stretches:
        series.add(start, start + length, gpus)
    end_s = max(start + length for start, length, _ in stretches) + 1.0
    series.reach(end_s)
    levels = series.levels(end_s)
    assert len(levels) <= SERIES_BINS
    for number, (start_s, level) in enumerate(levels):
        assert start_s == number * series.width_s
        bin_end_s = min(start_s + series.width_s, end_s)
        expected = amount(stretches, start_s, bin_end_s)
        assert level * (bin_end_s - start_s) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_joining_bins_moves_and_loses_nothing() -> None:
    series = Series()
    count = 3 * FLUSH_AT
    for number in range(count):
        series.add(number * 7.0, number * 7.0 + 5.0, 2)
    end_s = count * 7.0
    levels = series.levels(end_s)
    assert SERIES_BINS / 2 < len(levels) <= SERIES_BINS
    widths = [min(series.width_s, end_s - start_s) for start_s, _ in levels]
    total = sum(level * width for (_, level), width in zip(levels, widths, strict=True))
    assert total == pytest.approx(count * 10.0)


def test_the_last_bin_tells_the_mean_up_to_the_end_only() -> None:
    series = Series()
    series.add(0.0, 300.5, 4)
    assert series.levels(300.5)[-1] == pytest.approx((300.0, 4.0))


def test_a_stretch_may_end_where_the_last_bin_does() -> None:
    series = Series()
    series.add(SERIES_BINS - 0.5, float(SERIES_BINS), 1)
    assert series.levels(float(SERIES_BINS))[-1] == pytest.approx((SERIES_BINS - 1.0, 0.5))
