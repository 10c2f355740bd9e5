"""What a worker calls: blocking moves of its own state.

When a call returns, the tensors are where it says and safe to use (PlexRL §5.3). A daemon that was
restarted meanwhile is connected to again and told of the arena, and the request is repeated; every
request names its version, so repeating one changes nothing.
"""

import mmap
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plexrl.errors import ConnectionLostError, InvalidRequestError, UnavailableError, from_wire
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.boxes import Transfer, plan_pull
from plexrl.statemanager.keys import DTYPE_BYTES, StatePart, StateSlice
from plexrl.wire.framing import recv_frame, send_frame

RECONNECT_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a move did."""

    bytes_moved: int
    seconds: float
    tier: str
    """Where the bytes lie now (for a load: lay)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(MoveReport):
    """What a load brought."""

    parts: frozenset[StatePart] = frozenset()
    meta: dict[str, Any] = field(default_factory=dict)


class StateManagerClient:
    """One rank's connection to its node's StateManager. Not for use by several threads at once."""

    def __init__(
        self,
        socket_path: str,
        *,
        deployment: str,
        rank: int,
        world_size: int,
        timeout_s: float = 600.0,
    ) -> None:
        self._path = socket_path
        self._deployment = deployment
        self._rank = rank
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._socket: socket.socket | None = None
        self._arena: Arena | None = None
        self._registration: dict[str, Any] = {}

    def register(
        self, arena: Arena, slices: Sequence[StateSlice], *, group: str, token: int
    ) -> None:
        """Hand the arena to the daemon; replaces what this rank registered before.

        Raises:
            StaleTokenError: the group's lock has been granted to another since.
        """
        self._arena = arena
        self._registration = {
            "method": "register",
            "deployment": self._deployment,
            "rank": self._rank,
            "world_size": self._world_size,
            "group": group,
            "token": token,
            "slices": msgspec.to_builtins(tuple(slices)),
        }
        if self._socket is None:
            self._call({"method": "usage"})
        else:
            self._register_arena()

    def offload(
        self,
        *,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
    ) -> MoveReport:
        """Store `parts` as version `seq` and give the arena's memory back.

        Versions other than `seq` and `keep_seq` are dropped once this one is whole.

        Raises:
            StateTierFullError: no tier has room; the arena is as it was.
            StaleTokenError: the group's lock has been granted to another since.
        """
        return self._save("offload", seq, keep_seq, token, parts, meta)

    def snapshot(
        self,
        *,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None = None,
    ) -> MoveReport:
        """As `offload`, but the arena keeps its contents."""
        return self._save("snapshot", seq, keep_seq, token, parts, meta)

    def load(self, *, seq: int, token: int) -> LoadReport:
        """Bring version `seq` of this shard into the arena; it stays stored as well.

        Raises:
            StateLostError: there is no such version.
            CorruptStateError: it is damaged; the arena holds nothing of it.
            StaleTokenError: the group's lock has been granted to another since.
        """
        answer = self._call({"method": "load", "seq": seq, "token": token})
        return LoadReport(
            bytes_moved=answer["bytes_moved"],
            seconds=answer["seconds"],
            tier=answer["tier"],
            parts=frozenset(StatePart(part) for part in answer["parts"]),
            meta=answer["meta"],
        )

    def publish(self, *, seq: int, token: int) -> MoveReport:
        """Put this shard's parameters and buffers where other deployments can pull them."""
        answer = self._call({"method": "publish", "seq": seq, "token": token})
        return msgspec.convert(answer, MoveReport)

    def pull(
        self, *, sources: Sequence[str], source: str, seq: int, wants: Sequence[StateSlice]
    ) -> MoveReport:
        """Fill the wanted slices of the registered arena from a published version.

        Every byte that is wanted is copied once, and no other. `sources` are the sockets of the
        StateManagers that hold shards of it.

        Raises:
            StateLostError: the shards do not cover a wanted slice, or the version is gone.
        """
        if self._arena is None:
            raise InvalidRequestError("register an arena before pulling into it")
        started = time.perf_counter()
        shards: list[tuple[tuple[StateSlice, ...], npt.NDArray[np.uint8]]] = []
        for path in sources:
            shards += _open_published(path, source, seq, self._timeout_s)
        transfers = plan_pull(wants, [slices for slices, _ in shards])
        target = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        for transfer in transfers:
            _copy(transfer, shards[transfer.shard][1], target)
        return MoveReport(
            bytes_moved=sum(transfer.nbytes for transfer in transfers),
            seconds=time.perf_counter() - started,
            tier="host",
        )

    def usage(self) -> dict[str, Any]:
        """The node's tiers, versions and arenas, in bytes."""
        return self._call({"method": "usage"})

    def release(self, deployment: str) -> None:
        """Drop every version kept for a deployment."""
        self._call({"method": "release", "deployment": deployment})

    def close(self) -> None:
        """End the connection; the daemon forgets the arena, not the versions."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _save(
        self,
        method: str,
        seq: int,
        keep_seq: int,
        token: int,
        parts: frozenset[StatePart],
        meta: Mapping[str, object] | None,
    ) -> MoveReport:
        answer = self._call(
            {
                "method": method,
                "seq": seq,
                "keep_seq": keep_seq,
                "token": token,
                "parts": sorted(part.value for part in parts),
                "meta": dict(meta or {}),
            }
        )
        return msgspec.convert(answer, MoveReport)

    def _call(self, header: dict[str, Any]) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                connection = self._connected()
                send_frame(connection, header)
                return _result(connection)
            except (ConnectionLostError, OSError) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise UnavailableError(
                        f"the StateManager at {self._path} cannot be reached ({error}): see its log"
                    ) from error
                time.sleep(RECONNECT_S)

    def _connected(self) -> socket.socket:
        if self._socket is None:
            self._socket = _connect(self._path, self._timeout_s)
            if self._arena is not None:
                self._register_arena()
        return self._socket

    def _register_arena(self) -> None:
        assert self._socket is not None
        assert self._arena is not None
        send_frame(self._socket, self._registration)
        socket.send_fds(self._socket, [b"\0"], [self._arena.fd])
        _result(self._socket)


def _connect(path: str, timeout_s: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def _result(connection: socket.socket) -> dict[str, Any]:
    header, _ = recv_frame(connection)
    if "error" in header:
        raise from_wire(header["error"])
    result: dict[str, Any] = header["result"]
    return result


def _open_published(
    path: str, source: str, seq: int, timeout_s: float
) -> list[tuple[tuple[StateSlice, ...], npt.NDArray[np.uint8]]]:
    """The shards of a published version that the StateManager at `path` has, mapped."""
    shards: list[tuple[tuple[StateSlice, ...], npt.NDArray[np.uint8]]] = []
    with _connect(path, timeout_s) as connection:
        send_frame(connection, {"method": "open_published", "source": source, "seq": seq})
        while True:
            header, payload = recv_frame(connection)
            if "error" in header:
                raise from_wire(header["error"])
            if "shard" not in header:
                return shards
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            slices = msgspec.msgpack.decode(payload, type=tuple[StateSlice, ...])
            try:
                shards.append((slices, _map(fds[0], int(header["nbytes"]))))
            finally:
                os.close(fds[0])


def _map(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    if nbytes == 0:
        return np.empty(0, dtype=np.uint8)
    return np.frombuffer(mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ), dtype=np.uint8)


def _copy(transfer: Transfer, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]) -> None:
    """Copy one box between two row-major slices."""
    box = transfer.box
    views = []
    for piece, memory in ((transfer.source, source), (transfer.target, target)):
        flat = memory[piece.arena_offset : piece.arena_offset + piece.nbytes]
        # Elements are only moved, so an unsigned integer of their size stands for any dtype.
        whole = flat.view(f"u{DTYPE_BYTES[piece.dtype]}").reshape(piece.shape)
        window = tuple(
            slice(start - origin, start - origin + extent)
            for start, origin, extent in zip(box.offset, piece.offset, box.shape, strict=True)
        )
        views.append(whole[window])
    np.copyto(views[1], views[0])
