"""The load that an instance reports, and the coordinator's own picture of it (StaleFlow
§5.2)."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSnapshot:
    """Load of one instance at one moment."""

    instance: InstanceId
    version: int
    """Version of its weights."""
    kv_cache: float
    """KV cache in use, in the unit of `CostModel.k5`: bytes, or tokens where `k5` is 1."""
    running: tuple[TrajectoryId, ...] = ()
    """Trajectories that are being generated."""
    running_tokens: tuple[int, ...] = ()
    """Length of each running trajectory, prompt included."""
    waiting: tuple[TrajectoryId, ...] = ()
    """Trajectories in the engine's own queue, first one first."""
    waiting_tokens: tuple[int, ...] = ()
    """Length of each waiting trajectory, prompt included."""
    completed: int = 0
    """Trajectories whose generation completed since the instance's last pull, or since it
    joined."""
    serves: bool = True
    """False: its engine does not answer now. It gets no work and no pull, and returns nothing: its
    load is not known."""
    tp: int = 0
    """Ranks of each tensor-parallel group of its engine; 0: it is not known."""
    groups: tuple[int, ...] = ()
    """Index of the group of each running trajectory; empty: all are in the first one."""

    def __post_init__(self) -> None:
        for name, ids, lengths in (
            ("running", self.running, self.running_tokens),
            ("waiting", self.waiting, self.waiting_tokens),
        ):
            if len(ids) != len(lengths):
                raise InvalidRequestError(
                    f"the snapshot of instance {self.instance} has {len(ids)} {name} trajectories "
                    f"and {len(lengths)} lengths: give one length for each"
                )
        if len(self.groups) not in (0, len(self.running)):
            raise InvalidRequestError(
                f"the snapshot of instance {self.instance} has {len(self.running)} running "
                f"trajectories and {len(self.groups)} groups: give one group for each, or none"
            )


@dataclass(slots=True, kw_only=True)
class InstanceLoad:
    """Load of an instance as a strategy expects it after its decisions so far."""

    index: int
    """Position in the order of instance ids: breaks ties."""
    instance: InstanceId
    version: int
    kv_budget: float
    """KV cache that the instance has (M in StaleFlow Eq. 3), in the unit of `kv_cache`."""
    kv_cache: float
    running: int
    """Number of running trajectories."""
    waiting: int
    """Number of trajectories in the engine's own queue."""

    def copy(self) -> "InstanceLoad":
        """An equal load that changes on its own."""
        return InstanceLoad(
            index=self.index,
            instance=self.instance,
            version=self.version,
            kv_budget=self.kv_budget,
            kv_cache=self.kv_cache,
            running=self.running,
            waiting=self.waiting,
        )

    @property
    def count(self) -> int:
        """Trajectories on the instance."""
        return self.running + self.waiting
