"""Requests of a worker that keeps its optimizer state in the host tier.

Offsets of slices in host memory start at `host_start`, after those of the arena.
"""

from enum import StrEnum
from typing import ClassVar

from plexrl.statemanager.layout.keys import StatePart
from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.statemanager.layout.versions import padded
from plexrl.statemanager.protocol.messages import Request
from plexrl.wire.messages import SaveRequest


class BorrowHost(Request, frozen=True, kw_only=True):
    """Lend host memory of the registered size. The answer carries two descriptors, one to read and
    one to write. Memory that was lent before is lent again, and `holds` says whether it has data.
    """

    token: int


class Returned(StrEnum):
    """The part of a rank's host memory that is no longer mapped."""

    ALL = "all"
    BASE = "base"
    """The memory of a version that was read; memory borrowed since is kept."""
    LOAN = "loan"
    """The borrowed memory; memory that is read from a version is kept."""


class ReturnHost(Request, frozen=True, kw_only=True):
    """Return host memory that is no longer mapped. With `ALL` a step that was begun ends."""

    what: Returned


class BeginStep(Request, frozen=True, kw_only=True):
    """Copy a version to host memory that the rank may write, for an optimizer step beside the
    group's holder. The answer has its `parts`, and carries two descriptors, one to read and one to
    write, of the memory of the arena's slices, and then of the host memory."""

    seq: int
    stamp: str
    """Stamp (ETag) of the version."""
    arena_bytes: int
    """Size of the memory for the slices of the arena."""


class SaveStep(Request, frozen=True, kw_only=True):
    """Store the memory of `BeginStep`, to which the rank can no longer write, as a version."""

    is_answered_plainly: ClassVar[bool] = True
    order: SaveRequest
    parts: tuple[StatePart, ...]


class UndoStep(Request, frozen=True, kw_only=True):
    """Drop the version that `SaveStep` stored: another rank stored none, so that nobody loads
    it."""

    is_answered_plainly: ClassVar[bool] = True
    seq: int
    stamp: str
    """Stamp (ETag) of the version."""


def host_start(arena_bytes: int) -> int:
    """First offset of slices in host memory, for an arena of that size."""
    return padded(arena_bytes, PAGE_BYTES)


class PinVersions(Request, frozen=True, kw_only=True):
    """Pin every rank's version until the connection closes; returns descriptors of their files."""

    deployment: str
    seq: int
