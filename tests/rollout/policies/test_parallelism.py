"""The size of tensor-parallel groups: against the rule by definition, over any histories."""

from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.parallelism import HeldParallelism, ParallelismPlanner

SIZES = (1, 2, 4, 8)
COUNTS = st.lists(st.sampled_from([0, 0, 0, 1, 20, 21, 22, 400]), max_size=30)
ROUNDS = st.lists(
    st.tuples(st.sampled_from(["short", "long"]), st.sampled_from([0, 0, 0, 1, 20, 22])),
    max_size=40,
)
DEFAULT = st.sampled_from(SIZES)


def by_definition(counts: list[int], default: int) -> int:
    """The size after all rounds: each doubling and each halving in the order of the rounds."""
    changes: list[tuple[int, float]] = [
        (at, 2.0)
        for at in range(1, len(counts))
        if counts[at] > 1.05 * counts[at - 1] and counts[at]
    ]
    at = 0
    for is_quiet, run in groupby(counts, key=lambda count: count == 0):
        length = len(list(run))
        if is_quiet:
            changes += [(end - 1, 0.5) for end in range(at + 4, at + length + 1, 4)]
        at += length
    size = float(default)
    for _, factor in sorted(changes):
        size = min(8.0, max(1.0, size * factor))
    return int(size)


@given(COUNTS, DEFAULT)
def test_the_size_is_that_of_the_rule(counts: list[int], default: int) -> None:
    planner = ParallelismPlanner(SIZES, default)
    assert planner.size("short") == default
    for at, count in enumerate(counts):
        wanted = by_definition(counts[: at + 1], default)
        assert planner.observe("short", count) == planner.size("short") == wanted


@given(ROUNDS, DEFAULT)
def test_rounds_of_one_kind_do_not_change_the_size_of_the_other(
    rounds: list[tuple[str, int]], default: int
) -> None:
    both = ParallelismPlanner(SIZES, default)
    alone = {kind: ParallelismPlanner(SIZES, default) for kind in ("short", "long")}
    for kind, count in rounds:
        assert both.observe(kind, count) == alone[kind].observe(kind, count)
        assert [both.size(each) for each in alone] == [alone[each].size(each) for each in alone]


@given(ROUNDS, st.integers(0, 40), DEFAULT)
def test_a_planner_goes_on_from_what_was_kept(
    rounds: list[tuple[str, int]], cut: int, default: int
) -> None:
    whole, first = (ParallelismPlanner(SIZES, default) for _ in range(2))
    for kind, count in rounds[:cut]:
        whole.observe(kind, count)
        first.observe(kind, count)
    kept = msgspec.json.decode(msgspec.json.encode(first.held), type=HeldParallelism)
    second = ParallelismPlanner(SIZES, default, held=kept)
    for kind, count in rounds[cut:]:
        assert second.observe(kind, count) == whole.observe(kind, count)


@given(COUNTS)
def test_a_size_that_the_profile_calls_slower_is_not_chosen_for_want_of_preemptions(
    counts: list[int],
) -> None:
    """Two GPUs are the fastest for one sample, so that nothing leads from two to one."""
    planner = ParallelismPlanner(SIZES, 2, profile={1: 0.020, 2: 0.015, 4: 0.016})
    free = ParallelismPlanner(SIZES, 2)
    for count in counts:
        size, free_size = planner.observe("", count), free.observe("", count)
        assert size >= max(2, free_size)


def test_four_quiet_rounds_halve_it_once() -> None:
    planner = ParallelismPlanner(SIZES, 8)
    assert [planner.observe("", 0) for _ in range(8)] == [8, 8, 8, 4, 4, 4, 4, 2]


def test_a_rise_of_five_percent_is_none() -> None:
    planner = ParallelismPlanner(SIZES, 2)
    assert [planner.observe("", count) for count in (100, 105, 111)] == [2, 2, 4]


@pytest.mark.parametrize(
    ("sizes", "default", "message"),
    [
        ((), 1, "sizes are"),
        ((0, 0), 0, "sizes are"),
        ((1, 3), 1, "each twice"),
        ((2, 4), 1, "default size 1"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, ...], default: int, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        ParallelismPlanner(sizes, default)


def test_a_negative_count_changes_nothing() -> None:
    planner = ParallelismPlanner(SIZES, 2)
    with pytest.raises(InvalidRequestError, match="-1 preemptions"):
        planner.observe("", -1)
    assert planner.held == HeldParallelism()
