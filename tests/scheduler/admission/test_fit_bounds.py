"""The bound of the groups of one size never says no to a deployment that one of them takes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.scheduler.admission.fit.fit_bounds import GroupBound, free_gpus_needed
from plexrl.scheduler.placement.waiting.units import Size
from tests.examples import examples

LOAD_MAX = 0.9
loads = st.floats(0.0, 1.0) | st.sampled_from((0.3, 0.6, 0.9))


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(st.tuples(loads, st.integers(-1, 5)), min_size=1, max_size=8),
    st.lists(st.tuples(loads, st.integers(0, 6)), min_size=1, max_size=8),
)
def test_a_bound_says_yes_if_a_group_has_the_load_and_the_bytes(
    groups: list[tuple[float, int]], wanted: list[tuple[float, int]]
) -> None:
    groups.sort()
    bound = GroupBound(
        loads=np.array([load for load, _ in groups]),
        states=np.maximum.accumulate(np.array([state for _, state in groups])),
        load_max=LOAD_MAX,
    )
    duties = np.array([duty for duty, _ in wanted])
    found = bound.may_join(duties, np.array([state for _, state in wanted]))
    for (duty, state_bytes), may in zip(wanted, found.tolist(), strict=True):
        fits = any(load + duty <= LOAD_MAX and state_bytes <= free for load, free in groups)
        nearly = any(
            load + duty <= LOAD_MAX + 1e-9 and state_bytes <= free for load, free in groups
        )
        assert may or not fits
        assert nearly or not may


def test_a_member_of_a_gang_needs_free_gpus_beside_the_smaller_ones_only_if_it_may_share() -> None:
    sizes = [Size("", 1, True), Size("", 2, True), Size("", 3, False), Size("", 8, True)]
    assert free_gpus_needed(sizes[3], sizes, divides=True) == 8 - (1 + 2)
    assert free_gpus_needed(sizes[3], sizes, divides=False) == 8
    assert free_gpus_needed(sizes[2], sizes, divides=True) == 3
    assert free_gpus_needed(sizes[1], [*sizes, sizes[0], sizes[0]], divides=True) == 1
