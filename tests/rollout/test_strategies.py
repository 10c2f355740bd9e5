"""The strategies decide as the paper's algorithms do, and their vanilla forms as it describes."""

from collections.abc import Iterable, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.coordinator.strategies.length_aware import make_router
from plexrl.rollout.coordinator.strategies.migration import to_migrate
from plexrl.rollout.coordinator.strategies.routing import Queue, RoutingCandidate, route
from plexrl.rollout.coordinator.strategies.synchronisation import to_synchronise
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20, CostModel
from plexrl.rollout.instances.snapshot import InstanceLoad
from plexrl.rollout.staleness.manager import StalenessManager, StalenessSettings
from plexrl.rollout.trajectories.lengths import Lengths
from plexrl.rollout.trajectories.record import InstanceId, SampleGroupId, Trajectory, TrajectoryId
from tests.examples import examples
from tests.rollout import plain_strategies as plain

SAMPLES = 2
MODEL = CostModel(k1=1e-3, k2=2e-2, k3=1e-2, k4=1e-1, k5=1.0)


def settings(**more: object) -> CoordinatorSettings:
    sizes = StalenessSettings(staleness=2, batch_groups=4, group_size=SAMPLES)
    chosen = {"staleness": sizes, "cost_model": MODEL, "length_step_tokens": 1} | more
    return CoordinatorSettings(**chosen)  # type: ignore[arg-type]


def load(index: int, version: int, kv: float, running: int, waiting: int = 0) -> InstanceLoad:
    return InstanceLoad(
        index=index,
        instance=InstanceId(str(index)),
        version=version,
        kv_budget=100.0,
        kv_cache=kv,
        running=running,
        waiting=waiting,
    )


def candidate(number: int, version: int | None, length: int = 10) -> RoutingCandidate:
    return RoutingCandidate(
        TrajectoryId(number), SampleGroupId(number // SAMPLES), version=version, length=length
    )


def manager_at(version: int, **sizes: int) -> StalenessManager:
    """A manager whose next buffer is this one."""
    found = StalenessManager(StalenessSettings(**{"staleness": 2, "batch_groups": 4} | sizes))
    for step in range(version):
        for index in range(found.settings.batch_groups):
            group = SampleGroupId(10_000 + step * 100 + index)
            for sample in range(found.settings.group_size):
                trajectory = TrajectoryId(group * found.settings.group_size + sample)
                found.reserve(group, trajectory, step)
                found.complete(group, trajectory)
        found.consume()
    return found


def ordered(
    candidates: list[RoutingCandidate], started: set[SampleGroupId]
) -> list[RoutingCandidate]:
    initial = [
        Trajectory(id=each.trajectory, group=each.group, prompt_tokens=each.length)
        for each in sorted(candidates, key=lambda each: each.trajectory)
        if each.version is None
    ]
    assigned = [each for each in candidates if each.version is not None]
    return list(Queue(assigned, initial, lambda group: group in started))


class World:
    """A random snapshot with random trajectories on the trajectory server."""

    def __init__(self, random: Random) -> None:
        self.newest = random.randint(0, 3)
        self.manager = manager_at(self.newest, group_size=SAMPLES)
        self.loads = []
        for index in range(random.randint(1, 6)):
            running = random.randint(0, 5)
            kv = float(sum(random.randint(1, 20) for _ in range(running)))
            lag = random.randint(0, 3)
            waiting = random.choice((0, 0, 1))
            self.loads.append(load(index, max(0, self.newest - lag), kv, running, waiting))
        self.candidates = []
        for group in range(random.randint(0, 9)):
            for sample in range(SAMPLES):
                number = group * SAMPLES + sample
                versions: tuple[int | None, ...] = (None, self.newest, max(0, self.newest - 1))
                version = random.choice(versions)
                if version is not None and not self.manager.buffers.admits(
                    SampleGroupId(group), version
                ):
                    version = None
                if version is not None:
                    self.manager.reserve(SampleGroupId(group), TrajectoryId(number), version)
                self.candidates.append(candidate(number, version, random.randint(1, 30)))
        started = {c.group for c in self.candidates if c.version is not None}
        self.queue = ordered(self.candidates, started)
        self.mu = random.choice((0.1, 0.3, 0.8))

    @property
    def plain_snapshot(self) -> plain.Snapshot:
        return {
            each.instance: plain.Instance(
                each.instance,
                each.version,
                each.kv_cache,
                each.kv_budget,
                each.running,
                each.waiting,
            )
            for each in self.loads
        }

    @property
    def plain_queue(self) -> list[plain.Waiting]:
        return [
            plain.Waiting(each.trajectory, each.group, each.version, each.length)
            for each in self.queue
        ]


PLAIN_MODEL = plain.Coefficients(MODEL.k1, MODEL.k2, MODEL.k3, MODEL.k4, MODEL.k5)


@hypothesis_settings(max_examples=examples(150))
@given(seed=st.integers(0, 1 << 40))
def test_routing_decides_as_algorithm_3(seed: int) -> None:
    world = World(Random(seed))
    expected = plain.routing(
        world.plain_snapshot, world.manager, world.plain_queue, PLAIN_MODEL, world.mu
    )
    buffers = world.manager.buffers.copy()
    router = make_router(settings(gain_part_min=world.mu), MODEL, world.loads, buffers)
    routed = route(router, buffers, world.queue)
    assert [(each.trajectory, to.instance) for each, to in routed] == expected


@hypothesis_settings(max_examples=examples(150))
@given(seed=st.integers(0, 1 << 40))
def test_synchronisation_decides_as_algorithm_4_with_its_first_step_by_routing(seed: int) -> None:
    world = World(Random(seed))
    expected, by_version_only = (
        plain.synchronisation(
            world.plain_snapshot,
            world.manager,
            world.plain_queue,
            PLAIN_MODEL,
            world.mu,
            world.newest,
            by_version_only=by_version_only,
        )
        for by_version_only in (False, True)
    )
    found = to_synchronise(
        settings(gain_part_min=world.mu),
        MODEL,
        world.loads,
        world.manager.buffers.copy(),
        world.queue,
        world.newest,
    )
    assert [each.instance for each in found] == expected
    assert set(by_version_only) <= set(expected)


def routed(
    loads: list[InstanceLoad],
    queue: Sequence[RoutingCandidate],
    found: StalenessManager | None = None,
    **more: object,
) -> list[tuple[int, int]]:
    """(trajectory, instance) of each one that is routed."""
    buffers = (found or manager_at(5)).buffers.copy()
    router = make_router(settings(**more), MODEL, loads, buffers)
    return [(c.trajectory, to.index) for c, to in route(router, buffers, queue)]


def test_the_queue_has_old_versions_first_and_initial_trajectories_last() -> None:
    """StaleFlow Fig. 12 (c)."""
    first, second, third = candidate(0, None), candidate(2, 2), candidate(4, 1, length=5)
    fourth, fifth = candidate(6, 1, length=9), candidate(8, None)
    queue = ordered([first, second, third, fourth, fifth], {SampleGroupId(4)})
    assert queue == [fourth, third, second, fifth, first]


def test_an_older_instance_has_precedence_while_its_gain_is_large_enough() -> None:
    """The ideal gain of 10 tokens is 1 / (0.01 + 0.02 + 0.1) = 7.69; that of the first instance
    is 3 / 0.16 - 2 / 0.14 = 4.46, or 0.58 of it."""
    busy, idle = load(0, 4, kv=20, running=2), load(1, 5, kv=0, running=0)
    assert routed([busy, idle], [candidate(0, 4)], gain_part_min=0.57) == [(0, 0)]
    busy, idle = load(0, 4, kv=20, running=2), load(1, 5, kv=0, running=0)
    assert routed([busy, idle], [candidate(0, 4)], gain_part_min=0.59) == [(0, 1)]


def test_a_trajectory_does_not_run_on_weights_older_than_its_version() -> None:
    loads = [load(0, 4, kv=0, running=0), load(1, 5, kv=100, running=9)]
    assert routed(loads, [candidate(0, 5), candidate(2, 4)], gain_part_min=0.3) == []


def test_nothing_waits_while_an_instance_has_room() -> None:
    """Gains of both are less than mu of an idle instance's; the second one's is the larger."""
    loads = [load(0, 4, kv=40, running=4), load(1, 5, kv=30, running=3)]
    assert routed(loads, [candidate(0, 4)], gain_part_min=0.9) == [(0, 1)]
    # Nine short trajectories yield 9 / 0.199 = 45.2 tokens/s, and with this one 10 / 0.284 = 35.2.
    assert routed([load(0, 5, kv=9, running=9)], [candidate(0, 5, length=85)]) == [(0, 0)]


FEW = st.floats(0, 1, allow_subnormal=False)


@given(FEW, FEW, FEW, FEW, st.integers(1, 99), st.integers(1, 99), FEW, FEW)
def test_a_step_of_two_batches_together_is_no_longer_than_one_after_the_other(
    k1: float, k2: float, k3: float, k4: float, one: int, other: int, kv: float, more: float
) -> None:
    """So to hold work back while an instance has room is never sooner."""
    model = CostModel(k1=k1, k2=k2, k3=k3, k4=k4 + 1e-6, k5=1.0)
    together = model.step_s(kv + more, one + other)
    assert together <= (model.step_s(kv, one) + model.step_s(more, other)) * (1 + 1e-9)


def test_nothing_overtakes_a_trajectory_that_no_instance_takes() -> None:
    loads = [load(0, 5, kv=95, running=5)]
    assert routed(loads, [candidate(0, 4, length=10), candidate(2, 5, length=1)]) == []


def test_an_instance_with_its_own_queue_gets_nothing() -> None:
    loads = [load(0, 5, kv=0, running=0, waiting=1), load(1, 5, kv=40, running=4)]
    assert routed(loads, [candidate(0, 5)]) == [(0, 1)]


def test_an_initial_trajectory_gets_a_newer_version_when_older_ones_are_used_up() -> None:
    """Batches of 1 group, η = 1, buffer 5 next: version 4 has one entry left, version 5 two."""
    found = manager_at(5, staleness=1, batch_groups=1)
    loads = [load(0, 4, kv=0, running=0), load(1, 5, kv=0, running=0)]
    queue = [candidate(0, None), candidate(2, None), candidate(4, None)]
    assert routed(loads, queue, found) == [(0, 0), (2, 1)]


def test_vanilla_routing_balances_counts() -> None:
    loads = [load(0, 4, kv=80, running=1), load(1, 5, kv=2, running=2, waiting=1)]
    queue = [candidate(2 * number, 4) for number in range(4)]
    assert routed(loads, queue, routing="count") == [(0, 0), (2, 0), (4, 0), (6, 1)]


def synchronised(
    loads: list[InstanceLoad], queue: Sequence[RoutingCandidate], newest: int, **more: object
) -> list[int]:
    buffers = manager_at(newest).buffers.copy()
    found = to_synchronise(settings(**more), MODEL, loads, buffers, queue, newest)
    return [each.index for each in found]


def test_only_instances_that_lag_without_work_and_would_get_some_pull() -> None:
    lagging = [load(0, 0, kv=0, running=0), load(1, 0, kv=0, running=0, waiting=1)]
    assert synchronised([*lagging, load(2, 3, kv=90, running=9)], [candidate(0, None)], 3) == [0]


def test_an_instance_that_can_take_work_does_not_pull() -> None:
    # Version 1 may be trained in buffer 3, which is empty.
    assert synchronised([load(0, 1, kv=0, running=0)], [candidate(0, None)], 3) == []
    assert synchronised([load(0, 0, kv=0, running=0)], [candidate(0, None)], 3) == [0]


def test_an_instance_does_not_pull_for_nothing() -> None:
    assert synchronised([load(0, 0, kv=0, running=0)], [], 3) == []


def test_an_idle_instance_pulls_for_a_trajectory_that_is_too_new_for_it() -> None:
    """It could run the one behind, which must not overtake."""
    busy = load(1, 2, kv=95, running=9)
    queue = [candidate(0, 2), candidate(2, None)]
    assert synchronised([load(0, 1, kv=0, running=0), busy], queue, 3) == [0]


def test_a_trajectory_whose_instance_was_lost_makes_others_pull() -> None:
    # Version 1 could take the initial trajectory, but version 2 comes first and fits nowhere.
    queue = [candidate(0, 2), candidate(2, None)]
    assert synchronised([load(0, 1, kv=0, running=0)], queue, 3) == [0]


def test_vanilla_synchronisation_pulls_at_once() -> None:
    loads = [load(0, 2, kv=90, running=9), load(1, 3, kv=0, running=0)]
    assert synchronised(loads, [], 3, synchronisation="greedy") == [0]


def migrated(
    loads: list[InstanceLoad],
    running: dict[int, list[RoutingCandidate]],
    waiting: dict[int, list[RoutingCandidate]] | None = None,
    queue: Sequence[RoutingCandidate] = (),
    left: int = 10,
    model: CostModel = MODEL,
    **more: object,
) -> list[tuple[int, list[int]]]:
    """`left`: tokens that each trajectory is expected to draw still."""
    buffers = manager_at(5).buffers

    def work(each: InstanceLoad) -> tuple[list[RoutingCandidate], list[RoutingCandidate]]:
        return running.get(each.index, []), (waiting or {}).get(each.index, [])

    def tokens_left(held: Iterable[RoutingCandidate]) -> float:
        return float(left * len(list(held)))

    found = to_migrate(settings(**more), model, loads, buffers, queue, work, tokens_left)
    return [(each.index, [c.trajectory for c in moved]) for each, moved in found]


def test_what_waits_beyond_the_limit_is_returned() -> None:
    queue = [candidate(number, 5) for number in range(5)]
    full = load(0, 5, kv=90, running=9, waiting=5)
    assert migrated([full], {}, {0: queue}) == [(0, [3, 4])]
    assert migrated([full], {}, {0: queue}, migration="none") == []


def test_the_work_of_the_fastest_instance_is_redistributed_if_that_helps() -> None:
    """9 trajectories of 10 tokens yield 9 / 0.28 = 32 tokens/s on one instance, and 41 on two.
    Those that would come back stay."""
    busy, idle = load(0, 5, kv=90, running=9), load(1, 5, kv=0, running=0)
    held = [candidate(number, 5) for number in range(9)]
    assert migrated([busy, idle], {0: held}) == [(0, [1, 3, 5, 7])]
    assert migrated([busy, idle], {0: held}, migration_gain_min=0.5) == []


def test_responses_are_expected_to_end_as_longer_ones_of_the_past_did() -> None:
    lengths = Lengths(recent=[10, 40, 20])
    assert lengths.tokens_left([15]) == 30 - 15
    assert lengths.tokens_left([0, 25]) == 70 / 3 + 40 - 25
    assert lengths.tokens_left([40]) == 40, "none was longer"


def test_work_is_not_returned_that_ends_before_its_kv_cache_is_computed_again() -> None:
    """The idle instance loses 0.4 s of 20 tokens/s. The 7 tokens/s that both gain, beyond the least
    gain, take 1.1 s to make up for that, and 2 tokens of each trajectory last 0.6 s."""
    busy, idle = load(0, 5, kv=90, running=9), load(1, 5, kv=0, running=0)
    held = [candidate(number, 5) for number in range(9)]
    assert migrated([busy, idle], {0: held}, left=2) == []
    assert migrated([busy, idle], {0: held}, left=20) == [(0, [1, 3, 5, 7])]


@given(
    running=st.integers(1, 40),
    length=st.integers(1, 4_000),
    left=st.integers(0, 4_000),
    instances=st.integers(2, 4),
)
@hypothesis_settings(max_examples=examples(200), deadline=None)
def test_redistributed_work_is_drawn_no_later_by_the_cost_model(
    running: int, length: int, left: int, instances: int
) -> None:
    """Until it would have ended where it was, at least as many tokens are drawn."""
    model = QWEN3_30B_A3B_ON_H20
    busy = load(0, 5, kv=running * length, running=running)
    idle = [load(each, 5, kv=0, running=0) for each in range(1, instances)]
    for each in (busy, *idle):
        each.kv_budget = 1e9
    held = [candidate(number, 5, length) for number in range(running)]
    for _, moved in migrated([busy, *idle], {0: held}, left=left, model=model):
        ends_s = left * model.step_s(running * length, running)
        kept = running - len(moved)
        drawn = ends_s * model.throughput(kept * length, kept)
        for at in range(len(idle)):
            share = len(moved[at :: len(idle)])
            computed_s = model.k3 * length * share
            drawn += (ends_s - computed_s) * model.throughput(share * length, share)
        assert drawn >= running * left


def test_work_is_not_returned_for_an_instance_that_gets_other_work_now() -> None:
    busy, idle = load(0, 5, kv=90, running=9), load(1, 5, kv=0, running=0)
    held = [candidate(number, 5) for number in range(9)]
    queue = [candidate(20 + number, 5) for number in range(5)]
    assert migrated([busy, idle], {0: held}, queue=queue) == []


def test_the_last_trajectory_does_not_wander() -> None:
    """The ratio to an idle instance is infinite, but moving one trajectory gains nothing."""
    busy, idle = load(0, 5, kv=10, running=1), load(1, 5, kv=0, running=0)
    assert migrated([busy, idle], {0: [candidate(0, 5)]}) == []


def test_work_is_not_returned_for_an_instance_that_is_too_old_for_it() -> None:
    busy, idle = load(0, 5, kv=90, running=9), load(1, 4, kv=0, running=0)
    held = [candidate(number, 5) for number in range(9)]
    assert migrated([busy, idle], {0: held}) == []


def test_the_cost_model_gives_the_published_throughput() -> None:
    """StaleFlow Table 4: 100 trajectories of 10 000 tokens each, by hand."""
    step = 7.28e-8 * 1e6 + 1.25e-4 * 100 + 1.07e-2
    assert QWEN3_30B_A3B_ON_H20.step_s(1e6, 100) == pytest.approx(step)
    assert QWEN3_30B_A3B_ON_H20.throughput(1e6, 100) == pytest.approx(100 / step)
    assert QWEN3_30B_A3B_ON_H20.ideal_gain(1000) == pytest.approx(1 / (7.28e-5 + 1.242e-2))
