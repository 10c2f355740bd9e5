"""Records a run: training steps, staleness, load of the instances, trajectories."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from plexrl.errors import InvariantError
from plexrl.sim.rollout.engine.instance import Instance
from plexrl.sim.rollout.engine.trajectory import SimulatedSegment, SimulatedTrajectory

SAMPLES_MAX = 1024
"""Most samples of the load per instance; when there are more, every other one is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """One training step, from version `version` to the next."""

    version: int
    start_s: float
    end_s: float
    tokens: int
    """Tokens of prompts and responses."""
    response_tokens: int
    round_kind: str
    """`short` or `long` with tail batching, otherwise empty."""
    reward_s: float
    """Seconds before the step in which only its rewards were computed."""
    early_s: float
    """Seconds in which the trainer worked on the batch before it was complete."""
    staleness: dict[int, int]
    """Trajectories by V_buf - V_traj, where V_traj is the oldest version in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoad:
    """The load of one instance at one time."""

    at_s: float
    running: int
    waiting: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A trained trajectory for the swimlanes."""

    group: int
    buffer: int
    """Version that was trained with it."""
    segments: tuple[SimulatedSegment, ...]


@dataclass(slots=True)
class Recorder:
    """Collects the history of one run."""

    lanes_from: int | None = None
    """First buffer whose trajectories are kept; None keeps neither them nor loads."""
    sample_s: float = 10.0
    """Seconds between two samples of the load; grows in long runs."""
    steps: list[TrainStep] = field(default_factory=list)
    loads: dict[int, list[RecordedLoad]] = field(default_factory=dict)
    lanes: list[Lane] = field(default_factory=list)
    trained_numbers: set[int] = field(default_factory=set)
    prefill_tokens: int = 0
    admissions: int = 0
    generated_tokens: int = 0
    """Also of responses that are not trained."""
    end_s: float = 0.0
    decode_gpu_s: float = 0.0
    prefill_gpu_s: float = 0.0
    pull_gpu_s: float = 0.0
    preemptions: int = 0
    instances: int = 0
    """At the end of the run."""
    rollout_gpus: int = 0
    train_gpus: int = 0
    decide_s: list[float] = field(default_factory=list)
    """CPU seconds of each decision of the coordinator; all else is equal in equal runs."""

    def trained(
        self,
        version: int,
        start_s: float,
        end_s: float,
        trajectories: Sequence[SimulatedTrajectory],
        *,
        round_kind: str = "",
        reward_s: float = 0.0,
        early_s: float = 0.0,
    ) -> None:
        """A training step on these trajectories begins.

        Raises:
            InvariantError: a trajectory is incomplete or was trained before.
        """
        staleness: Counter[int] = Counter()
        for trajectory in trajectories:
            tokens = sum(segment.tokens for segment in trajectory.segments)
            if trajectory.finished_s is None or tokens != trajectory.response_tokens:
                raise InvariantError(
                    f"trajectory {trajectory.number} is trained with {tokens} of its "
                    f"{trajectory.response_tokens} tokens"
                )
            if trajectory.number in self.trained_numbers:
                raise InvariantError(f"trajectory {trajectory.number} is trained twice")
            self.trained_numbers.add(trajectory.number)
            oldest = min(segment.version for segment in trajectory.segments)
            staleness[version - oldest] += 1
            self.prefill_tokens += trajectory.prefill_tokens
            self.admissions += trajectory.admissions
            if self.lanes_from is not None and version >= self.lanes_from:
                self.lanes.append(
                    Lane(
                        group=trajectory.group, buffer=version, segments=tuple(trajectory.segments)
                    )
                )
        self.steps.append(
            TrainStep(
                version=version,
                start_s=start_s,
                end_s=end_s,
                tokens=sum(trajectory.length for trajectory in trajectories),
                response_tokens=sum(trajectory.response_tokens for trajectory in trajectories),
                round_kind=round_kind,
                reward_s=reward_s,
                early_s=early_s,
                staleness=dict(sorted(staleness.items())),
            )
        )

    def sample(self, now: float, instances: Sequence[Instance]) -> None:
        """Keep the load of each instance, without a change to it."""
        for instance in instances:
            loads = self.loads.setdefault(instance.number, [])
            if len(loads) >= SAMPLES_MAX:
                del loads[1::2]
                self.sample_s *= 2.0 if instance is instances[0] else 1.0
            loads.append(
                RecordedLoad(
                    at_s=now,
                    running=instance.running_count,
                    waiting=len(instance.waiting),
                    version=instance.version,
                )
            )

    def ended(self, now: float, instances: Sequence[Instance], train_gpus: int) -> None:
        """The run ended."""
        self.end_s = now
        self.instances = len(instances)
        self.rollout_gpus = sum(instance.costs.gpus for instance in instances)
        self.train_gpus = train_gpus

    def instances_ended(self, instances: Sequence[Instance]) -> None:
        """Add the work of instances that have ended to the totals."""
        for instance in instances:
            gpus = instance.costs.gpus
            self.decode_gpu_s += gpus * instance.decode_s
            self.prefill_gpu_s += gpus * instance.prefill_s
            self.pull_gpu_s += gpus * instance.pull_s
            self.preemptions += instance.preemptions
            self.generated_tokens += instance.tokens
