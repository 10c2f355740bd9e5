"""A rollout says which sample has waited longest for its reward."""

from hypothesis import given
from hypothesis import strategies as st

from plexrl.rollout.trajectories.record import TrajectoryId
from plexrl.rollout.trajectories.reward_waits import KEPT_MIN, RewardWaits

STEPS = st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.floats(0.1, 10.0)), max_size=400)


@given(STEPS)
def test_the_oldest_is_the_one_that_was_generated_first(
    steps: list[tuple[int, bool, float]],
) -> None:
    now = 0.0
    waits = RewardWaits(now)
    unrewarded: dict[TrajectoryId, int] = {}
    ended_at: dict[TrajectoryId, float] = {}
    for number, (name, is_generated, seconds) in enumerate(steps):
        now += seconds
        each = TrajectoryId(name)
        unrewarded.pop(each, None)
        ended_at.pop(each, None)
        if is_generated:
            unrewarded[each] = number
            ended_at[each] = now
            waits.generated(each, unrewarded, now)
        found = waits.oldest(unrewarded, now + 1)
        if not ended_at:
            assert found is None
        else:
            first = min(ended_at, key=lambda name: ended_at[name])
            assert found == (first, now + 1 - ended_at[first])
        assert len(waits._ended_at) <= 2 * len(unrewarded) + KEPT_MIN + 1


def test_a_sample_of_a_former_process_waits_since_the_start_of_this_one() -> None:
    waits = RewardWaits(5.0)
    unrewarded = {TrajectoryId(1): 1, TrajectoryId(2): 2}
    waits.generated(TrajectoryId(2), unrewarded, 6.0)
    assert waits.oldest(unrewarded, 8.0) == (TrajectoryId(1), 3.0)
