"""Moves of a WPG to other GPUs."""

from dataclasses import dataclass
from enum import StrEnum


class MoveCause(StrEnum):
    """Why a WPG is to move: the cause limits its destinations."""

    REPACK = "repack"
    """Only into a gap that pays."""
    RELIEF = "relief"
    """Only to where it waits less."""
    DRAIN = "drain"
    """Anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relocation:
    """A move to other GPUs that waits for an operation boundary."""

    reason: str
    cause: MoveCause = MoveCause.DRAIN


@dataclass(slots=True, kw_only=True)
class Moves:
    """A WPG's next move and its past ones."""

    planned: Relocation | None = None
    not_before: float = 0.0
    """After a move for which a node had no free memory; until then the WPG works where it is."""
    count: int = 0
    """Moves so far."""
    last_at: float | None = None
    last_reason: str = ""

    def plan(self, relocation: Relocation) -> None:
        """The WPG moves at its next operation boundary."""
        self.planned = relocation

    def cancel(self) -> None:
        """No move is planned."""
        self.planned = None

    def postpone(self, until: float) -> None:
        """The planned move found no free memory: none is planned until then."""
        self.planned = None
        self.not_before = until

    def done(self, reason: str, now: float) -> None:
        """The WPG has other GPUs."""
        self.count += 1
        self.last_at = now
        self.last_reason = reason

    def displaced(self, reason: str) -> None:
        """The WPG gave its GPUs back, and waits for others."""
        self.last_reason = reason
