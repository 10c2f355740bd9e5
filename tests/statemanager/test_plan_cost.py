"""Slices or whole tensors: the cheaper way, and only what is allowed."""

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.plan import make_plan
from plexrl.statemanager.plan_balance import Source
from plexrl.statemanager.plan_cost import Link, SyncChoice, SyncWay, choose_way
from plexrl.statemanager.plan_layout import Layout

LINK = Link(bytes_per_s=10e9, request_s=20e-6)


def columns(rank: int, ways: int, *, tensors: int, rows: int, width: int) -> Layout:
    """A rank's part of every matrix, some columns of all rows."""
    size = width // ways
    return Layout.of(
        [
            StateSlice(
                key=StateKey(part=StatePart.PARAMETER, name=f"w{index}"),
                dtype="BF16",
                global_shape=(rows, width),
                offset=(0, rank * size),
                shape=(rows, size),
                arena_offset=index * rows * size * 2,
            )
            for index in range(tensors)
        ]
    )


def choice(*, ways: int, tensors: int, rows: int, width: int, allow: bool = False) -> SyncChoice:
    sources = [
        Source(id=str(rank), layout=columns(rank, 8, tensors=tensors, rows=rows, width=width))
        for rank in range(8)
    ]
    targets = [columns(rank, ways, tensors=tensors, rows=rows, width=width) for rank in range(ways)]
    plan = make_plan(sources, targets)
    return choose_way(plan, sources, targets, LINK, allow_overfetch=allow)


def test_large_sharded_tensors_are_pulled_by_slices() -> None:
    found = choice(ways=4, tensors=16, rows=4096, width=4096, allow=True)
    assert found.way == SyncWay.SLICES
    assert found.whole_tensors.bytes_received == 4 * found.slices.bytes_received
    assert "4.00 times the bytes" in found.reason


def test_many_small_tensors_come_whole_where_more_than_wanted_is_allowed() -> None:
    allowed = choice(ways=4, tensors=2000, rows=16, width=64, allow=True)
    assert allowed.way == SyncWay.WHOLE_TENSORS
    assert "requests' latency" in allowed.reason
    exact = choice(ways=4, tensors=2000, rows=16, width=64)
    assert exact.way == SyncWay.SLICES
    assert "allow_overfetch does not permit" in exact.reason


def test_whole_tensors_that_everybody_wants_need_no_permission() -> None:
    found = choice(ways=1, tensors=2000, rows=16, width=64)
    assert found.way == SyncWay.WHOLE_TENSORS
    assert found.whole_tensors.bytes_received == found.slices.bytes_received


def test_a_link_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="positive rate"):
        Link(bytes_per_s=0, request_s=0)
