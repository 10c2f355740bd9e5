"""Configuration of the scheduler process."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError

PROCESS_SETTINGS = frozenset(
    {
        *("listen", "journal", "journal_bytes_max", "snapshot_events", "lease_s", "holder"),
        *("operator_key_digest", "tenants", "node_grace_s"),
    }
)
"""What a scheduler process is told for itself. All other settings are the core's: its decisions
follow from them, so they are journalled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Fixed for the life of a scheduler's process; the core reads all but `PROCESS_SETTINGS`."""

    listen: str
    """Unix socket path for routers and node agents."""
    journal: str
    """Path of an SQLite file, or the URL of a database: `postgresql://user@host/name`."""
    operator_key_digest: str
    """Hex SHA-256 of the operator's API key."""
    journal_bytes_max: int | None = None
    """Bound of an SQLite journal's file; absent: the disk's."""
    snapshot_events: int = 50_000
    """Events after which the state is written down, and what a restart replays at most, about."""
    lease_s: float = 3.0
    """Silence of the leading scheduler after which a standby takes over; long enough for a slow
    disk, short beside what clients wait."""
    holder: str = ""
    """Name under which this scheduler leads: stable over its restarts, for it takes over from
    itself at once, and no other's. Empty: made of the machine's name and `listen`."""
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
        counts = ("snapshot_operations", "launch_attempts", "residents_max", "history")
        for name in (*counts, "snapshot_events"):
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} must be at least 1")
        for name in ("lease_s", "node_grace_s", "burst_hold_s", "burst_max_s"):
            if not math.isfinite(getattr(self, name)):
                raise InvalidRequestError(f"{name} must be a finite number of seconds")
        if self.lease_s <= 0:
            raise InvalidRequestError("lease_s must be above 0")


def core_settings(config: SchedulerConfig) -> dict[str, Any]:
    """What the core's decisions follow from, as plain values."""
    plain: dict[str, Any] = msgspec.to_builtins(config)
    return {name: value for name, value in plain.items() if name not in PROCESS_SETTINGS}


def with_core_settings(config: SchedulerConfig, settings: Mapping[str, Any]) -> SchedulerConfig:
    """`config` with the core's part as `core_settings` wrote it down.

    A setting that this version does not know is passed over; one that was not yet known then stays
    as `config` has it.

    Raises:
        InvalidRequestError: a value that this version does not take.
    """
    hints = get_type_hints(SchedulerConfig)
    known = {field.name for field in fields(SchedulerConfig)} - PROCESS_SETTINGS
    try:
        changes = {
            name: msgspec.convert(value, hints[name])
            for name, value in settings.items()
            if name in known
        }
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the settings in the journal cannot be used: {error}") from error
    return replace(config, **changes)
