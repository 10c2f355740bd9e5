"""Reports of the moves of a rank's state."""

from dataclasses import dataclass, field
from typing import Any

from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.transfer.pull import PullMode


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """Result of a move."""

    bytes_moved: int
    """0 for an unchanged version that was stored before."""
    seconds: float
    tier: str
    """Tier that holds the bytes: `host` or `nvme`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(MoveReport):
    """Result of a load."""

    parts: frozenset[StatePart] = frozenset()
    meta: dict[str, Any] = field(default_factory=dict)
    prefetched_bytes: int = 0
    """Bytes of `bytes_moved` that were copied before the load, during another rank's offload."""
    prefetch_s: float = 0.0
    """Duration of those copies until the load was requested; `seconds` begins after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullReport(MoveReport):
    """Result of a pull."""

    bytes_wanted: int
    """Size of the target's slices; `bytes_moved` differs if a source was lost or a delta was
    used."""
    bytes_by_source: dict[str, int]
    attempts: int
    mode: PullMode = PullMode.FULL
    bytes_replicated: int = 0
    """Bytes that this node's StateManager fetched for this pull and those of other ranks."""
    transfer_s: float = 0.0
    """Duration of the fetch of the replica that was read; 0: none was."""

    @property
    def fraction(self) -> float:
        """`bytes_moved / bytes_wanted`."""
        return self.bytes_moved / self.bytes_wanted if self.bytes_wanted else 1.0
