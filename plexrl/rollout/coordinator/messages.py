"""Events that the coordinator takes and commands that it returns.

The events of one instance arrive in the order in which things happened there, and an instance runs
its commands in the order of issue. Instances run concurrently. Each `Interrupt` and each `Abort` is
answered by one `Stopped`, each `Pull` by one `Pulled`, each `SwitchTp` by one `TpSwitched`. The end
of a trajectory is an event of its own (`Generated`, `GenerationFailed`), which comes before a
`Stopped` that does not list it.
"""

from dataclasses import dataclass

from plexrl.rollout.coordinator.settings import Routing
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.policies.adaptive_tp.predictor import KvHandling
from plexrl.rollout.policies.adaptive_tp.settings import AdaptiveTpSettings
from plexrl.rollout.policies.scale_down import ScaleDownSettings
from plexrl.rollout.staleness.manager import StalenessSettings
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    Trajectory,
    TrajectoryId,
    TrajectorySegment,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEvent:
    """Something that happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceJoined(RolloutEvent):
    """An instance is ready to generate. It may have the id of a lost one, if no event that was sent
    before the loss arrives after this."""

    instance: InstanceId
    version: int
    """Version of its weights, at most that of the parameter server."""
    kv_budget: float
    """KV cache that it has, in the unit of the snapshots."""
    gpus: int = 1
    """GPUs of all its tensor-parallel groups."""
    is_with_trainer: bool = False
    """The job's trainer has GPUs of it, too, in turns with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingChanged(RolloutEvent):
    """An instance has GPUs of the job's trainer from now on, or has none any more."""

    instance: InstanceId
    is_with_trainer: bool
    """As in `InstanceJoined`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceLost(RolloutEvent):
    """An instance ended; what it generated and did not return is lost."""

    instance: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancesChosen(RolloutEvent):
    """Other deployments generate from now on, because their number changes (StreamRL §4.2)."""

    deployments: tuple[str, ...]
    """Deployments that generate, one or more."""
    ending: tuple[str, ...] = ()
    """Deployments that are to be ended and have not ended yet."""
    drained: tuple[InstanceId, ...] = ()
    """Joined instances that get nothing more, and return what they have; they are lost then."""
    change: int = 0
    """1: an instance is added, -1: one is removed, 0: a change was carried out or given up."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdded(RolloutEvent):
    """A prompt was sampled from the data set."""

    group: SampleGroupId
    prompt_tokens: int
    expected_tokens: int = 0
    """Expected length of a response; 0: it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsEnded(RolloutEvent):
    """The data set has no more prompts, unless another `GroupAdded` comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChanged(RolloutEvent):
    """Other sizes from now on. Those of batch and group, the first version and the trajectory ids
    of a group are the same. Groups for which they leave no place begin anew."""

    bound: StalenessSettings
    routing: Routing = "throughput"
    scale_down: ScaleDownSettings | None = None
    adaptive_tp: AdaptiveTpSettings | None = None
    fixed_over_launch: bool = True
    """As in `CoordinatorSettings`, like the three above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTaken(RolloutEvent):
    """The load of all instances."""

    instances: tuple[InstanceSnapshot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled(RolloutEvent):
    """An instance has pulled parameters."""

    instance: InstanceId
    version: int
    """The version that it got: that of the command or a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedTrajectory:
    """The part of a trajectory that an instance had generated since it was routed there."""

    trajectory: TrajectoryId
    segments: tuple[TrajectorySegment, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped(RolloutEvent):
    """An instance has carried out an `Interrupt` or an `Abort`."""

    instance: InstanceId
    trajectories: tuple[StoppedTrajectory, ...]
    """Trajectories of the command that it still had; those that it had completed are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated(RolloutEvent):
    """The generation of a trajectory is complete."""

    trajectory: TrajectoryId
    instance: InstanceId
    segments: tuple[TrajectorySegment, ...]
    """Segments that were generated since the trajectory was routed to this instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFailed(RolloutEvent):
    """An instance could not go on with a trajectory and does not have it any more."""

    trajectory: TrajectoryId
    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded(RolloutEvent):
    """The reward of a generated trajectory is computed: of its latest generation, if its group was
    aborted (`ReportQueuedGroup`) and generated anew."""

    trajectory: TrajectoryId
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFiltered(RolloutEvent):
    """The algorithm does not want a group, such as one whose rewards are all equal."""

    group: SampleGroupId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequested(RolloutEvent):
    """The trainer is free and takes the next batch as soon as it is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParametersPushed(RolloutEvent):
    """The parameter server serves a new version."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMeasured:
    """Seconds of one decode step at a load."""

    kv_cache: float
    running: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsMeasured(RolloutEvent):
    """Measured decode steps, to which the cost model is fitted anew: in each cycle one step of each
    instance or fewer, without prefill."""

    steps: tuple[StepMeasured, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TpSwitched(RolloutEvent):
    """An instance has carried out a `SwitchTp`, or could not."""

    instance: InstanceId
    has_switched: bool
    """False: its groups are as they were, or it was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutCommand:
    """Something that the caller has to carry out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pull(RolloutCommand):
    """The instance pulls the parameters of this version, or of a newer one."""

    instance: InstanceId
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(RolloutCommand):
    """The instance generates these trajectories."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupt(RolloutCommand):
    """The instance stops these trajectories and returns what it has generated."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(RolloutCommand):
    """The instance stops these trajectories; what it has generated is discarded."""

    instance: InstanceId
    trajectories: tuple[TrajectoryId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchTp(RolloutCommand):
    """The instance's engine goes on in tensor-parallel groups of another size."""

    instance: InstanceId
    tp: int
    kv: KvHandling
    gain_s: float
    """Predicted seconds that this saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTrajectory:
    """A complete trajectory of a batch."""

    trajectory: TrajectoryId
    group: SampleGroupId
    version: int
    """V_traj."""
    prompt_tokens: int
    segments: tuple[TrajectorySegment, ...]
    reward: float

    @classmethod
    def of(cls, record: Trajectory) -> "TrainedTrajectory":
        """The trained trajectory of a record, which has a version and a reward."""
        assert record.version is not None
        assert record.reward is not None
        return cls(
            trajectory=record.id,
            group=record.group,
            version=record.version,
            prompt_tokens=record.prompt_tokens,
            segments=tuple(record.segments),
            reward=record.reward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Train(RolloutCommand):
    """The trainer advances the model from `version` to `version + 1` with this batch."""

    version: int
    batch: tuple[TrainedTrajectory, ...]
    """By group, then by trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportDroppedGroup(RolloutCommand):
    """A group is not trained, and its trajectories are never counted with a reward."""

    group: SampleGroupId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportQueuedGroup(RolloutCommand):
    """A group was aborted, and begins anew in a later round: with the same trajectories, of which
    nothing is kept."""

    group: SampleGroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportScaleDown(RolloutCommand):
    """It was decided whether the round goes on with half of the GPUs (Flexes Alg. 1)."""

    freed: tuple[InstanceId, ...]
    """Instances that get nothing until the next round begins; what they have is interrupted. None
    of them: all go on."""
