"""What client and daemon say to each other over the Unix socket (`plexrl.statemanager.channel`).

The first request of a connection is `Hello`.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from plexrl.statemanager.keys import StatePart, StateSlice
from plexrl.statemanager.versions import Manifest

Answer = dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all requests. Tagged with the class name; `plexrl.statemanager.handlers` says which
    there are, and what comes of each."""


class Hello(Request, frozen=True, kw_only=True):
    """Say who asks; nothing else is answered before."""

    ticket: bytes
    """As `plexrl.statemanager.tickets` makes them."""


class Ping(Request, frozen=True, kw_only=True):
    """Nothing but an answer."""


class Register(Request, frozen=True, kw_only=True):
    """Make this connection the rank's; the arena's descriptor comes along."""

    deployment: str
    rank: int
    world_size: int
    group: str
    token: int
    slices: tuple[StateSlice, ...]


class Save(Request, frozen=True, kw_only=True):
    """Store `parts` of the arena as version `seq`."""

    seq: int
    keep_seq: int
    token: int
    parts: tuple[StatePart, ...]
    meta_json: str
    same_as: str | None
    """Stamp of the stored version that the arena is known to equal; absent: of none."""


class Load(Request, frozen=True, kw_only=True):
    """Bring version `seq` into the arena."""

    seq: int
    token: int


class Publish(Request, frozen=True, kw_only=True):
    """Store parameters and buffers as the published version `seq`."""

    seq: int
    token: int


class OpenPublished(Request, frozen=True, kw_only=True):
    """Descriptors of a published version's shards, one each; held in place for the connection."""

    source: str
    seq: int


class OpenState(Request, frozen=True, kw_only=True):
    """Descriptors of a version's files, one a rank; held in place for the connection."""

    deployment: str
    seq: int
    rank: int | None = None
    """Absent: every rank that this node has."""


class Adopt(Request, frozen=True, kw_only=True):
    """Store another node's version; the descriptor of a file that holds it comes along."""

    manifest: Manifest
    """With its digest."""
    data_offset: int
    """Where in the file the data begins."""


class Prefetch(Request, frozen=True, kw_only=True):
    """Bring version `seq` to the host tier soon, where there is room; answered at once."""

    deployment: str
    seq: int


class Usage(Request, frozen=True, kw_only=True):
    """Who holds how much."""


class Release(Request, frozen=True, kw_only=True):
    """Drop everything kept for a deployment."""

    deployment: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedShard:
    """One rank's part of a published version, in the file whose descriptor has the same index."""

    slices: tuple[StateSlice, ...]
    """`arena_offset` counts from the start of the file."""
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One rank's version, in the file whose descriptor has the same index."""

    manifest: Manifest
    """With its digest."""
    data_offset: int
