"""Requests of a worker that keeps its optimizer's state in the host tier.

Slices in host memory have places too: they count on from `host_start`, behind the arena's.
"""

from enum import StrEnum

from plexrl.statemanager.protocol.messages import Request
from plexrl.statemanager.store.versions.versions import padded
from plexrl.statemanager.transfer.copy.mapped_memory import PAGE_BYTES


class BorrowHost(Request, frozen=True, kw_only=True):
    """Lend memory of the host tier, of the size that was registered. Two descriptors come along,
    to read and to write with. What is lent already is lent again, with what it `holds`."""

    token: int


class Returned(StrEnum):
    """What of a rank's host memory is not mapped any more."""

    ALL = "all"
    BASE = "base"
    """What was read from a version; what was borrowed since is kept."""
    LOAN = "loan"
    """What was borrowed; what is read from a version is kept."""


class ReturnHost(Request, frozen=True, kw_only=True):
    """Others may have what is not mapped any more."""

    what: Returned


def host_start(arena_bytes: int) -> int:
    """Where places in host memory begin for an arena of that size."""
    return padded(arena_bytes, PAGE_BYTES)
