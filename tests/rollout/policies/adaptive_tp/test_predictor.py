"""Predicted decode steps, and the seconds that are left, against a sum over all steps."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.client.data.decode_profile import DecodeProfile, ProfilePoint, profile_from_json
from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.adaptive_tp.predictor import Curve, LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow, deal, remaining_s
from tests.rollout.adaptive_tp.oracle import group_s, profile, subject

SECONDS = st.floats(1e-4, 1e3)
POINTS = st.lists(
    st.builds(
        ProfilePoint,
        tp=st.just(1),
        rows=st.integers(1, 64),
        prompt_tokens=st.integers(1, 500),
        kv_tokens=st.integers(1, 4000).map(float),
        step_s=SECONDS,
        prefill_s=SECONDS,
    ),
    min_size=1,
    max_size=20,
    unique_by=(lambda point: (point.rows, point.kv_tokens)),
)
ROWS = st.lists(
    st.builds(UnfinishedRow, tokens=st.integers(1, 300), left=st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


def predictor(points: list[ProfilePoint]) -> LatencyPredictor:
    return LatencyPredictor(DecodeProfile(subject=subject((1,)), points=tuple(points)))


@given(POINTS)
def test_a_profiled_step_is_predicted_as_it_was_measured(points: list[ProfilePoint]) -> None:
    found = predictor(points)
    for each in points:
        assert found.step_s(1, each.rows, each.kv_tokens) == pytest.approx(each.step_s)


@given(POINTS, st.integers(1, 100), st.lists(st.floats(0, 1e4), min_size=2, max_size=20))
def test_more_context_never_makes_a_step_faster_if_it_did_not_when_measured(
    points: list[ProfilePoint], rows: int, contexts: list[float]
) -> None:
    sorted_s = sorted(each.step_s for each in points)
    order = sorted(points, key=lambda point: point.kv_tokens)
    rising = [
        ProfilePoint(
            tp=1,
            rows=each.rows,
            prompt_tokens=each.prompt_tokens,
            kv_tokens=each.kv_tokens,
            step_s=seconds,
            prefill_s=1.0,
        )
        for each, seconds in zip(order, sorted_s, strict=True)
    ]
    found = predictor(rising)
    steps = [found.step_s(1, rows, each) for each in sorted(contexts)]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(steps))


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0, 1e4))
def test_more_rows_never_make_a_step_faster_if_they_did_not_when_measured(
    one: int, other: int, tokens: float
) -> None:
    found = LatencyPredictor(profile())
    low, high = sorted((one, other))
    for tp in (1, 2, 4):
        assert found.step_s(tp, low, tokens) <= found.step_s(tp, high, tokens) + 1e-9


@given(
    st.lists(
        st.tuples(st.floats(0, 1e4), st.floats(0, 1e3)),
        min_size=1,
        max_size=8,
        unique_by=lambda p: p[0],
    ),
    st.floats(0, 1e4),
    st.integers(1, 500),
    st.integers(0, 60),
)
def test_the_sum_over_a_curve_is_that_of_its_values(
    points: list[tuple[float, float]], first: float, step: int, count: int
) -> None:
    curve = Curve(points)
    wanted = math.fsum(curve.at(first + step * index) for index in range(count))
    assert curve.total(first, step, count) == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(POINTS, ROWS)
def test_the_time_of_a_group_is_the_sum_of_its_steps(
    points: list[ProfilePoint], rows: list[UnfinishedRow]
) -> None:
    found = predictor(points)
    last = max(row.left for row in rows)
    wanted = group_s(found, 1, rows, range(last))
    assert remaining_s(found, 1, [rows]) == pytest.approx(wanted, rel=1e-6)


@given(ROWS, st.sampled_from([1, 2, 4]))
def test_groups_have_equal_numbers_of_rows_at_each_time(
    rows: list[UnfinishedRow], groups: int
) -> None:
    dealt = deal(rows, groups)
    assert sorted(row for each in dealt for row in each) == sorted(rows)
    for steps in range(41):
        counts = [sum(row.left > steps for row in each) for each in dealt]
        assert max(counts) - min(counts) <= 1


def test_prefill_and_kv_moves_follow_the_equations() -> None:
    found = LatencyPredictor(profile(kv_bytes_per_s=500.0))
    assert found.prefill_s(2, 8, 512.0) == pytest.approx(1e-3 * 8 * 512 / 2)
    # 1000 bytes of a token, of which a rank of a pair has half; half of these stay.
    assert found.move_s(2, 4, 30.0) == pytest.approx(30 * 500 * 0.5 / 500)
    assert found.move_s(4, 1, 30.0) == pytest.approx(30 * 250 * 0.75 / 500)
    assert found.move_s(2, 2, 30.0) == 0.0
    assert found.switch_cost(1.0, 2.0).kv == "migrate"
    assert found.switch_cost(3.0, 2.0).kv == "recompute"
    assert found.switch_cost(3.0, 2.0).seconds == 22.0


def test_a_profile_survives_its_json_and_refuses_what_it_cannot_be() -> None:
    found = profile()
    assert profile_from_json(found.to_json()) == found
    empty = DecodeProfile(subject=subject())
    assert profile_from_json(empty.to_json()) == empty
    for text in ("", "{}", found.to_json().replace('"step_s": ', '"step_s": -'), b"\xff"):
        with pytest.raises(InvalidRequestError):
            profile_from_json(text)
    with pytest.raises(InvalidRequestError, match=r"has a point of tp 4, and its sizes are \[1, 2"):
        DecodeProfile(subject=subject((1, 2)), points=found.points)
    with pytest.raises(InvalidRequestError, match="no point of tp 1: call"):
        LatencyPredictor(empty)


def test_a_profile_serves_only_engines_that_are_equal() -> None:
    subject().check_serves(subject())
    with pytest.raises(InvalidRequestError, match=r"measured with tp_sizes \(1, 2, 4\), and"):
        subject().check_serves(subject((1, 2)))


def test_beyond_its_last_point_a_curve_goes_on_but_does_not_fall() -> None:
    assert Curve([(0.0, 1.0), (2.0, 3.0)]).at(4.0) == 5.0
    assert Curve([(0.0, 3.0), (2.0, 1.0)]).at(4.0) == 1.0


def test_more_rows_than_were_profiled_are_on_the_line_of_the_largest_numbers() -> None:
    """The constant part of a step is not taken for one that grows with the rows."""
    found = LatencyPredictor(profile(lambda _tp, rows, _tokens: 10.0 + rows, rows=(1, 2, 4)))
    assert found.step_s(1, 12, 100.0) == pytest.approx(22.0)
    one = LatencyPredictor(profile(lambda _tp, rows, _tokens: float(rows), rows=(4,)))
    assert one.step_s(1, 12, 100.0) == pytest.approx(12.0)


@given(st.integers(33, 500), st.integers(8, 4096), st.sampled_from([1, 2, 4]))
def test_a_prefill_beyond_the_profile_takes_as_long_for_each_row(
    rows: int, length: int, tp: int
) -> None:
    """The rows of the profile end at 32, and its prefill is linear in rows and length."""
    found = LatencyPredictor(profile()).prefill_s(tp, rows, length)
    assert found == pytest.approx(1e-3 * rows * length / tp)
