"""A rollout with dynamic sampling drops prompts whose rewards are all equal, and trains others."""

import msgspec
import pytest

from plexrl.rollout.service.order import RolloutOrder
from plexrl.wire.operations import SamplingParams
from tests.rollout.fleet import Fleet

ORDER = {
    "job": "job",
    "name": "rollout",
    "source": "actor",
    "instances": ("rollout-0",),
    "prompts": 4,
    "samples": 2,
    "staleness": 0,
    "sampling": SamplingParams(seed=3, max_tokens=9),
}
COUNT = 30
EQUAL = {number for number in range(COUNT) if number % 5 == 0}


@pytest.mark.parametrize("over_launch", [1.0, 1.5], ids=["plain", "tail batching"])
@pytest.mark.parametrize("drops", [True, False])
def test_only_with_dynamic_sampling_prompts_with_equal_rewards_are_dropped(
    over_launch: float, drops: bool
) -> None:
    order = msgspec.convert(
        {**ORDER, "dynamic_sampling": drops, "over_launch_prompts": over_launch}, RolloutOrder
    )
    fleet = Fleet(order.settings())
    fleet.equal_rewards, fleet.prompts = EQUAL, COUNT
    fleet.join(budget=200)
    kept = COUNT - drops * len(EQUAL)
    for _ in range(400):
        fleet.round()
        if len(fleet.trained) == kept // order.prompts:
            break
    trained = [
        key for batch in fleet.trained for key in dict.fromkeys(each.group for each in batch.batch)
    ]
    assert len(trained) == len(set(trained)) == kept // order.prompts * order.prompts
    assert set(fleet.dropped) <= EQUAL
    if drops:
        assert fleet.dropped
        assert not EQUAL & set(trained)
    else:
        assert EQUAL & set(trained)
