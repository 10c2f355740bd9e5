"""Of waits that keep their nature, 80 % start inside their interval."""

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.state.demand.wait_intervals import (
    CLUSTER_ERRORS,
    ERRORS_MIN,
    GROUP_ERRORS,
    OUTSIDE,
    adapted,
    adapted_interval,
    interval,
    keep,
)

WAITS = 2_000
ERRORS: dict[str, Callable[[Random], float]] = {
    "scatter": lambda chance: chance.gauss(0.0, 3.0),
    "always late": lambda chance: 20.0 + chance.expovariate(1.0),
    "another burst goes first": lambda chance: (
        chance.uniform(-1.0, 1.0) + 60.0 * (chance.random() < 0.2)
    ),
    "heavy tail": lambda chance: chance.lognormvariate(0.0, 2.0),
}
"""Kinds of errors of an estimate."""


def coverage(error: Callable[[Random], float], chance: Random, most: int) -> float:
    """Part of the waits inside the interval that the errors before them give."""
    errors: list[float] = []
    inside = 0
    for _ in range(WAITS):
        estimated_s = chance.uniform(100.0, 300.0)
        actual_s = estimated_s + error(chance)
        low_s, high_s = interval(errors, errors, estimated_s)
        inside += low_s <= actual_s <= high_s
        keep(errors, actual_s - estimated_s, most)
        assert len(errors) <= most
    return inside / WAITS


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("most", [GROUP_ERRORS, CLUSTER_ERRORS])
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 1 << 30))
def test_four_waits_in_five_are_inside(kind: str, most: int, seed: int) -> None:
    assert 0.75 <= coverage(ERRORS[kind], Random(seed), most) <= 0.85


def test_the_interval_follows_a_change() -> None:
    errors: list[float] = []
    for index in range(2 * GROUP_ERRORS):
        keep(errors, math.sin(index), GROUP_ERRORS)
    before = interval(errors, [], 100.0)
    for index in range(GROUP_ERRORS):
        keep(errors, 50.0 + math.sin(index), GROUP_ERRORS)
    after = interval(errors, [], 100.0)
    assert after == pytest.approx([50.0 + each for each in before], abs=0.5)


def test_few_errors_of_a_group_leave_the_clusters_and_few_of_both_the_factor() -> None:
    few, many = [1.0] * (ERRORS_MIN - 1), [3.0] * ERRORS_MIN
    assert interval(few, few, 10.0) == (5.0, 20.0)
    assert interval(few, many, 10.0) == (13.0, 13.0)
    assert interval([7.0] * ERRORS_MIN, many, 10.0) == (17.0, 17.0)


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=GROUP_ERRORS),
    st.lists(st.floats(-1e6, 1e6), max_size=CLUSTER_ERRORS),
    st.floats(0.0, 1e6),
)
def test_an_interval_is_of_possible_waits(
    group: list[float], cluster: list[float], estimated_s: float
) -> None:
    low_s, high_s = interval(group, cluster, estimated_s)
    assert 0.0 <= low_s <= high_s
    used = group if len(group) >= ERRORS_MIN else cluster
    if len(used) >= ERRORS_MIN:
        # At most a tenth of the errors is outside on each side.
        newest = used[-(10 * ((len(used) + 1) // 10) - 1) :]
        assert sum(max(0.0, estimated_s + each) < low_s for each in newest) < 0.1 * len(newest)
        assert sum(max(0.0, estimated_s + each) > high_s for each in newest) < 0.1 * len(newest)


def adapted_coverage(error: Callable[[int], float]) -> tuple[float, float]:
    """Parts of the outcomes inside the adapted and the plain interval; `error` by number."""
    errors: list[float] = []
    inside = plain = 0
    shift = 0.0
    for number in range(WAITS):
        low, high = adapted_interval(errors, 1000.0, OUTSIDE + shift)
        before = interval(errors, errors, 1000.0)
        new = error(number)
        is_inside = low <= 1000.0 + new <= high
        inside += is_inside
        plain += before[0] <= 1000.0 + new <= before[1]
        if len(errors) >= ERRORS_MIN:
            shift = adapted(shift, is_inside=is_inside)
        keep(errors, new, CLUSTER_ERRORS)
    return inside / WAITS, plain / WAITS


@pytest.mark.parametrize("kind", ERRORS)
def test_adapted_intervals_hold_four_in_five(kind: str) -> None:
    chance = Random(3)
    inside, _ = adapted_coverage(lambda _: ERRORS[kind](chance))
    assert 0.75 <= inside <= 0.85


def test_adapted_intervals_hold_while_errors_grow_and_plain_ones_do_not() -> None:
    chance = Random(4)
    inside, plain = adapted_coverage(lambda number: 0.2 * number + chance.gauss(0.0, 4.0))
    assert plain < 0.65
    assert 0.75 <= inside <= 0.85


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=CLUSTER_ERRORS),
    st.floats(0.0, 1e6),
    st.lists(st.booleans(), max_size=60),
)
def test_an_adapted_interval_is_of_possible_times(
    errors: list[float], estimated_s: float, inside: list[bool]
) -> None:
    shift = 0.0
    for each in inside:
        shift = adapted(shift, is_inside=each)
    low_s, high_s = adapted_interval(errors, estimated_s, OUTSIDE + shift)
    assert 0.0 <= low_s <= high_s
