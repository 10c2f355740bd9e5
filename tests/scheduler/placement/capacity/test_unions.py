"""The unions of groups against a list that is made anew for each question."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, GroupId
from plexrl.scheduler.placement.capacity.index import CapacityIndex, CapacityShape
from plexrl.scheduler.placement.capacity.unions import Unions
from plexrl.scheduler.state.demand.trace import whole_ring
from tests.examples import examples

SIZES = (1, 1, 1, 2, 2, 2, 3)
"""GPUs of the groups."""
HORIZON = 48
GROUPS = st.lists(st.integers(0, len(SIZES) - 1), max_size=3, unique=True)


def index_of_groups(loads: list[int]) -> CapacityIndex:
    index = CapacityIndex(HORIZON)
    for number, gpus in enumerate(SIZES):
        name = GroupId(f"g{number}")
        index.add_group(name, CapacityShape("t", 1 << 30, gpus), serial=number)
        index.reserve(name, DeploymentId("there"), whole_ring(HORIZON), loads[number] / 4)
        index.update_capacity(
            name, is_open=True, host_bytes_free=1, state_bytes_free=(number + 1) * gpus
        )
    return index


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), GROUPS), max_size=20),
    st.lists(st.integers(0, 3), min_size=len(SIZES), max_size=len(SIZES)),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sets(st.integers(0, len(SIZES) - 1)),
)
def test_the_least_loaded_unions_that_can_take_a_deployment_are_found(
    changes: list[tuple[int, list[int]]],
    loads: list[int],
    gpus: int,
    count: int,
    closed: set[int],
) -> None:
    index, unions, present = index_of_groups(loads), Unions(), dict[int, tuple[int, ...]]()
    for member, groups in changes:
        name = DeploymentId(f"d{member}")
        unions.enter(name, [index.slots(GroupId(f"g{number}")) for number in groups])
        present[member] = tuple(groups)

    def can_take(shape: CapacityShape) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
        table = index.table(shape)
        return np.array([name is not None and int(name[1:]) not in closed for name in table.groups])

    spanned = {groups for groups in present.values() if len(groups) > 1}
    of_size = {groups for groups in spanned if sum(SIZES[number] for number in groups) == gpus}
    expected = sorted(
        (max(loads[number] for number in groups), groups[0], groups)
        for groups in of_size
        if not closed & set(groups)
    )
    found = unions.least_loaded(gpus, can_take, count)
    assert found == [tuple(f"g{number}" for number in each) for *_, each in expected[:count]]
    capacity = sorted(
        (load, free)
        for loads_of_part, free_bytes in unions.capacity(gpus)
        for load, free in zip(loads_of_part.tolist(), free_bytes.tolist(), strict=True)
    )
    assert capacity == sorted(
        (max(loads[number] for number in groups) / 4, min(groups) + 1)
        for groups in spanned
        if sum(SIZES[number] for number in groups) >= gpus
    )
