"""Messages between client and daemon over the Unix socket (`plexrl.statemanager.protocol.channel`).

The first request of a connection is `Hello`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.layout.keys import StatePart, StateSlice
from plexrl.statemanager.layout.versions import Extent, Manifest, Section
from plexrl.wire.messages import SaveRequest

Answer = dict[str, Any]

PUBLISHED_PARTS = (StatePart.BUFFER, StatePart.PARAMETER)
"""Parts that `Publish` stores."""
Digest = Annotated[str, msgspec.Meta(max_length=64)]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all requests, tagged with the class name. `plexrl.statemanager.daemon.handlers` has a
    handler for each."""

    is_answered_plainly: ClassVar[bool] = False
    """Whether the answer never carries descriptors."""


class Hello(Request, frozen=True, kw_only=True):
    """Authenticate the client; must be the first request."""

    ticket: bytes
    """A ticket as in `plexrl.statemanager.protocol.tickets`."""


class Register(Request, frozen=True, kw_only=True):
    """Register a rank's arena on this connection.

    An arena that has memory is the one that this connection registered before, or the request
    carries its segments' descriptors, because the daemon that lent them has ended.
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
    """Index of the arena's device; ignored with a UUID."""
    device_uuid: str = ""
    """UUID of the arena's GPU, whose index may differ between processes."""
    segment_bytes: tuple[int, ...] = ()
    """Size of the segment behind each descriptor."""
    keeps_memory: bool = False
    """Whether memory lent to this connection's previous registration is kept for this one."""
    host_bytes: int = 0
    """Size of the rank's memory in the host tier; offsets of its slices begin at `host_start`."""
    host_held: int = 0
    """How many of the descriptors are host memory that the rank has mapped; they come last."""


class Save(Request, frozen=True, kw_only=True):
    """Store `parts` of the arena as the scheduler orders it."""

    is_answered_plainly: ClassVar[bool] = True
    order: SaveRequest
    parts: tuple[StatePart, ...]
    meta_json: str
    same_as: str | None
    """Stamp (ETag) of the stored version that the arena is known to equal; absent: none."""
    digests: dict[str, Digest] = {}
    """Digests of sections that were computed on the device, by share key."""

    @property
    def token(self) -> int:
        """Fencing token of the group lock."""
        return self.order.token


class ListReplicated(Request, frozen=True, kw_only=True):
    """List the sections of a version of `parts` that other ranks of this node hold too, and that
    are large enough for a digest. Answer: `sections`, each a `ReplicatedSection`."""

    is_answered_plainly: ClassVar[bool] = True
    parts: tuple[StatePart, ...]


class DeviceUse(msgspec.Struct, frozen=True, kw_only=True):
    """Device memory that a rank is going to use besides its arena. 0: unknown, or nothing."""

    working_bytes: int = 0
    """Memory that its framework will allocate."""
    base_bytes: int = 0
    """Size of the shared frozen weights that it borrows next (`BorrowBase`)."""
    base_content: str = ""
    """Their content, as in `BorrowBase`."""


class MakeRoom(Request, frozen=True, kw_only=True):
    """Have memory of a device freed that nobody uses, before a worker's framework allocates there
    and the worker can tell the size of its arena. Refused like a load if `nbytes` are not free."""

    is_answered_plainly: ClassVar[bool] = True
    device_uuid: str
    group: str
    token: int
    nbytes: int


class Load(Request, frozen=True, kw_only=True):
    """Load version `seq` into the arena. An arena without memory is lent some: the answer has
    `segment_bytes` and carries the segments' descriptors.

    A version that ranks of another layout saved is converted to this layout."""

    seq: int
    token: int
    previous_seq: int = 0
    """As in `SaveRequest`, like `base_seq`."""
    base_seq: int = 0
    use: DeviceUse = DeviceUse()


class Attach(Request, frozen=True, kw_only=True):
    """Lend the arena zeroed memory; descriptors as for `Load`."""

    token: int
    use: DeviceUse = DeviceUse()


class BorrowBase(Request, frozen=True, kw_only=True):
    """Lend frozen weights that the tenant's ranks with equal `content` share. Answer: `is_whole`
    (whether it is filled) and `segment_bytes`, and carries descriptors."""

    token: int
    content: str
    nbytes: int


class BaseIsWhole(Request, frozen=True, kw_only=True):
    """Report that the frozen weights of `BorrowBase` are filled; others may read them."""

    is_answered_plainly: ClassVar[bool] = True
    content: str
    nbytes: int


class ReturnBase(Request, frozen=True, kw_only=True):
    """Report that the frozen weights that this connection borrowed are unmapped."""

    is_answered_plainly: ClassVar[bool] = True


class Detach(Request, frozen=True, kw_only=True):
    """Return the arena's memory, which is unmapped."""

    is_answered_plainly: ClassVar[bool] = True


class Publish(Request, frozen=True, kw_only=True):
    """Store `PUBLISHED_PARTS` as the published version `seq`."""

    is_answered_plainly: ClassVar[bool] = True
    seq: int
    token: int
    digests: dict[str, Digest] = {}
    """As in `Save`."""


class OpenPublished(Request, frozen=True, kw_only=True):
    """Open a published version's shards; the connection holds them until it closes."""

    source: str
    seq: int
    known: tuple[str, ...] = ()
    """Digests of layouts that the client has cached."""


class Replicate(Request, frozen=True, kw_only=True):
    """Have a replica of a published version, if this node's ranks together pull more bytes than it
    has. Answered with `held`: whether there is one."""

    source: str
    seq: int
    addresses: tuple[str, ...]
    """Remote addresses of the StateManagers that hold the version."""
    nbytes: int
    """Bytes of it that the caller pulls."""


class ReplicaArrived(Request, frozen=True, kw_only=True):
    """Fetch a replica of a published version beside what goes on here; answered at once with
    `arrived`: whether there is nothing to wait for, because it is here, or there will be none."""

    source: str
    seq: int
    addresses: tuple[str, ...]
    """As in `Replicate`, like `nbytes`."""
    nbytes: int


class OpenState(Request, frozen=True, kw_only=True):
    """Open a state version's shards; the connection holds them until it closes."""

    deployment: str
    seq: int
    rank: int | None = None
    """Absent: every rank on this node."""


class Confirm(Request, frozen=True, kw_only=True):
    """Does nothing. A reply proves that this connection's leases were valid until now."""

    is_answered_plainly: ClassVar[bool] = True


class Adopt(Request, frozen=True, kw_only=True):
    """Store another daemon's version; carries descriptors of the files that hold it."""

    manifest: Manifest
    """The manifest, with its digest."""
    regions: tuple[Region, ...]


class Fetch(Request, frozen=True, kw_only=True):
    """Fetch and store another node's version; resumes an earlier transfer that was cut."""

    source: str
    """Remote address of that node's daemon."""
    deployment: str
    seq: int
    rank: int
    stamp: str


class Prefetch(Request, frozen=True, kw_only=True):
    """Prefetch version `seq` to the host tier if there is space; answered at once."""

    deployment: str
    seq: int
    next_use_s: float | None = None
    """Expected time until the load; absent: unknown."""
    sources: tuple[str, ...] = ()
    """If present, a published version that this node's ranks pull from these remote addresses: the
    node fetches a replica if that saves bytes."""


class Where(Request, frozen=True, kw_only=True):
    """Report changes of the tier of each deployment's newest state.

    The answer has `states`, and `life` and `serial` for the next request. It also has the bytes of
    the host tier that are ready for use, how many are to be made ready, and in `reasons` why the
    daemon is not healthy.
    """

    life: str = ""
    """`life` of the last answer: the daemon's run id. A restarted daemon reports all states."""
    since: int = 0
    """`serial` of the last answer."""


class Usage(Request, frozen=True, kw_only=True):
    """Report usage of tiers and devices."""

    is_answered_plainly: ClassVar[bool] = True


class Release(Request, frozen=True, kw_only=True):
    """Drop everything kept for a deployment."""

    deployment: str
    kept_ranks: tuple[int, ...] | None = None
    """If present, only the versions of other ranks are dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedSection:
    """A section that several ranks hold, and its place in the caller's arena."""

    section: Section
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedShard:
    """One rank's part of a published version."""

    rank: int
    stamp: str
    nbytes: int
    """Size of the data."""
    layout: str
    """Digest of the slices' columns."""
    slices: tuple[StateSlice, ...] | None
    """`arena_offset` is an offset in the data; absent: the client has cached the layout."""
    regions: tuple[Region, ...]
    """Regions of all the data, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One rank's version."""

    manifest: Manifest
    """The manifest, with its digest."""
    regions: tuple[Region, ...]
    """Regions of all the data, in order."""


def regions_of(regions: Sequence[Region], fds: Sequence[int]) -> list[Region]:
    """Received regions, with descriptors instead of indices.

    Raises:
        InvalidRequestError: a descriptor is missing.
    """
    if any(not 0 <= region.fd < len(fds) for region in regions):
        raise InvalidRequestError(
            f"regions refer to descriptors beyond the {len(fds)} sent: send one for each file"
        )
    return [replace(region, fd=fds[region.fd]) for region in regions]
