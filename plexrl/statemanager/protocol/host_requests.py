"""Requests of a worker that keeps its optimizer state in the host tier.

Offsets of slices in host memory start at `host_start`, after those of the arena.
"""

from enum import StrEnum

from plexrl.statemanager.layout.ranges import PAGE_BYTES
from plexrl.statemanager.layout.versions import padded
from plexrl.statemanager.protocol.messages import Request


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
    """Return host memory that is no longer mapped."""

    what: Returned


def host_start(arena_bytes: int) -> int:
    """First offset of slices in host memory, for an arena of that size."""
    return padded(arena_bytes, PAGE_BYTES)


class PinVersions(Request, frozen=True, kw_only=True):
    """Pin every rank's version until the connection closes; returns descriptors of their files."""

    deployment: str
    seq: int
