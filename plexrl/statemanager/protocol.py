"""What client and daemon say to each other over the Unix socket.

A message is a frame (`plexrl.wire.framing`). Descriptors follow their frame, each on a byte of its
own, and the frame says how many; so the stream stays in step whatever becomes of the request.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from plexrl.errors import ConnectionLostError, InvalidRequestError, PlexRLError, from_wire
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.keys import StatePart, StateSlice
from plexrl.statemanager.mapping import Region
from plexrl.statemanager.versions import Manifest
from plexrl.wire.framing import recv_frame, send_frame

DESCRIPTORS_MAX = 1024
"""Descriptors that one message may carry: a file of the host tier may hold 1 GiB and more."""

Answer = dict[str, Any]


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all requests. Tagged with the class name; `plexrl.statemanager.handlers` says which
    there are, and what comes of each."""


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
    """Bring version `seq` into the arena. One that has no memory is lent some: the answer says
    `segment_bytes`, and the segments' descriptors come along."""

    seq: int
    token: int


class Attach(Request, frozen=True, kw_only=True):
    """Lend the arena memory, which reads as zero; descriptors as for `Load`."""

    token: int


class Detach(Request, frozen=True, kw_only=True):
    """The arena's memory is unmapped, so others may have it."""


class Publish(Request, frozen=True, kw_only=True):
    """Store parameters and buffers as the published version `seq`."""

    seq: int
    token: int


class OpenPublished(Request, frozen=True, kw_only=True):
    """Where a published version's shards lie; held in place for the connection."""

    source: str
    seq: int


class OpenState(Request, frozen=True, kw_only=True):
    """Where a version's shards lie; held in place for the connection."""

    deployment: str
    seq: int
    rank: int | None = None
    """Absent: every rank that this node has."""


class Confirm(Request, frozen=True, kw_only=True):
    """Nothing: that it is answered says that what this connection opened was in place till now."""


class Adopt(Request, frozen=True, kw_only=True):
    """Store another node's version; descriptors of the files that hold it come along."""

    manifest: Manifest
    """With its digest."""
    regions: tuple[Region, ...]


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
    """One rank's part of a published version."""

    slices: tuple[StateSlice, ...]
    """`arena_offset` counts from the start of the data."""
    nbytes: int
    """Of the data."""
    regions: tuple[Region, ...]
    """All of the data, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """One rank's version."""

    manifest: Manifest
    """With its digest."""
    regions: tuple[Region, ...]
    """All of the data, in its order."""


def send_request(connection: socket.socket, request: Request, fds: Sequence[int] = ()) -> None:
    """Send one request."""
    _send(connection, {"request": msgspec.to_builtins(request)}, fds)


def recv_request(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next request, not yet decoded, and its descriptors, which the caller must close.

    Raises:
        ConnectionLostError: the client closed.
        PayloadTooLargeError: the client is beyond a bound; the connection cannot be used further.
    """
    header, fds = _recv(connection)
    return header.get("request"), fds


def send_answer(connection: socket.socket, answer: Answer, fds: Sequence[int] = ()) -> None:
    """Send what came of a request."""
    _send(connection, {"result": answer}, fds)


def send_error(connection: socket.socket, error: PlexRLError) -> None:
    """Send that a request was refused."""
    _send(connection, {"error": error.to_wire()}, ())


def recv_answer(connection: socket.socket) -> tuple[Answer, list[int]]:
    """The answer to the last request, and its descriptors, which the caller must close.

    Raises:
        PlexRLError: what the daemon raised.
        ConnectionLostError: the daemon closed.
    """
    header, fds = _recv(connection)
    if "error" in header:
        raise from_wire(header["error"])
    result: Answer = header["result"]
    return result, fds


def _send(connection: socket.socket, header: dict[str, Any], fds: Sequence[int]) -> None:
    send_frame(connection, {**header, "fds": len(fds)})
    for fd in fds:
        socket.send_fds(connection, [b"\0"], [fd])


def _recv(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    # Nothing bulky travels on this socket, so no message has a payload.
    header, _ = recv_frame(connection, payload_bytes_max=0)
    count = header.get("fds", 0)
    if not isinstance(count, int) or not 0 <= count <= DESCRIPTORS_MAX:
        raise ConnectionLostError(f"a message announced {count!r} descriptors")
    fds: list[int] = []
    try:
        for _ in range(count):
            _, received, _, _ = socket.recv_fds(connection, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not received:
                raise ConnectionLostError("the peer closed before its descriptors came")
            fds += received
    except BaseException:
        close_all(fds)
        raise
    return header, fds


def regions_of(regions: Sequence[Region], fds: Sequence[int]) -> list[Region]:
    """Regions off the wire, each with its descriptor instead of an index.

    Raises:
        InvalidRequestError: a descriptor did not come along.
    """
    if any(not 0 <= region.fd < len(fds) for region in regions):
        raise InvalidRequestError(f"a version needs its files' descriptors; {len(fds)} came")
    return [replace(region, fd=fds[region.fd]) for region in regions]


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        os.close(fd)
