"""Random histories of a fleet: messages cross, instances die, groups are filtered.

After every action the cores' invariants hold. `finish` lets everything go on fairly until batches
are trained, and then accounts for every trajectory that was ever added.
"""

from random import Random

from plexrl.errors import InvariantError
from plexrl.rollout.coordinator.cost_model import CostModel
from plexrl.rollout.coordinator.messages import GroupFiltered
from plexrl.rollout.coordinator.settings import CoordinatorSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import TrajectoryId
from tests.rollout.fleet import PROMPT, Engine, Fleet

ENGINES_MAX = 4
BUDGET = 24
LENGTH_MAX = 12
ACTIONS = {
    "run_command": 4,
    "decode": 6,
    "deliver": 5,
    "snapshot": 4,
    "reward": 3,
    "trainer": 2,
    "kill": 1,
    "deliver_late": 1,
    "join": 1,
    "fail": 1,
    "filter_group": 2,
    "add_groups": 1,
}
"""Methods of `History`, and how likely each is."""
LIKELY = [name for name, weight in ACTIONS.items() for _ in range(weight)]


def settings_from(random: Random) -> CoordinatorSettings:
    """Settings of a small fleet, of all kinds."""
    return CoordinatorSettings(
        staleness=StalenessSettings(
            staleness=random.choice((0, 1, 1, 2, 3)),
            batch_groups=random.randint(1, 3),
            group_size=random.randint(1, 3),
            extra_groups=random.choice((0, 0, 1)),
            extra_samples=random.choice((0, 0, 1)),
        ),
        # Steps of few tokens are limited by reading the weights, those of many by computation.
        cost_model=CostModel(k1=random.choice((1e-4, 1e-2)), k2=0.02, k3=0.01, k4=0.1, k5=1.0),
        routing=random.choice(("throughput", "throughput", "count")),
        synchronisation=random.choice(("throughput", "throughput", "greedy")),
        migration=random.choice(("throughput", "throughput", "none")),
        gain_part_min=random.choice((0.05, 0.3, 0.9)),
        waiting_max=random.randint(0, 2),
        throughput_ratio_max=random.choice((1.0, 2.0, 5.0)),
        migration_gain_min=random.choice((0.0, 0.05)),
        length_step_tokens=random.choice((1, 4)),
        failures_max=random.choice((1, 3)),
    )


class History:
    """A fleet and the actions that may happen to it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.fleet = Fleet(settings_from(random))
        for _ in range(random.randint(1, ENGINES_MAX)):
            self.fleet.join(BUDGET)

    def act(self) -> None:
        """One action. Raises InvariantError: an invariant does not hold after it."""
        getattr(self, self.random.choice(LIKELY))()
        self.fleet.core.check_invariants()

    def engine(self) -> Engine | None:
        engines = list(self.fleet.engines.values())
        return self.random.choice(engines) if engines else None

    def run_command(self) -> None:
        engine = self.engine()
        if engine and engine.to_run:
            self.fleet.run_command(engine)

    def decode(self) -> None:
        if engine := self.engine():
            self.fleet.decode(engine)

    def deliver(self) -> None:
        engine = self.engine()
        if engine and engine.sent:
            self.fleet.deliver(engine)

    def deliver_late(self) -> None:
        if self.fleet.late:
            self.fleet.handle(self.fleet.late.pop(0))

    def snapshot(self) -> None:
        # A snapshot that overtakes events of its own instance would break the protocol.
        if not any(engine.sent for engine in self.fleet.engines.values()):
            self.fleet.snapshot()

    def reward(self) -> None:
        if self.fleet.to_reward:
            self.fleet.reward(self.random.randrange(len(self.fleet.to_reward)))

    def trainer(self) -> None:
        if self.fleet.training is not None:
            self.fleet.finish_training()
        else:
            self.fleet.ask_for_batch()

    def kill(self) -> None:
        if engine := self.engine():
            self.fleet.kill(engine.name)

    def join(self) -> None:
        if len(self.fleet.engines) < ENGINES_MAX:
            self.fleet.join(BUDGET)

    def fail(self) -> None:
        engine = self.engine()
        if engine and engine.held:
            self.fleet.fail(engine, self.random.choice(list(engine.held)))

    def filter_group(self) -> None:
        groups = sorted(self.fleet.core.trajectories.groups)
        if groups:
            group = self.random.choice(groups)
            self.fleet.handle(GroupFiltered(group=group, reason="equal rewards"))

    def add_groups(self) -> None:
        before = self.fleet.groups_added
        self.fleet.add_groups()
        samples = self.fleet.core.settings.staleness.samples
        for each in range(before * samples, self.fleet.groups_added * samples):
            self.fleet.lengths[TrajectoryId(each)] = self.random.randint(1, LENGTH_MAX)

    def finish(self) -> None:
        """Lets training go on, and then accounts for every trajectory.

        Raises InvariantError: training stands still, or a trajectory is lost or trained twice.
        """
        fleet = self.fleet
        while len(fleet.engines) < 2:
            fleet.join(BUDGET)
        wanted = len(fleet.trained) + fleet.core.settings.staleness.staleness + 2
        rounds = 0
        while len(fleet.trained) < wanted:
            rounds += 1
            if rounds > 400:
                raise InvariantError(f"{len(fleet.trained)} of {wanted} batches", law="progress")
            self.add_groups()
            fleet.round()
            fleet.core.check_invariants()
        self.account()

    def account(self) -> None:
        """Raises InvariantError: a trajectory is lost, trained twice, too stale or too short."""
        fleet, staleness = self.fleet, self.fleet.core.settings.staleness
        trained = [each for train in fleet.trained for each in train.batch]
        groups = [each.group for each in trained]
        if [train.version for train in fleet.trained] != list(range(len(fleet.trained))):
            raise InvariantError("batches are out of order", law="order of training")
        if len({each.trajectory for each in trained}) != len(trained):
            raise InvariantError("a trajectory is trained twice", law="trained once")
        if any(groups.count(group) != staleness.group_size for group in {*groups}):
            raise InvariantError("a group is trained in part", law="whole groups")
        ended, held = {*groups}, {*fleet.core.trajectories.groups}
        dropped = {*fleet.dropped}
        if (
            len(ended) + len(held) + len(dropped) != fleet.groups_added
            or len(ended | held | dropped) != fleet.groups_added
        ):
            raise InvariantError("a group is lost or ended twice", law="no group is lost")
        for train in fleet.trained:
            if len({each.group for each in train.batch}) != staleness.batch_groups:
                raise InvariantError("a batch lacks groups", law="whole batches")
            for each in train.batch:
                oldest = min(segment.kv_version for segment in each.segments)
                newest = max(segment.policy_version for segment in each.segments)
                tokens = sum(segment.tokens for segment in each.segments)
                if not train.version - staleness.staleness <= each.version <= oldest:
                    raise InvariantError(f"{each} in {train.version}", law="staleness bound")
                if newest > train.version:
                    raise InvariantError(f"{each} in {train.version}", law="no newer model")
                if tokens != fleet.lengths[each.trajectory] or each.prompt_tokens != PROMPT:
                    raise InvariantError(f"{each} has {tokens} tokens", law="whole responses")
                if each.reward != float(each.trajectory % 2):
                    raise InvariantError(f"{each} has a wrong reward", law="own reward")


def run_history(seed: int, actions: int) -> int:
    """Runs one history to its end; the same seed gives the same history. Returns the batches."""
    history = History(Random(seed))
    for _ in range(actions):
        history.act()
    history.finish()
    return len(history.fleet.trained)
