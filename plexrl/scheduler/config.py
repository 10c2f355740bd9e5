"""Configuration of the scheduler process."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fixed for the life of a journal's process; the core reads the policy part of it."""

    listen: str
    """Unix socket path for routers and node agents."""
    journal: str
    """Path of the SQLite journal."""
    operator_key_digest: str
    """Hex SHA-256 of the operator's API key."""
    journal_bytes_max: int | None = None
    """Bound of the journal's file; absent: the disk's."""
    policy: str = "pack"
    """Placement: `pack` shares training groups, `isolated` gives every deployment its own."""
    node_grace_s: float = 5.0
    """Silence of a node agent after which its node counts as lost."""
    snapshot_operations: int = 64
    """Mutations after which a WPG that no switch has offloaded is snapshotted: the most that a
    recovery replays."""
    burst_hold_s: float = 0.05
    """Longest that a group is held idle for the resident's next operation while others wait."""
    burst_max_s: float = 60.0
    """A burst that has lasted this long yields at its next operation boundary."""
    launch_attempts: int = 3
    """Launches in a row without a completed operation before a job is given up."""
    residents_max: int = 8
    """Most members of one node group."""
    pending_operations_max: int = 1024
    """Queue bound of one deployment."""
    history: int = 50_000
    """Finished operations remembered, with their results."""
    tenants: tuple[tuple[str, str], ...] = ()
    """(name, key digest) of tenants made at the first start."""

    def __post_init__(self) -> None:
        if self.policy not in ("pack", "isolated"):
            raise InvalidRequestError(f"policy {self.policy!r} is unknown: use pack or isolated")
        for name in ("snapshot_operations", "launch_attempts", "residents_max", "history"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
