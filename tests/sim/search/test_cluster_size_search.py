"""The size search is exact if more nodes always help, and reports when they do not."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.sim.search.cluster_size_search import Search, smallest

SIZES = st.integers(1, 400)


class Oracle:
    """Knows which sizes meet, and remembers which it was asked for."""

    def __init__(self, meeting: set[int]) -> None:
        self.meeting = meeting
        self.asked: list[int] = []
        self.batches: list[int] = []

    def __call__(self, sizes: Sequence[int]) -> list[bool]:
        self.asked += sizes
        self.batches.append(len(sizes))
        return [size in self.meeting for size in sizes]


@given(lowest=SIZES, more=st.integers(0, 400), least=SIZES, at_once=st.integers(1, 9))
def test_of_sizes_where_more_helps_the_smallest_is_found(
    lowest: int, more: int, least: int, at_once: int
) -> None:
    highest = lowest + more
    oracle = Oracle(set(range(least, highest + 1)))
    search = smallest(oracle, lowest=lowest, highest=highest, at_once=at_once)
    assert search.nodes == (max(least, lowest) if least <= highest else None)
    assert search.is_monotone
    assert all(lowest <= size <= highest for size in oracle.asked)


@given(
    meeting=st.sets(st.integers(1, 120)),
    lowest=st.integers(1, 120),
    more=st.integers(0, 120),
    at_once=st.integers(1, 9),
    neighbours=st.integers(1, 5),
)
def test_no_answer_fails_and_what_is_said_of_the_sizes_below_is_true(
    meeting: set[int], lowest: int, more: int, at_once: int, neighbours: int
) -> None:
    oracle = Oracle(meeting)
    search = smallest(
        oracle, lowest=lowest, highest=lowest + more, at_once=at_once, neighbours=neighbours
    )
    assert len(oracle.asked) == len(set(oracle.asked)), "a size was run twice"
    assert search.probes == {size: size in meeting for size in sorted(oracle.asked)}
    if search.nodes is None:
        assert not any(search.probes.values())
        return
    assert search.nodes in meeting
    below = range(max(lowest, search.nodes - neighbours), search.nodes)
    assert not meeting & set(below)
    assert search.failing_from is None or search.failing_from <= max(lowest, below.start)
    for size in range(search.failing_from or search.nodes, search.nodes):
        assert search.probes[size] is False


def test_several_probes_at_a_time_ask_in_fewer_turns() -> None:
    one, many = Oracle(set(range(300, 1001))), Oracle(set(range(300, 1001)))
    assert smallest(one, lowest=1, highest=1000).nodes == 300
    assert smallest(many, lowest=1, highest=1000, at_once=8).nodes == 300
    assert len(many.batches) < len(one.batches) / 2
    assert max(many.batches) <= 8


def test_a_larger_size_that_fails_is_told() -> None:
    search = Search(nodes=4, probes={2: False, 4: True, 8: False, 16: True}, failing_from=2)
    assert not search.is_monotone
    assert Search(nodes=4, probes={2: False, 4: True, 8: True}, failing_from=2).is_monotone


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="largest job needs 48"):
        smallest(Oracle(set()), lowest=48, highest=16)
