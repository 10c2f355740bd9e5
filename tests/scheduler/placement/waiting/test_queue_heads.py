"""The index of queue heads finds the first head that may fit."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.waiting.bound import NO_FIT, FitBound
from plexrl.scheduler.placement.waiting.queue_heads import BLOCK, Head, QueueHeadIndex

EMPTY = FitBound(free_state_bytes=NO_FIT)

duties = st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.5))
states = st.integers(0, 5)
bounds = st.builds(
    lambda free, steps: FitBound(
        free_state_bytes=free,
        loads=[load for load, _ in steps],
        states=[state for _, state in steps],
        load_max=0.9,
    ),
    st.sampled_from((NO_FIT, NO_FIT, 0, 2)),
    st.lists(
        st.tuples(st.sampled_from((0.4, 0.6, 0.7, 0.8)), states), unique_by=lambda step: step[0]
    ).map(lambda steps: sorted(zip(*map(sorted, zip(*steps, strict=True)), strict=True))),
)


def head(number: int, duty: float = 0.1, state_bytes: int = 1) -> Head:
    return Head(float(number), number, DeploymentId(f"j{number}"), duty, state_bytes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(duties, states), min_size=1, max_size=5 * BLOCK),
    st.randoms(use_true_random=False),
    st.lists(bounds, min_size=1, max_size=4),
)
def test_the_first_fitting_head_is_the_one_a_linear_scan_finds(
    needs: list[tuple[float, int]], random: Random, wanted: list[FitBound]
) -> None:
    heads = [head(number, *need) for number, need in enumerate(needs)]
    order, gone = heads[:], heads[::3]
    random.shuffle(order)
    random.shuffle(gone)
    found = QueueHeadIndex()
    for each in order:
        found.add(each)
    for each in gone:
        found.remove(each)
    found.check()
    left = sorted(set(heads) - set(gone))
    assert list(found) == left
    for bound in wanted:
        for after in (None, *heads[:: max(1, len(heads) // 7)]):
            behind = [each for each in left if after is None or each > after]
            fitting = [each for each in behind if bound.may_fit(each.duty, each.state_bytes)]
            assert found.first(bound, after) == (fitting[0] if fitting else None)


def test_a_bound_of_several_groups_admits_what_one_of_the_groups_fits() -> None:
    bound = FitBound(free_state_bytes=NO_FIT, loads=[0.4, 0.7], states=[1, 5], load_max=0.9)
    assert bound.may_fit(0.5, 1)
    assert not bound.may_fit(0.5, 2)
    assert bound.may_fit(0.2, 5)
    assert not bound.may_fit(0.2, 6)
    assert not bound.may_fit(0.6, 0)
    assert FitBound(free_state_bytes=3).may_fit(1.0, 3)
    assert not FitBound(free_state_bytes=3).may_fit(1.0, 4)


def test_an_empty_index_has_no_head_and_an_empty_bound_fits_none() -> None:
    found = QueueHeadIndex()
    assert not found
    assert found.first(FitBound(free_state_bytes=9)) is None
    found.add(head(1))
    assert found
    assert EMPTY.is_empty
    assert found.first(EMPTY) is None
    found.remove(head(1))
    assert not found
