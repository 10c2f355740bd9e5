"""Entries of an admission pass: deployments, and queues that are opened when reached."""

from typing import Final, NamedTuple

import msgspec

from plexrl.ids import DeploymentId
from plexrl.scheduler.placement.waiting.waiting import Owner, QueueKey, Size, Sizes, Unit

OWNERS_AT_ONCE: Final = 256
"""Owners of a class that are opened between two points where a pass may be interrupted."""

SEARCH_STEPS: Final = 100
"""A search of groups and nodes costs as much as this many other steps of a pass."""

UNKNOWN: Final = 1 << 60
"""Candidates of a pass whose queues have changed while it was interrupted."""


class PriorityClass(msgspec.Struct, frozen=True, tag=True):
    """All owners of one priority, which are opened when the first is reached."""

    priority: int


class OwnerEntry(msgspec.Struct, frozen=True, tag=True):
    """All queues of one owner, which are opened when the owner is reached."""

    owner: Owner


class Closed(msgspec.Struct, frozen=True, tag=True):
    """All queues of one owner with the same sizes, which are opened when their first is reached."""

    is_blocking: bool
    """Whether these are blocking requests; otherwise indexes of heads."""
    sizes: Sizes
    owner: Owner
    first: tuple[float, float, int]
    """The last three criteria of the lowest key among them; that deployment may not fit."""


class IndexId(NamedTuple):
    """Identifies one index of queue heads."""

    sizes: Sizes
    owner: Owner
    key: QueueKey


Entry = PriorityClass | OwnerEntry | Closed | DeploymentId


def index_of(unit: Unit) -> IndexId:
    """The index that holds the unit's head."""
    return IndexId(unit.sizes, unit.owner, unit.queue_key)


def size_key(size: Size) -> str:
    """The key of `State.searches` for deployments of this size."""
    return f"{size.node_type}/{size.workers}"
