"""The state that the next snapshot of an instance must show (StaleFlow §5.2)."""

from dataclasses import dataclass, field

from plexrl.rollout.trajectories.record import TrajectoryId


@dataclass(slots=True, kw_only=True)
class ExpectedInstance:
    """The state that a snapshot of the instance must show, and the commands that it has not
    answered."""

    kv_budget: float
    version: int
    gpus: int = 1
    is_with_trainer: bool = False
    """As in `InstanceJoined`, until a `SharingChanged`."""
    is_draining: bool = False
    """It gets nothing more, and returns what it has."""
    trajectories: int = 0
    """Running, waiting and completed since the last pull."""
    pulls: int = 0
    """Pulls issued so far."""
    pulls_unanswered: int = 0
    is_switching: bool = False
    """A `SwitchTp` is not answered. It changes nothing else of what a snapshot must show."""
    coming: list[TrajectoryId] = field(default_factory=list)
    """Routed there and not sent yet, in the order of routing; `trajectories` counts them."""
    stops: list[dict[TrajectoryId, int]] = field(default_factory=list)
    """Each `Interrupt` and `Abort` that is not answered, in the order of issue: its trajectories
    that have not ended there, and `pulls` when it was issued. A trajectory is in one at most: one
    that failed there can be routed there again, and be in a later command."""
