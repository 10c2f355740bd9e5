"""The switch controller, against a search over all plans."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.adaptive_tp.controller import SwitchController
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor
from plexrl.rollout.policies.adaptive_tp.remaining import UnfinishedRow, deal, remaining_s
from tests.examples import examples
from tests.rollout.adaptive_tp.oracle import cost_s, group_s, least_s, profile

ROW = st.builds(UnfinishedRow, tokens=st.integers(1, 200), left=st.integers(1, 60))
COST = st.sampled_from([0.0, 1.0, 20.0, 500.0])


@given(st.lists(st.lists(ROW, max_size=5), min_size=4, max_size=4), COST)
def test_one_moment_decides_as_algorithm_1_of_the_paper(
    groups: list[list[UnfinishedRow]], switch_s: float
) -> None:
    predictor = LatencyPredictor(profile(switch_s=switch_s))
    found = SwitchController(predictor, moments_max=1).decide(1, groups)
    rows = [row for group in groups for row in group]
    if not rows:
        assert found is None
        return
    stay_s = remaining_s(predictor, 1, groups)
    totals = {
        size: remaining_s(predictor, size, deal(rows, 4 // size))
        + cost_s(predictor, 1, groups, size, 0)
        for size in (2, 4)
    }
    best = min(totals, key=lambda size: totals[size])
    if found is None:
        assert totals[best] >= stay_s - 1e-6
    else:
        assert totals[found.tp] == pytest.approx(totals[best])
        assert found.gain_s == pytest.approx(stay_s - totals[best], abs=1e-6)
        assert found.gain_s > 0


@settings(max_examples=examples(40))
@given(
    st.lists(st.lists(ROW, max_size=2), min_size=4, max_size=4),
    COST,
    st.sampled_from([1, 2, 4]),
)
def test_the_plan_is_the_best_of_all(
    groups: list[list[UnfinishedRow]], switch_s: float, tp: int
) -> None:
    predictor = LatencyPredictor(profile(switch_s=switch_s))
    held = groups[: 4 // tp]
    rows = [row for group in held for row in group]
    if not rows:
        return
    ends = sorted({row.left for row in rows})[-4:]
    found = SwitchController(predictor, moments_max=4).decide(tp, held)
    moments = [0, *ends]
    stays = least_s_first(predictor, tp, held, moments, tp)
    for size in predictor.sizes:
        if size == tp:
            continue
        switched = least_s_first(predictor, tp, held, moments, size)
        if found is None:
            assert stays <= switched + 1e-6
        elif size == found.tp:
            assert switched < stays + 1e-6
        else:
            assert least_s_first(predictor, tp, held, moments, found.tp) <= switched + 1e-6


def least_s_first(
    predictor: LatencyPredictor,
    tp: int,
    groups: list[list[UnfinishedRow]],
    moments: list[int],
    first: int,
) -> float:
    """The least time of all plans that begin with this size."""
    rows = [row for group in groups for row in group]
    held = groups if first == tp else deal(rows, predictor.sizes[-1] // first)
    seconds = max(group_s(predictor, first, each, range(moments[0], moments[1])) for each in held)
    if first != tp:
        seconds += cost_s(predictor, tp, groups, first, 0)
    return seconds + least_s(predictor, first, held, moments[1:])


@given(st.lists(st.lists(ROW, max_size=8), min_size=4, max_size=4))
def test_a_switch_that_costs_more_than_everything_never_comes(
    groups: list[list[UnfinishedRow]],
) -> None:
    rows = [row for group in groups for row in group]
    predictor = LatencyPredictor(profile(switch_s=1e6))
    assert SwitchController(predictor).decide(1, groups) is None
    # With the sizes' times equal, nothing is gained either.
    flat = LatencyPredictor(profile(lambda _tp, _rows, _tokens: 1.0, switch_s=0.0))
    assert SwitchController(flat).decide(4, [rows]) is None


def test_many_rows_stay_in_small_groups_and_the_last_one_gets_all_ranks() -> None:
    controller = SwitchController(LatencyPredictor(profile()))
    many = deal([UnfinishedRow(300, 100)] * 128, 4)
    assert controller.decide(1, many) is None
    last = controller.decide(1, [[UnfinishedRow(300, 200)], [], [], []])
    assert last is not None
    assert (last.tp, last.kv) == (4, "migrate")
    assert controller.decide(4, [[UnfinishedRow(300, 200)]]) is None
    # Too little is left.
    assert controller.decide(1, [[UnfinishedRow(300, 3)], [], [], []]) is None


def test_a_switch_waits_for_the_ends_of_the_rows_that_it_would_slow_down() -> None:
    predictor = LatencyPredictor(profile())
    groups = deal([UnfinishedRow(10, 100)] * 127 + [UnfinishedRow(10, 600)], 4)
    # Compared with no switch at all, one now wins.
    assert SwitchController(predictor, moments_max=1).decide(1, groups) is not None
    assert SwitchController(predictor).decide(1, groups) is None


def test_an_empty_engine_has_nothing_to_decide() -> None:
    predictor = LatencyPredictor(profile())
    controller = SwitchController(predictor)
    assert controller.decide(1, [[], [], [], []]) is None
    assert controller.decide(1, [[UnfinishedRow(5, 0)], [], [], []]) is None
    with pytest.raises(InvalidRequestError, match="moments_max is 0"):
        SwitchController(predictor, moments_max=0)


def test_staying_wins_a_tie() -> None:
    found = profile(lambda _tp, _rows, _tokens: 1.0, switch_s=0.0, kv_bytes_per_s=None)
    groups = [[UnfinishedRow(10, 5)], [], [], []]
    assert SwitchController(LatencyPredictor(found)).decide(1, groups) is None
