"""Long prompts are generated on instances of their own, the longest ones first."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Generated,
    GroupAdded,
    InstanceJoined,
    ParametersPushed,
    PolicyChanged,
    Pull,
    Pulled,
    Rewarded,
    RolloutCommand,
    Route,
    SnapshotTaken,
    Train,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings, Routing
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.policies.length_dispatch import RANKED_MIN
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.lengths import HeldDivision
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
    group_of,
)
from plexrl.wire.operations import SamplingParams

SAMPLES = 2
MODEL = CostModel(k1=0.0, k2=1e-4, k3=1e-3, k4=1e-4, k5=1.0)
"""A step is as long as its batch is large, so that long samples are sooner apart."""


class Rig:
    """A coordinator, and instances that end what they are told to."""

    def __init__(self, prompts: int, instances: int, kv_budget: float = 1e6) -> None:
        self.core = RolloutCoordinator(
            CoordinatorSettings(
                staleness=StalenessSettings(staleness=0, batch_groups=prompts, group_size=SAMPLES),
                cost_model=MODEL,
                routing="length-aware",
                migration="none",
                gain_part_min=1e-6,
                length_step_tokens=1,
            )
        )
        self.held: dict[InstanceId, list[TrajectoryId]] = {}
        self.versions: dict[InstanceId, int] = {}
        self.orders: dict[InstanceId, list[TrajectoryId]] = {}
        """All that an instance was ever given in this batch, in the order of routing."""
        self.completed: dict[InstanceId, int] = {}
        """Since the latest pull."""
        self.prompts = prompts
        self.added = self.first = 0
        for number in range(instances):
            name = InstanceId(f"i{number:02d}")
            self.held[name], self.versions[name], self.orders[name] = [], 0, []
            self.completed[name] = 0
            self.tell(InstanceJoined(instance=name, version=0, kv_budget=kv_budget))

    def decide(self, event: object) -> list[RolloutCommand]:
        return self.core.handle(event)  # type: ignore[arg-type]

    def tell(self, event: object) -> list[RolloutCommand]:
        commands = self.decide(event)
        for each in commands:
            if isinstance(each, Route):
                self.held[each.instance] += each.trajectories
                self.orders[each.instance] += each.trajectories
            elif isinstance(each, Pull):
                self.versions[each.instance], self.completed[each.instance] = each.version, 0
                self.tell(Pulled(instance=each.instance, version=each.version))
        return commands

    def cycle(self) -> None:
        self.tell(
            SnapshotTaken(
                instances=tuple(
                    InstanceSnapshot(
                        instance=name,
                        version=self.versions[name],
                        kv_cache=10.0 * len(held),
                        running=tuple(held),
                        running_tokens=(10,) * len(held),
                        completed=self.completed[name],
                    )
                    for name, held in self.held.items()
                )
            )
        )

    def add(self, expected: list[int]) -> None:
        for tokens in expected:
            group = SampleGroupId(self.added)
            self.tell(GroupAdded(group=group, prompt_tokens=10, expected_tokens=tokens))
            self.added += 1

    def end(
        self, instance: InstanceId, trajectory: TrajectoryId, tokens: int
    ) -> list[RolloutCommand]:
        self.held[instance].remove(trajectory)
        self.completed[instance] += 1
        segment = TrajectorySegment(
            tokens=tokens,
            policy_version=self.versions[instance],
            kv_version=self.versions[instance],
        )
        self.tell(Generated(trajectory=trajectory, instance=instance, segments=(segment,)))
        return self.tell(Rewarded(trajectory=trajectory, reward=1.0))

    def train(self, expected: list[int], tokens: list[int]) -> None:
        """A batch in which the responses to prompt i have so many tokens; then the weights of the
        next one are there."""
        self.add(expected)
        self.tell(BatchRequested())
        first, trained = self.added - self.prompts, False
        for _ in range(20):
            self.cycle()
            for name, held in self.held.items():
                for each in list(held):
                    length = tokens[group_of(each, SAMPLES) - first]
                    trained |= any(isinstance(c, Train) for c in self.end(name, each, length))
        assert trained
        self.tell(ParametersPushed(version=self.core.newest_version + 1))
        self.orders = {name: [] for name in self.orders}


def first_batch(prompts: int, instances: int, kv_budget: float = 1e6) -> Rig:
    """Batches whose lengths were expected, until the misses of the ranks are known."""
    rig = Rig(prompts, instances, kv_budget)
    lengths = [100] * (prompts - prompts // 5) + [1000] * (prompts // 5)
    while len(rig.core.trajectories.lengths.ranked) < RANKED_MIN:
        rig.train(lengths, lengths)
    rig.first = rig.added
    return rig


def groups(rig: Rig, name: InstanceId) -> list[int]:
    return [group_of(each, SAMPLES) - rig.first for each in rig.orders[name]]


@given(st.integers(1, 3), st.integers(0, 1 << 30))
def test_the_longest_fifth_is_apart_and_each_side_begins_with_its_longest(
    fifth: int, seed: int
) -> None:
    prompts, instances = 5 * fifth, 4 * fifth
    rig = first_batch(prompts, instances)
    expected = [*range(100, 100 + prompts - fifth), *range(1000, 1000 + fifth)]
    Random(seed).shuffle(expected)
    rig.add(expected)
    rig.tell(BatchRequested())
    rig.cycle()
    rig.cycle()
    assert sum(map(len, rig.held.values())) == prompts * SAMPLES, "all fit at once"
    assert rig.core.trajectories.lengths.division.long
    kinds = []
    for name in rig.held:
        lengths = [expected[each] for each in groups(rig, name)]
        assert lengths == sorted(lengths, reverse=True)
        kinds.append({each >= 1000 for each in lengths})
    assert all(len(kind) <= 1 for kind in kinds)
    # Those for long prompts come first by id.
    assert [kind for kind in kinds if kind] == sorted(
        (k for k in kinds if k), key=lambda k: k != {True}
    )
    assert {True} in kinds
    assert {False} in kinds


def test_prompts_without_an_expected_length_are_distributed_as_without_ranks() -> None:
    rig = first_batch(10, 4)
    rig.add([0] * 10)
    rig.tell(BatchRequested())
    rig.cycle()
    rig.cycle()
    assert sorted(map(len, rig.held.values())) == [5, 5, 5, 5]


def test_an_instance_without_work_takes_that_of_the_other_side() -> None:
    """Each has room for two samples; four of ten are long."""
    rig = first_batch(5, 4, kv_budget=25)
    rig.add([1000, 40, 30, 20, 10])
    rig.core.trajectories.lengths.division = HeldDivision(prompts=rig.added, instances=4, long=1)
    rig.tell(BatchRequested())
    rig.cycle()
    rig.cycle()
    long, *regular = rig.held
    assert set(groups(rig, long)) == {0}
    assert all(0 not in groups(rig, each) for each in regular)
    assert rig.core.trajectories.waiting
    for each in list(rig.held[long]):
        rig.end(long, each, 100)
    rig.cycle()
    assert rig.held[long]


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_restored_coordinator_divides_as_before(when: str) -> None:
    rig = first_batch(10, 3)
    rig.add([7, 9, 1, 3, 5, 2, 8, 4, 6, 10])
    if when == "in":
        rig.tell(BatchRequested())
    core = RolloutCoordinator.restore(rig.core.settings, rig.core.state())
    assert core.state() == rig.core.state()
    assert core.trajectories.lengths == rig.core.trajectories.lengths
    assert core.trajectories.lengths.recent
    versions, completed = dict(rig.versions), dict(rig.completed)
    other, rig.core = rig.core, core
    rig.cycle()
    found = {name: list(held) for name, held in rig.held.items()}
    assert any(found.values())
    rig.core, rig.versions, rig.completed = other, versions, completed
    rig.held = {name: [] for name in rig.held}
    rig.cycle()
    assert rig.held == found


def test_nothing_is_kept_of_a_prompt_that_was_trained() -> None:
    rig = Rig(5, 2)
    for _ in range(3):
        rig.train([3, 4, 5, 6, 7], [10] * 5)
    assert rig.core.trajectories.lengths.expected == {}
    assert len(rig.core.trajectories.lengths.recent) == 30


@pytest.mark.parametrize("factor", [{"over_launch_prompts": 1.5}, {"over_launch_responses": 2.0}])
def test_an_order_does_not_combine_it_with_tail_batching(factor: dict[str, float]) -> None:
    order = RolloutOrder(
        job="job",
        name="rollout",
        source="actor",
        instances=("rollout-0",),
        staleness=0,
        prompts=2,
        sampling=SamplingParams(seed=3),
        length_aware=True,
    )
    assert order.settings().routing == "length-aware"
    assert replace(order, length_aware=False).settings().routing == "throughput"
    with pytest.raises(InvalidRequestError, match="over_launch and length_aware"):
        replace(order, **factor)  # type: ignore[arg-type]


CHANGES: tuple[tuple[Routing, ...], ...] = ((), ("throughput",), ("throughput", "length-aware"))


def test_a_change_of_the_policy_changes_the_routing() -> None:
    """The coordinator decides as one that has had the policy from the start."""
    orders = []
    for changes in CHANGES:
        rig = first_batch(10, 4)
        for routing in changes:
            bound = rig.core.settings.staleness
            rig.tell(PolicyChanged(bound=bound, routing=routing))
        rig.add([10] * 8 + [1000] * 2)
        rig.tell(BatchRequested())
        rig.cycle()
        rig.cycle()
        orders.append(rig.orders)
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]
