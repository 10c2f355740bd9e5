"""What a rollout service that is killed at any moment finds in its store."""

from pathlib import Path
from random import Random

import numpy as np
import pytest

from plexrl.errors import InvalidRequestError, StorageError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import GroupAdded
from plexrl.rollout.service.instances import Instances
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.store import Part, RolloutStore
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryId
from plexrl.wire.operations import SamplingParams
from tests.rollout.history import History

ORDER = RolloutOrder(
    job="job",
    name="rollout",
    source="actor",
    instances=("rollout-0", "rollout-1"),
    staleness=1,
    prompts=2,
    samples=2,
    sampling=SamplingParams(seed=3, stop_token_ids=(5,)),
)


@pytest.mark.parametrize("seed", range(8))
def test_a_replay_finds_what_instances_hold_and_have_not_answered(
    seed: int, tmp_path: Path
) -> None:
    history = History(Random(seed))
    for _ in range(60):
        history.act()
    history.finish()
    settings = history.fleet.core.settings
    log = history.fleet.log
    crashes = set(Random(seed).sample(range(len(log)), 4))
    store = RolloutStore(tmp_path / "rollout.sqlite")
    core, instances = RolloutCoordinator(settings), Instances()
    for at, (event, commands) in enumerate(log):
        assert core.handle(event) == commands
        store.append(event)
        instances.note(event, commands)
        for name, work in instances.work.items():
            assert set(work.held) == {each.id for each in core.trajectories.on_instance(name)}
            assert set(work.begun()) <= set(work.held)
        if at in crashes:
            store.close()
            store = RolloutStore(tmp_path / "rollout.sqlite")
            core, found = RolloutCoordinator(settings), Instances()
            for _, each in store.events():
                found.note(each, core.handle(each))
            assert found.work == instances.work
            instances = found
    store.close()


def test_parts_of_a_trajectory_are_joined_in_the_order_of_events(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "a" / "rollout.sqlite")
    store.begin(ORDER)
    group, trajectory = SampleGroupId(0), TrajectoryId(1)
    prompt = np.array([3, 4], dtype=np.int32)
    event = GroupAdded(group=group, prompt_tokens=2)
    store.append(event, prompt=(group, prompt), step=(0, 11))
    for tokens, finish in (([5, 6], "abort"), ([7], "stop")):
        logprobs = -np.array(tokens, dtype=np.float32)
        store.append(
            event, parts=[Part(trajectory, np.array(tokens, dtype=np.int32), logprobs, finish)]
        )
    store.close()
    store = RolloutStore(tmp_path / "a" / "rollout.sqlite")
    assert store.order() == ORDER
    assert store.steps() == {0: 11}
    assert store.prompt(group).tolist() == [3, 4]
    found = store.response(trajectory)
    assert (found.tokens.tolist(), found.logprobs.tolist()) == ([5, 6, 7], [-5.0, -6.0, -7.0])
    assert found.finish == "stop"
    store.forget(group, [trajectory])
    assert len(store.response(trajectory).tokens) == 0
    store.delete()
    assert not list((tmp_path / "a").iterdir())


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout.sqlite"
    path.write_bytes(b"no database, but longer than the header of one" * 100)
    with pytest.raises(StorageError, match=r"rollout\.sqlite cannot be used"):
        RolloutStore(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": SamplingParams()}, "seed is missing"),
        ({"sampling": SamplingParams(seed=1, stop_sequences=((3, 4),))}, "stop_sequences"),
        ({"instances": ()}, "instances"),
        ({"instances": ("a", "a")}, "instances"),
        ({"source": "../other"}, "deployment name"),
        ({"prompts": 0}, "batch_groups"),
        ({"staleness": -1}, "staleness"),
    ],
)
def test_a_wrong_order_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(ORDER, name) for name in ORDER.__dataclass_fields__}
    with pytest.raises(InvalidRequestError, match=message):
        RolloutOrder(**{**fields, **changes})
