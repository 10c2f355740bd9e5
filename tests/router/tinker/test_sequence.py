"""The order of a model's requests."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError, OverloadedError
from plexrl.router.tinker.sequence import WAITING_MAX, RequestSequence


def taken(sequence: RequestSequence[int]) -> list[int]:
    """All requests that may leave now."""
    found = []
    while (item := sequence.take()) is not None:
        found.append(item)
    return found


@given(
    order=st.permutations(range(1, 9)),
    refused=st.sets(st.integers(1, 8)),
    again=st.lists(st.integers(0, 7), max_size=6),
)
def test_requests_leave_once_and_in_order_however_they_arrive(
    order: list[int], refused: set[int], again: list[int]
) -> None:
    sequence: RequestSequence[int] = RequestSequence()
    left = []
    for seq in order:
        assert sequence.add(seq, None if seq in refused else seq)
        left += taken(sequence)
        for at in again:
            repeated = order[at]
            if sequence.is_known(repeated):
                assert not sequence.add(repeated, repeated)
        left += taken(sequence)
    assert left == [seq for seq in range(1, 9) if seq not in refused]
    assert sequence.next_seq == 9


def test_a_restarted_sequence_takes_former_numbers_for_repetitions() -> None:
    sequence: RequestSequence[int] = RequestSequence(next_seq=5)
    assert not sequence.add(4, 4)
    assert sequence.add(5, 5)
    assert taken(sequence) == [5]


def test_a_number_below_1_and_too_many_waiting_requests_are_refused() -> None:
    sequence: RequestSequence[int] = RequestSequence()
    with pytest.raises(InvalidRequestError, match="from 1"):
        sequence.add(0, 0)
    for seq in range(2, WAITING_MAX + 2):
        sequence.add(seq, seq)
    with pytest.raises(OverloadedError, match="wait for request 1"):
        sequence.add(WAITING_MAX + 2, 0)
    assert sequence.add(1, 1)
    assert len(taken(sequence)) == WAITING_MAX + 1
