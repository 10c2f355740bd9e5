"""Random histories of a fleet: messages cross, instances die, groups are filtered.

After every action the cores' invariants hold, and what `look` computes without them. `finish` lets
everything go on fairly until batches are trained, and then accounts for every trajectory that was
ever added.

    python -m tests.rollout.history FIRST_SEED COUNT

runs many histories. One that fails names its seed, and the least number of actions with which that
seed fails.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import get_args

from plexrl.errors import InvariantError
from plexrl.rollout.coordinator.messages import (
    GroupFiltered,
    PolicyChanged,
    PromptsEnded,
    SharingChanged,
    StepMeasured,
    StepsMeasured,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings, Routing
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.scale_down import ScaleDownSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import TrajectoryId
from tests.rollout.adaptive_tp.oracle import profile
from tests.rollout.fleet import PROMPT, Engine, Fleet
from tests.rollout.oracle import earliest

ENGINES_MAX = 4
BUDGET = 24
LENGTH_MAX = 12
ACTIONS = {
    "run_command": 16,
    "decode": 12,
    "deliver": 16,
    "snapshot": 14,
    "reward": 12,
    "trainer": 10,
    "add_groups": 6,
    "kill": 1,
    "drain": 1,
    "deliver_late": 1,
    "join": 1,
    "come_back": 1,
    "fail": 2,
    "filter_group": 2,
    "measure": 1,
    "restart": 1,
    "end_prompts": 1,
    "change_policy": 1,
    "share": 1,
}
"""Methods of `History`, and how likely each is."""
HISTORY_ACTIONS = 32
DRAINED_ROUNDS = 4
"""Fair rounds after which a drained instance has returned all that it had."""
PRINTED = 10_000
"""Histories between two lines of `main`."""
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
            first_version=random.choice((0, 0, 0, 5)),
        ),
        # Steps of few tokens are limited by reading the weights, those of many by computation.
        cost_model=CostModel(k1=random.choice((1e-4, 1e-2)), k2=0.02, k3=0.01, k4=0.1, k5=1.0),
        routing=random.choice(("throughput", "length-aware", "count")),
        synchronisation=random.choice(("throughput", "throughput", "greedy")),
        migration=random.choice(("throughput", "throughput", "none")),
        gain_part_min=random.choice((0.05, 0.3, 0.9)),
        waiting_max=random.randint(0, 2),
        throughput_ratio_max=random.choice((1.0, 2.0, 5.0)),
        migration_gain_min=random.choice((0.0, 0.05)),
        length_step_tokens=random.choice((1, 4)),
        failures_max=random.choice((1, 3)),
        measured_steps_max=16,
    )


def freeing(settings: CoordinatorSettings) -> CoordinatorSettings:
    """The same with rounds that free instances and switch groups, if there are rounds."""
    if settings.staleness.staleness:
        return settings
    return replace(
        settings,
        scale_down=ScaleDownSettings(response_tokens_max=LENGTH_MAX),
        adaptive_tp=AdaptiveTpSettings(
            profile=profile(switch_s=1.0), response_tokens_max=LENGTH_MAX
        ),
    )


class History:
    """A fleet and the actions that may happen to it."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.fleet = self.make_fleet()
        for _ in range(random.randint(1, ENGINES_MAX)):
            self.fleet.join(BUDGET)
        self.add_groups()
        # Some histories begin when the rollout has gone on for a while.
        for _ in range(random.choice((0, 0, 1, 4))):
            self.fleet.round(tokens=random.choice((1, LENGTH_MAX)))
            self.add_groups()

    def make_fleet(self) -> Fleet:
        """A fleet without instances."""
        return Fleet(freeing(settings_from(self.random)))

    def act(self) -> None:
        """One action. Raises InvariantError: an invariant does not hold after it."""
        self.run(self.random.choice(LIKELY))

    def run(self, action: str) -> None:
        """As `act`, with this action."""
        before = len(self.fleet.log)
        getattr(self, action)()
        if len(self.fleet.log) > before or action == "restart":
            self.look()

    def look(self) -> None:
        """Raises InvariantError: an entry is too stale, too much is in flight, or the buffers are
        not as ready as they can be, found without the checks of the cores; or these fail."""
        core = self.fleet.core
        core.check_invariants()
        sizes, buffers = core.settings.staleness, core.manager.buffers
        first = buffers.next_version
        versions: dict[int, list[int]] = {}
        for group in core.trajectories.groups:
            members = list(core.trajectories.members(group))
            if found := [each.version for each in members if each.version is not None]:
                versions[group] = found
            for each in members:
                failures = self.fleet.failures.get(each.id, 0)
                if each.failures != failures or failures >= core.settings.failures_max:
                    raise InvariantError(f"{failures} failures of {each}", law="failures")
        batches = sizes.staleness + 1
        if len(core.trajectories.groups) > batches * (sizes.batch_groups + sizes.extra_groups):
            raise InvariantError("too many groups are in flight", law="in flight")
        entries = []
        occupied = [0] * batches
        for place, buffer in buffers.entries():
            for group, version in (buffer.reserved | buffer.occupied).items():
                oldest = min(versions.pop(group))
                if not first <= place <= oldest + sizes.staleness or version > oldest:
                    raise InvariantError(f"{oldest} in buffer {place}", law="staleness bound")
                entries.append((version, group in buffer.occupied))
                occupied[place - first] += group in buffer.occupied
        if versions:
            raise InvariantError(f"groups {versions} have no entry", law="entry of each group")
        best = earliest(
            entries,
            first=first,
            staleness=sizes.staleness,
            size=sizes.batch_groups,
            extra=sizes.extra_groups,
        )
        if tuple(occupied) != best:
            raise InvariantError(f"{occupied}, not {best}", law="earliest ready")

    def ends(self) -> bool:
        """Whether an action that can be repeated ends here: after four times in the mean."""
        return self.random.random() < 1 / 4

    def engine(self, can: Callable[[Engine], object] = lambda _: True) -> Engine | None:
        """Any engine that can act so."""
        engines = [each for each in self.fleet.engines.values() if can(each)]
        return self.random.choice(engines) if engines else None

    def run_command(self) -> None:
        while engine := self.engine(lambda each: each.to_run):
            self.fleet.run_command(engine)
            if self.ends():
                return

    def decode(self) -> None:
        while engine := self.engine(lambda each: each.held):
            self.fleet.decode(engine, self.random.choice((1, 4, LENGTH_MAX)))
            if self.ends():
                return

    def deliver(self) -> None:
        while engine := self.engine(lambda each: each.sent):
            self.fleet.deliver(engine)
            if self.ends():
                return

    def deliver_late(self) -> None:
        if self.fleet.late:
            self.fleet.handle(self.fleet.late.pop(0))

    def snapshot(self) -> None:
        is_one_silent = self.random.random() < 0.1
        self.fleet.snapshot(silent=self.engine() if is_one_silent else None)

    def reward(self) -> None:
        while self.fleet.to_reward:
            self.fleet.reward(self.random.randrange(len(self.fleet.to_reward)))
            if self.ends():
                return

    def trainer(self) -> None:
        if self.fleet.training is not None:
            self.fleet.finish_training()
        else:
            self.fleet.ask_for_batch()

    def kill(self) -> None:
        if engine := self.engine():
            self.fleet.kill(engine.name)

    def drain(self) -> None:
        """An instance gets nothing more, and is lost once it has returned what it has."""
        fleet = self.fleet
        for name in [each for each in fleet.drained if each in fleet.engines]:
            if not fleet.engines[name].held and not fleet.engines[name].sent:
                fleet.kill(name)
        left = [each for each in fleet.engines if each not in fleet.drained]
        if len(left) > 1:
            fleet.drain(self.random.choice(left), left)

    def share(self) -> None:
        """The trainer moves to GPUs of an instance, or away from them."""
        if engine := self.engine():
            is_with_trainer = self.random.random() < 0.5
            event = SharingChanged(instance=engine.name, is_with_trainer=is_with_trainer)
            self.fleet.handle(event)

    def come_back(self) -> None:
        """A lost instance comes back, or one is lost and comes back at once."""
        fleet = self.fleet
        if fleet.lost and len(fleet.engines) < ENGINES_MAX and self.random.random() < 0.5:
            fleet.join(BUDGET, fleet.lost.pop(0))
        elif engine := self.engine():
            fleet.kill(engine.name)
            fleet.join(BUDGET, fleet.lost.pop())

    def measure(self) -> None:
        """Decode steps take between 0.1 and 1 s, whatever the load."""
        step = StepMeasured(
            kv_cache=self.random.uniform(1, BUDGET),
            running=self.random.randint(1, BUDGET),
            seconds=self.random.uniform(0.1, 1.0),
        )
        self.fleet.handle(StepsMeasured(steps=(step,)))

    def end_prompts(self) -> None:
        self.fleet.handle(PromptsEnded())

    def change_policy(self) -> None:
        before = self.fleet.core.settings.staleness
        extra_max = before.ids_per_group - before.group_size
        bound = replace(
            before,
            staleness=self.random.choice((0, 0, 1, 2)),
            extra_groups=self.random.choice((0, 1, 2)),
            extra_samples=self.random.randint(0, extra_max),
            group_ids=before.ids_per_group,
        )
        after = freeing(
            replace(self.fleet.settings, staleness=bound, scale_down=None, adaptive_tp=None)
        )
        changed = PolicyChanged(
            bound=bound,
            routing=self.random.choice(get_args(Routing)),
            scale_down=after.scale_down,
            adaptive_tp=self.random.choice((None, after.adaptive_tp)),
        )
        self.fleet.handle(changed)

    def restart(self) -> None:
        self.fleet.restart()

    def join(self) -> None:
        if len(self.fleet.engines) < ENGINES_MAX:
            self.fleet.join(BUDGET)

    def fail(self) -> None:
        if engine := self.engine(lambda each: each.held):
            self.fleet.fail(engine, self.random.choice(list(engine.held)))

    def filter_group(self) -> None:
        groups = sorted(self.fleet.core.trajectories.groups)
        if groups:
            group = self.random.choice(groups)
            self.fleet.handle(GroupFiltered(group=group, reason="equal rewards"))

    def add_groups(self) -> None:
        before = self.fleet.groups_added
        self.fleet.add_groups()
        self.set_lengths(before)

    def set_lengths(self, before: int) -> None:
        """Of the samples of the prompts from `before` on."""
        samples = self.fleet.core.settings.staleness.ids_per_group
        for each in range(before * samples, self.fleet.groups_added * samples):
            self.fleet.lengths[TrajectoryId(each)] = self.random.randint(1, LENGTH_MAX)

    def finish(self) -> None:
        """Lets training go on, and then accounts for every trajectory.

        Raises InvariantError: training stands still, or a trajectory is lost or trained twice.
        """
        fleet = self.fleet
        while len(fleet.engines.keys() - fleet.drained) < 2:
            fleet.join(BUDGET)
        all_in_flight = fleet.core.settings.staleness.staleness + 2
        wanted = len(fleet.trained) + self.random.choice((1, 1, 1, all_in_flight))
        rounds = 0
        while len(fleet.trained) < wanted:
            rounds += 1
            if rounds > 400:
                raise InvariantError(f"{len(fleet.trained)} of {wanted} batches", law="progress")
            self.add_groups()
            fleet.round(tokens=LENGTH_MAX)
            self.look()
        for _ in range(DRAINED_ROUNDS if fleet.drained & fleet.engines.keys() else 0):
            self.add_groups()
            fleet.round(tokens=1)
        if held := [name for name in fleet.drained & fleet.engines.keys() if fleet.has(name)]:
            raise InvariantError(f"{held} have trajectories", law="drained instances")
        self.account()

    def account(self) -> None:
        """Raises InvariantError: a trajectory is lost, trained twice, too stale or too short."""
        fleet, staleness = self.fleet, self.fleet.core.settings.staleness
        trained = [each for train in fleet.trained for each in train.batch]
        groups = [each.group for each in trained]
        first = staleness.first_version
        if any(train.version != first + number for number, train in enumerate(fleet.trained)):
            raise InvariantError("batches are out of order", law="order of training")
        if len({each.trajectory for each in trained}) != len(trained):
            raise InvariantError("a trajectory is trained twice", law="trained once")
        if any(groups.count(group) != staleness.group_size for group in {*groups}):
            raise InvariantError("a group is trained in part", law="whole groups")
        prompts = fleet.core.rounds.held
        ended = {*groups}
        held = {*fleet.core.trajectories.groups, *prompts.queue, *prompts.fresh}
        dropped = {*fleet.dropped}
        if (
            len(ended) + len(held) + len(dropped) != fleet.groups_added
            or len(ended | held | dropped) != fleet.groups_added
        ):
            raise InvariantError("a group is lost or ended twice", law="no group is lost")
        for train in fleet.trained:
            if len({each.group for each in train.batch}) != staleness.batch_groups:
                raise InvariantError("a batch lacks groups", law="whole batches")
            bound = fleet.bounds[train.version - first]
            for each in train.batch:
                oldest = min(segment.kv_version for segment in each.segments)
                newest = max(segment.policy_version for segment in each.segments)
                tokens = sum(segment.tokens for segment in each.segments)
                if not train.version - bound <= each.version <= oldest:
                    raise InvariantError(f"{each} in {train.version}", law="staleness bound")
                if newest > train.version:
                    raise InvariantError(f"{each} in {train.version}", law="no newer model")
                if tokens != fleet.lengths[each.trajectory] or each.prompt_tokens != PROMPT:
                    raise InvariantError(f"{each} has {tokens} tokens", law="whole responses")
                if each.reward != fleet.reward_of(each.trajectory):
                    raise InvariantError(f"{each} has a wrong reward", law="own reward")


def run_history(seed: int, actions: int) -> int:
    """Runs one history to its end; the same seed gives the same history. Returns the batches."""
    history = History(Random(seed))
    for _ in range(actions):
        history.act()
    history.finish()
    return len(history.fleet.trained)


def run_histories(first: int, count: int) -> int:
    """Runs the histories of consecutive seeds and returns the batches that were trained.

    Raises what the first one that fails raises, with its seed, and the least number of actions with
    which that seed fails.
    """
    batches = 0
    for seed in range(first, first + count):
        try:
            batches += run_history(seed, HISTORY_ACTIONS)
        except Exception as error:
            least = next(n for n in range(HISTORY_ACTIONS + 1) if fails(seed, n))
            error.add_note(f"run_history({seed}, {HISTORY_ACTIONS}); shortest: ({seed}, {least})")
            raise
    return batches


def fails(seed: int, actions: int) -> bool:
    """True for a history that raises."""
    try:
        run_history(seed, actions)
    except Exception:
        return True
    return False


def main(first: int, count: int) -> None:
    """Runs histories, and prints after each 10 000 that they passed."""
    for done in range(0, count, PRINTED):
        some = min(PRINTED, count - done)
        batches = run_histories(first + done, some)
        sys.stdout.write(f"{done + some} histories pass; the last {some} train {batches} batches\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
