"""Time that the rollout coordinator takes for one decision cycle.

    python -m benchmarks.simulating.rollout_decisions [--quick] [--json]

128 instances share 8192 trajectories, 4 batches of 128 groups of 16 (staleness bound 3). Instances
answer commands at once; between two snapshots each running trajectory gets new tokens, and some
complete, by a long-tailed length. What is measured is the processor time of one accepted snapshot:
validation, synchronisation, migration, routing and the bookkeeping of the commands. `returned` is
the worst cycle: every instance pulls at once, and all its work is routed anew.
"""

from dataclasses import dataclass, field
from random import Random
from time import process_time

from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    BatchRequested,
    Generated,
    GroupAdded,
    InstanceJoined,
    Interrupt,
    ParametersPushed,
    Pull,
    Pulled,
    Rewarded,
    RolloutEvent,
    Route,
    SnapshotTaken,
    Stopped,
    StoppedTrajectory,
    Train,
)
from plexrl.rollout.coordinator.settings import CoordinatorSettings, Synchronisation
from plexrl.rollout.instances.cost_model import QWEN3_30B_A3B_ON_H20
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectorySegment,
)

INSTANCES = 128
GROUPS, SAMPLES, STALENESS = 128, 16, 3
KV_TOKENS = 1_000_000
"""KV cache of an instance."""
LENGTH_MAX = 40_000
TOKENS = 512
"""New tokens of a running trajectory between two snapshots."""
STEPS = sized(12, quick=1)
"""Training steps of a run."""


@dataclass
class Engine:
    """One instance: tokens that each trajectory had on arrival, and has got since."""

    version: int = 0
    before: dict[TrajectoryId, int] = field(default_factory=dict)
    new: dict[TrajectoryId, int] = field(default_factory=dict)
    completed: int = 0


class Run:
    """The coordinator between engines that answer at once."""

    def __init__(self, synchronisation: Synchronisation, seed: int) -> None:
        sizes = StalenessSettings(staleness=STALENESS, batch_groups=GROUPS, group_size=SAMPLES)
        self.core = RolloutCoordinator(
            CoordinatorSettings(
                staleness=sizes,
                cost_model=QWEN3_30B_A3B_ON_H20,
                synchronisation=synchronisation,
            )
        )
        self.random = Random(seed)
        self.engines = {InstanceId(f"i{i:03d}"): Engine() for i in range(INSTANCES)}
        self.target: dict[TrajectoryId, int] = {}
        self.groups = 0
        self.steps = 0
        self.cycle_s: list[float] = []
        for name in self.engines:
            self.handle(InstanceJoined(instance=name, version=0, kv_budget=KV_TOKENS))
        self.handle(BatchRequested())

    def handle(self, event: RolloutEvent) -> None:
        """Hands the event over and carries out the commands."""
        begun = process_time()
        commands = self.core.handle(event)
        if isinstance(event, SnapshotTaken):
            self.cycle_s.append(process_time() - begun)
        for command in commands:
            match command:
                case Route():
                    self.route(command)
                case Interrupt() | Abort():
                    self.stop(command)
                case Pull():
                    engine = self.engines[command.instance]
                    engine.version, engine.completed = command.version, 0
                    self.handle(Pulled(instance=command.instance, version=command.version))
                case Train():
                    self.steps += 1
                    self.handle(ParametersPushed(version=command.version + 1))
                    self.handle(BatchRequested())

    def route(self, command: Route) -> None:
        engine = self.engines[command.instance]
        for each in command.trajectories:
            record = self.core.trajectories.get(each)
            assert record is not None
            engine.before[each], engine.new[each] = record.length, 0

    def stop(self, command: Interrupt | Abort) -> None:
        engine = self.engines[command.instance]
        found = [each for each in command.trajectories if each in engine.new]
        stopped = tuple(
            StoppedTrajectory(trajectory=each, segments=self.leave(engine, each)) for each in found
        )
        self.handle(Stopped(instance=command.instance, trajectories=stopped))

    def leave(self, engine: Engine, each: TrajectoryId) -> tuple[TrajectorySegment, ...]:
        tokens, version = engine.new.pop(each), engine.version
        del engine.before[each]
        if not tokens:
            return ()
        return (TrajectorySegment(tokens=tokens, policy_version=version, kv_version=version),)

    def add_groups(self) -> None:
        while self.core.groups_wanted:
            group = SampleGroupId(self.groups)
            prompt = self.random.randint(100, 2000)
            scale = self.random.lognormvariate(8.5, 0.6)
            for index in range(SAMPLES):
                length = int(scale * self.random.lognormvariate(0, 0.5))
                self.target[TrajectoryId(group * SAMPLES + index)] = min(length + 1, LENGTH_MAX)
            self.handle(GroupAdded(group=group, prompt_tokens=prompt))
            self.groups += 1

    def generate(self) -> None:
        for name, engine in self.engines.items():
            running, _ = self.split(engine)
            for each in running:
                record = self.core.trajectories.get(each)
                assert record is not None
                left = self.target[each] - record.response_tokens
                # No two trajectories have had the same time.
                engine.new[each] += self.random.randint(TOKENS // 2, TOKENS)
                if engine.new[each] >= left:
                    engine.new[each] = left
                    segments = self.leave(engine, each)
                    engine.completed += 1
                    self.handle(Generated(trajectory=each, instance=name, segments=segments))
                    self.handle(Rewarded(trajectory=each, reward=float(each % 2)))

    def split(self, engine: Engine) -> tuple[list[TrajectoryId], list[TrajectoryId]]:
        """Running and waiting trajectories."""
        used, count = 0, 0
        for each, new in engine.new.items():
            used += engine.before[each] + new
            if used > KV_TOKENS:
                break
            count += 1
        ids = list(engine.new)
        return ids[:count], ids[count:]

    def snapshot(self) -> SnapshotTaken:
        shown = []
        for name, engine in self.engines.items():
            running, waiting = self.split(engine)
            lengths = [engine.before[each] + engine.new[each] for each in running]
            shown.append(
                InstanceSnapshot(
                    instance=name,
                    version=engine.version,
                    kv_cache=sum(lengths),
                    running=tuple(running),
                    running_tokens=tuple(lengths),
                    waiting=tuple(waiting),
                    waiting_tokens=tuple(engine.before[e] + engine.new[e] for e in waiting),
                    completed=engine.completed,
                )
            )
        return SnapshotTaken(instances=tuple(shown))

    def steps_taken(self, steps: int) -> list[float]:
        """Seconds of each cycle until so many batches are trained."""
        while self.steps < steps:
            self.add_groups()
            self.handle(self.snapshot())
            self.generate()
        return self.cycle_s


def main() -> None:
    rows, figures = [], {}
    runs: tuple[tuple[str, Synchronisation], ...] = (
        ("throughput", "throughput"),
        ("returned", "greedy"),
    )
    for name, synchronisation in runs:
        run = Run(synchronisation, seed=1)
        taken = [1e3 * each for each in run.steps_taken(STEPS)]
        middle, high, most = percentile(taken, 50), percentile(taken, 99), max(taken)
        rows.append((name, str(len(taken)), f"{middle:.1f}", f"{high:.1f}", f"{most:.1f}"))
        figures[f"decision_ms_{name}"] = most
        assert run.core.snapshots_refused == 0
    trajectories = (STALENESS + 1) * GROUPS * SAMPLES
    report(
        f"Decision cycles of {INSTANCES} instances and {trajectories} trajectories",
        ("cycles", "count", "median ms", "p99 ms", "most ms"),
        rows,
        figures,
    )


if __name__ == "__main__":
    main()
