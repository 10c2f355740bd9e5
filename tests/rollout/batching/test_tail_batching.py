"""Tail batching over random histories of a fleet: instances die, messages cross, generations fail,
prompts are filtered, and the coordinator is restored from its state."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from plexrl.errors import InvalidRequestError, InvariantError
from plexrl.rollout.coordinator.messages import PolicyChanged, Train
from plexrl.rollout.policies.tail_batching.rounds import RoundKind, Rounds
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import SampleGroupId, TrajectoryChange, TrajectoryId
from plexrl.rollout.trajectories.server import TrajectoryServer
from tests.rollout.batching.oracle import Oracle
from tests.rollout.fleet import Fleet
from tests.rollout.history import BUDGET, LENGTH_MAX, LIKELY, History, settings_from

ACTIONS = [each for each in LIKELY if each not in ("change_policy", "end_prompts")]


class TailHistory(History):
    """A history with tail batching; the data set has so many batches of prompts, or no end."""

    def __init__(self, random: Random, batches: int | None = None) -> None:
        self.batches = batches
        super().__init__(random)

    def make_fleet(self) -> Fleet:
        found = settings_from(self.random)
        sizes = replace(
            found.staleness,
            staleness=0,
            batch_groups=self.random.randint(1, 4),
            extra_groups=self.random.choice((0, 1, 1, 2, 5)),
            extra_samples=self.random.choice((0, 1, 2)),
        )
        if not sizes.is_speculative:
            sizes = replace(sizes, extra_groups=1)
        is_dynamic = sizes.group_size > 1 and self.random.random() < 0.2
        fleet = Fleet(replace(found, staleness=sizes, dynamic_sampling=is_dynamic))
        fleet.equal_rewards = {each for each in range(60) if self.random.random() < 0.2}
        if self.batches is not None:
            fleet.prompts = self.batches * sizes.batch_groups
        return fleet

    def finish_all(self) -> None:
        """Trains until no batch is left."""
        fleet = self.fleet
        while len(fleet.engines) < 2:
            fleet.join(BUDGET)
        for _ in range(600):
            self.add_groups()
            fleet.round(tokens=LENGTH_MAX)
            self.look()
            is_all = fleet.groups_added == fleet.prompts
            if is_all and len(self.left()) < fleet.settings.staleness.batch_groups:
                return
        raise InvariantError(f"{self.left()} wait for ever", law="progress")

    def left(self) -> set[int]:
        held = self.fleet.core.rounds.held
        return {*self.fleet.core.trajectories.groups, *held.queue, *held.fresh}


def followed(fleet: Fleet) -> Oracle:
    sizes = fleet.settings.staleness
    oracle = Oracle(sizes.batch_groups, sizes.group_size, sizes.ids_per_group)
    for event, commands in fleet.log:
        oracle.follow(event, commands)
    return oracle


def played(seed: int, actions: int) -> TailHistory:
    history = TailHistory(Random(seed))
    for _ in range(actions):
        history.run(history.random.choice(ACTIONS))
    history.finish()
    return history


def test_every_batch_is_that_of_a_short_or_a_long_round() -> None:
    rounds = Counter[str]()
    for seed in range(250):
        history = played(seed, 50)
        oracle = followed(history.fleet)
        rounds.update(oracle.rounds)
        core = history.fleet.core
        waiting = list(core.rounds.queue)
        # The first ones may have started, and no instance has got them yet.
        started = oracle.queue[: len(oracle.queue) - len(waiting)]
        assert oracle.queue == started + waiting
        assert set(started) <= set(core.trajectories.groups)
        sizes = history.fleet.settings.staleness
        assert len(oracle.queue) < sizes.batch_groups + sizes.groups_max
        assert len(set(oracle.trained)) == len(oracle.trained)
    assert rounds["short"] > 300
    assert rounds["long"] > 50


@pytest.mark.slow
def test_many_histories() -> None:
    for seed in range(1000, 11_000):
        followed(played(seed, 60).fleet)


@pytest.mark.parametrize("seed", range(100))
def test_a_data_set_is_trained_once(seed: int) -> None:
    """Whatever is aborted; only what was dropped and reported is missing, and then the prompts that
    are too few for a batch."""
    random = Random(seed)
    history = TailHistory(random, batches=random.randint(1, 7))
    for _ in range(random.randrange(150)):
        history.run(random.choice(ACTIONS))
    history.finish_all()
    fleet, sizes = history.fleet, history.fleet.settings.staleness
    assert fleet.prompts is not None
    trained = Counter(each.group for train in fleet.trained for each in train.batch)
    assert set(trained.values()) <= {sizes.group_size}
    batch = sizes.batch_groups * sizes.group_size
    assert all(len(train.batch) == batch for train in fleet.trained)
    left = history.left()
    assert len(left) == (fleet.prompts - len(fleet.dropped)) % sizes.batch_groups
    assert {*trained, *fleet.dropped, *left} == set(range(fleet.prompts))


def fleet_of(**sizes: int) -> Fleet:
    bound = StalenessSettings(staleness=0, batch_groups=2, group_size=2, **sizes)
    fleet = Fleet(replace(settings_from(Random(1)), staleness=bound, routing="count"))
    fleet.join(200)
    return fleet


def set_lengths(fleet: Fleet, lengths: dict[int, int]) -> None:
    """Tokens of all samples of a prompt; 1 if not given."""
    ids = fleet.settings.staleness.ids_per_group
    for each in range(40 * ids):
        fleet.lengths[TrajectoryId(each)] = lengths.get(each // ids, 1)


def trained_groups(fleet: Fleet) -> list[list[int]]:
    return [sorted({each.group for each in train.batch}) for train in fleet.trained]


def test_long_prompts_wait_until_there_are_enough_for_a_round_of_their_own() -> None:
    fleet = fleet_of(extra_groups=1, extra_samples=1)
    set_lengths(fleet, {1: 9, 3: 9})
    while len(fleet.trained) < 4:
        fleet.round()
    assert trained_groups(fleet) == [[0, 2], [4, 5], [1, 3], [6, 7]]


def test_the_round_before_a_long_one_keeps_what_never_started() -> None:
    fleet = fleet_of(extra_groups=2)
    # Room for one prompt at a time.
    fleet.engines[next(iter(fleet.engines))].budget = 8
    set_lengths(fleet, {})
    fleet.add_groups()
    assert fleet.core.rounds.kind is RoundKind.SHORT
    while len(fleet.trained) < 3:
        fleet.round()
    trained = [each for groups in trained_groups(fleet) for each in groups]
    assert len(set(trained)) == 6


def test_a_policy_with_staleness_begins_with_the_queued_prompts() -> None:
    fleet = fleet_of(extra_groups=1, extra_samples=1)
    set_lengths(fleet, {1: 9})
    while not fleet.trained:
        fleet.round()
    assert list(fleet.core.rounds.queue) == [1]
    bound = replace(
        fleet.settings.staleness,
        staleness=2,
        extra_groups=0,
        extra_samples=0,
        group_ids=fleet.settings.staleness.ids_per_group,
    )
    fleet.handle(PolicyChanged(bound=bound))
    assert fleet.core.rounds.kind is None
    fleet.restart()
    for _ in range(4):
        fleet.round()
    assert 1 in fleet.core.trajectories.groups or 1 in trained_groups(fleet)[1]
    while not any(1 in groups for groups in trained_groups(fleet)):
        fleet.round()
    assert len(fleet.trained) <= 4, "later than the bound"


@pytest.mark.parametrize("changes", [{"batch_groups": 3}, {"group_size": 1}, {"first_version": 3}])
def test_a_policy_keeps_the_sizes_of_batch_and_group(changes: dict[str, int]) -> None:
    fleet = fleet_of(extra_groups=1, extra_samples=1)
    before = fleet.core.state()
    with pytest.raises(InvalidRequestError, match="keep the sizes"):
        fleet.handle(PolicyChanged(bound=replace(fleet.settings.staleness, **changes)))
    assert fleet.core.state() == before


def test_equal_rewards_are_not_trained_and_not_queued() -> None:
    fleet = fleet_of(extra_groups=1)
    fleet.core.settings = replace(fleet.core.settings, dynamic_sampling=True)
    set_lengths(fleet, {})
    fleet.equal_rewards = {0, 3}
    while len(fleet.trained) < 3:
        fleet.round()
    assert fleet.dropped == [0, 3]
    assert not {0, 3} & {each for groups in trained_groups(fleet) for each in groups}


def test_a_restart_in_a_long_round_changes_nothing() -> None:
    logs = []
    for restarts in (False, True):
        history = TailHistory(Random(5))
        fleet = history.fleet
        while len(fleet.trained) < 8:
            history.add_groups()
            fleet.round(tokens=2)
            if restarts:
                fleet.restart()
        logs.append([command for _, commands in fleet.log for command in commands])
    assert logs[0] == logs[1]
    assert any(isinstance(each, Train) for each in logs[0])


def test_a_round_counts_no_more_samples_of_a_prompt_than_are_trained() -> None:
    sizes = StalenessSettings(
        staleness=0, batch_groups=2, group_size=2, extra_groups=1, extra_samples=2
    )
    server, rounds = TrajectoryServer(samples=sizes.samples), Rounds(sizes)
    for number in range(sizes.groups_max):
        group = SampleGroupId(number)
        server.add(group, 5)
        rounds.add(group, 5)
    rounds.start(server)
    first, second, *_ = (list(server.members(group)) for group in server.groups)
    for each in [*first, second[0]]:
        each.change(TrajectoryChange.ROUTE)
        each.change(TrajectoryChange.GENERATE)
    assert len(first) == 4
    assert rounds.progress(server) == (2 + 1, 2 * len(server.groups))
