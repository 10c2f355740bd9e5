"""What client and daemon say to each other over the Unix socket
(`plexrl.statemanager.protocol.channel`).

The first request of a connection is `Hello`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.store.versions.versions import Manifest
from plexrl.statemanager.transfer.copy.mapped_memory import Region

Answer = dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all requests. Tagged with the class name; `plexrl.statemanager.daemon.handlers` says
    which there are, and what comes of each."""

    is_answered_plainly: ClassVar[bool] = False
    """No descriptors ever come along with the answer."""


class Hello(Request, frozen=True, kw_only=True):
    """Say who asks; nothing else is answered before."""

    ticket: bytes
    """As `plexrl.statemanager.protocol.tickets` makes them."""


class Register(Request, frozen=True, kw_only=True):
    """Make this connection the rank's.

    An arena that has memory is either the one that this connection registered before, or it
    brings its segments' descriptors along, because the daemon that lent them is gone.
    """

    deployment: str
    rank: int
    world_size: int
    group: str
    token: int
    slices: tuple[StateSlice, ...]
    arena_bytes: int
    kind: DeviceKind
    device: int
    segment_bytes: tuple[int, ...] = ()
    """Of each descriptor that comes along."""
    keeps_memory: bool = False
    """What this connection's former registration was lent goes to this one."""
    host_bytes: int = 0
    """Of the rank's memory in the host tier, whose slices lie behind `host_start` of the arena."""
    host_held: int = 0
    """So many of the descriptors, the last ones, are of host memory that the rank has mapped."""


class Save(Request, frozen=True, kw_only=True):
    """Store `parts` of the arena as version `seq`."""

    is_answered_plainly: ClassVar[bool] = True
    seq: int
    keep_seq: int
    token: int
    parts: tuple[StatePart, ...]
    meta_json: str
    same_as: str | None
    """Stamp of the stored version that the arena is known to equal; absent: of none."""
    next_use_s: float | None = None
    """Until it is expected to be loaded again; absent: nobody knows."""
    previous_seq: int = 0
    """An earlier version, kept only while there is room; 0: none."""


class Load(Request, frozen=True, kw_only=True):
    """Bring version `seq` into the arena. One that has no memory is lent some: the answer says
    `segment_bytes`, and the segments' descriptors come along.

    A version that ranks of another layout saved is laid out anew; `sources` say which other
    StateManagers have pieces of it: paths of sockets, or `tcp://host:port`."""

    seq: int
    token: int
    sources: tuple[str, ...] = ()
    cast: bool = False
    """Whether elements may change their dtype."""
    previous_seq: int = 0
    """As of `Save`."""


class Attach(Request, frozen=True, kw_only=True):
    """Lend the arena memory, which reads as zero; descriptors as for `Load`."""

    token: int


class BorrowBase(Request, frozen=True, kw_only=True):
    """Lend memory that others of the tenant may have already, whose `content` is the same; the
    answer says whether it `is_whole`, and `segment_bytes`, and descriptors come along."""

    token: int
    content: str
    nbytes: int


class BaseIsWhole(Request, frozen=True, kw_only=True):
    """What was lent empty for `BorrowBase` is filled: others may read it."""

    is_answered_plainly: ClassVar[bool] = True
    content: str
    nbytes: int


class ReturnBase(Request, frozen=True, kw_only=True):
    """Any base that this connection borrowed is unmapped."""

    is_answered_plainly: ClassVar[bool] = True


class Detach(Request, frozen=True, kw_only=True):
    """The arena's memory is unmapped, so others may have it."""

    is_answered_plainly: ClassVar[bool] = True


class Publish(Request, frozen=True, kw_only=True):
    """Store parameters and buffers as the published version `seq`."""

    is_answered_plainly: ClassVar[bool] = True
    seq: int
    token: int


class OpenPublished(Request, frozen=True, kw_only=True):
    """Where a published version's shards lie; held in place for the connection."""

    source: str
    seq: int
    known: tuple[str, ...] = ()
    """Digests of layouts that need not be sent again."""


class OpenState(Request, frozen=True, kw_only=True):
    """Where a version's shards lie; held in place for the connection."""

    deployment: str
    seq: int
    rank: int | None = None
    """Absent: every rank that this node has."""


class Confirm(Request, frozen=True, kw_only=True):
    """Nothing: that it is answered says that what this connection opened was in place till now."""

    is_answered_plainly: ClassVar[bool] = True


class Adopt(Request, frozen=True, kw_only=True):
    """Store another node's version; descriptors of the files that hold it come along."""

    manifest: Manifest
    """With its digest."""
    regions: tuple[Region, ...]


class Fetch(Request, frozen=True, kw_only=True):
    """Store another node's version; what has arrived of it before is not asked for again."""

    source: str
    """`tcp://host:port` of that node's daemon."""
    deployment: str
    seq: int
    rank: int
    stamp: str


class Prefetch(Request, frozen=True, kw_only=True):
    """Bring version `seq` to the host tier soon, where there is room; answered at once."""

    deployment: str
    seq: int
    next_use_s: float | None = None
    """Until it is expected to be loaded; absent: nobody knows."""


class Where(Request, frozen=True, kw_only=True):
    """In which tier the newest state of each deployment lies, as far as that has changed.

    Answered by `life` and `serial`, to be given with the next one, and by `states`.
    """

    life: str = ""
    """Of the daemon that was asked last; another one answers all."""
    since: int = 0


class Usage(Request, frozen=True, kw_only=True):
    """Who holds how much."""

    is_answered_plainly: ClassVar[bool] = True


class Release(Request, frozen=True, kw_only=True):
    """Drop everything kept for a deployment."""

    deployment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedShard:
    """One rank's part of a published version."""

    rank: int
    stamp: str
    nbytes: int
    """Of the data."""
    layout: str
    """Digest of the slices' columns."""
    slices: tuple[StateSlice, ...] | None
    """`arena_offset` counts from the start of the data; absent: the client knows the layout."""
    regions: tuple[Region, ...]
    """All of the data, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One rank's version."""

    manifest: Manifest
    """With its digest."""
    regions: tuple[Region, ...]
    """All of the data, in its order."""


def regions_of(regions: Sequence[Region], fds: Sequence[int]) -> list[Region]:
    """Regions off the wire, each with its descriptor instead of an index.

    Raises:
        InvalidRequestError: a descriptor did not come along.
    """
    if any(not 0 <= region.fd < len(fds) for region in regions):
        raise InvalidRequestError(f"a version needs its files' descriptors; {len(fds)} came")
    return [replace(region, fd=fds[region.fd]) for region in regions]
