"""The first in line for whom there is room, found without a look at the others."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId
from plexrl.scheduler.admission.fit.bound import NOTHING, FitBound
from plexrl.scheduler.admission.queues.queue_heads import BLOCK, Head, QueueHeadIndex

NOBODY = FitBound(free_state_bytes=NOTHING)

duties = st.sampled_from((0.0, 0.1, 0.2, 0.3, 0.5))
states = st.integers(0, 5)
rooms = st.builds(
    lambda free, steps: FitBound(
        free_state_bytes=free,
        loads=[load for load, _ in steps],
        states=[state for _, state in steps],
        load_max=0.9,
    ),
    st.sampled_from((NOTHING, NOTHING, 0, 2)),
    st.lists(
        st.tuples(st.sampled_from((0.4, 0.6, 0.7, 0.8)), states), unique_by=lambda step: step[0]
    ).map(lambda steps: sorted(zip(*map(sorted, zip(*steps, strict=True)), strict=True))),
)


def head(number: int, duty: float = 0.1, state_bytes: int = 1) -> Head:
    return Head(float(number), DeploymentId(f"j{number}"), duty, state_bytes)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(duties, states), min_size=1, max_size=5 * BLOCK),
    st.randoms(use_true_random=False),
    st.lists(rooms, min_size=1, max_size=4),
)
def test_the_first_with_room_is_the_first_that_a_walk_from_the_front_finds(
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
    for room in wanted:
        for after in (None, *heads[:: max(1, len(heads) // 7)]):
            behind = [each for each in left if after is None or each > after]
            with_room = [each for each in behind if room.holds(each.duty, each.state_bytes)]
            assert found.first(room, after) == (with_room[0] if with_room else None)


def test_a_room_of_steps_holds_what_one_of_its_groups_holds() -> None:
    room = FitBound(free_state_bytes=NOTHING, loads=[0.4, 0.7], states=[1, 5], load_max=0.9)
    assert room.holds(0.5, 1)
    assert not room.holds(0.5, 2)
    assert room.holds(0.2, 5)
    assert not room.holds(0.2, 6)
    assert not room.holds(0.6, 0)
    assert FitBound(free_state_bytes=3).holds(1.0, 3)
    assert not FitBound(free_state_bytes=3).holds(1.0, 4)


def test_nobody_is_in_an_empty_file_and_nobody_has_room_in_nothing() -> None:
    found = QueueHeadIndex()
    assert not found
    assert found.first(FitBound(free_state_bytes=9)) is None
    found.add(head(1))
    assert found
    assert NOBODY.is_nothing
    assert found.first(NOBODY) is None
    found.remove(head(1))
    assert not found
