"""A coordinator restored from its state at any moment goes on as the one that it was saved from."""

import pickle
from random import Random

import msgspec
import pytest

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import StepMeasured, StepsMeasured
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.lengths import RECENT_MAX, RankedLength
from plexrl.rollout.trajectories.record import TrajectoryId
from tests.rollout.fleet import Fleet
from tests.rollout.history import History

MODEL = CostModel(k1=1e-3, k2=2e-2, k3=1e-2, k4=1e-1, k5=1.0)


def written(core: RolloutCoordinator) -> bytes:
    return msgspec.json.encode(core.state())


def read(written: bytes) -> dict[str, object]:
    return msgspec.json.decode(written, type=dict[str, object])


def restored(core: RolloutCoordinator) -> RolloutCoordinator:
    return RolloutCoordinator.restore(core.settings, read(written(core)))


@pytest.mark.parametrize("seed", range(60))
def test_a_restored_coordinator_gives_the_same_commands_and_states(seed: int) -> None:
    history = History(Random(seed))
    for _ in range(60):
        history.act()
    history.finish()
    log = history.fleet.log
    random = Random(seed)
    points = {random.randrange(len(log)) for _ in range(5)}
    core = RolloutCoordinator(history.fleet.settings)
    others: list[RolloutCoordinator] = []
    for number, (event, commands) in enumerate(log):
        if number in points:
            others.append(restored(core))
        assert core.handle(event) == commands
        for other in others:
            assert other.handle(event) == commands
    for other in others:
        assert read(written(other)) == read(written(core))
        other.check_invariants()


def fleet(**more: int) -> Fleet:
    sizes = StalenessSettings(staleness=1, batch_groups=2, group_size=2, **more)
    found = Fleet(CoordinatorSettings(staleness=sizes, cost_model=MODEL, measured_steps_max=16))
    found.join(budget=60)
    found.join(budget=60)
    return found


@pytest.mark.parametrize("rounds", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_nothing_grows_with_what_was_trained_and_dropped(rounds: int) -> None:
    """With steps measured in each round, and instances that come and go."""
    led = fleet(extra_groups=1, extra_samples=1)
    random = Random(1)
    # The tables of lengths are bounded; they are full from the start.
    led.core.trajectories.lengths.recent = [1] * RECENT_MAX
    led.core.trajectories.lengths.ranked = [RankedLength(1, 1) for _ in range(RECENT_MAX)]
    sizes: list[int] = []
    held: list[int] = []
    for number in range(rounds):
        first = led.groups_added * 3
        led.add_groups()
        for each in range(first, led.groups_added * 3):
            led.lengths[TrajectoryId(each)] = random.randint(1, 6)
        led.round()
        step = StepMeasured(kv_cache=random.uniform(1, 60), running=3, seconds=0.1)
        led.core.handle(StepsMeasured(steps=(step,)))
        if number % 20 == 0:
            led.kill(random.choice(list(led.engines)))
            led.join(budget=60)
            # All that the coordinator refers to, in its state or not.
            sizes.append(len(written(led.core)))
            held.append(len(pickle.dumps(led.core)))
            led.log.clear()
            led.late.clear()
    for found in (sizes, held):
        half = len(found) // 2
        assert max(found[half:]) <= 1.15 * max(found[:half])
    assert len(led.trained) > rounds // 10


def test_a_state_of_other_staleness_settings_is_refused() -> None:
    state = fleet().core.state()
    settings = fleet(extra_samples=1).core.settings
    with pytest.raises(InvalidRequestError, match="keep the staleness settings"):
        RolloutCoordinator.restore(settings, state)


def test_what_is_no_state_is_refused() -> None:
    core = fleet().core
    with pytest.raises(InvalidRequestError, match="replay its events"):
        RolloutCoordinator.restore(core.settings, core.state() | {"instances": None})
