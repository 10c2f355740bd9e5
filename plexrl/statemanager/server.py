"""The StateManager's socket: one thread a connection, blocking, so that a call costs a few µs.

A connection belongs to one rank of one deployment and can move only that rank's state.
"""

import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from plexrl.errors import (
    ConnectionLostError,
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StaleTokenError,
)
from plexrl.statemanager.arena import resident_bytes
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.keys import StatePart, StateSlice
from plexrl.statemanager.store import Store
from plexrl.statemanager.tier import Bytes, scatter
from plexrl.statemanager.versions import Manifest, VersionKind, lay_out, slices_in_file
from plexrl.wire.framing import recv_frame, send_frame

LOG = logging.getLogger(__name__)

CONNECTIONS_MAX = 1024
_CREDENTIALS = struct.Struct("3i")
Answer = dict[str, Any]


@dataclass(slots=True)
class _Registration:
    deployment: str
    rank: int
    world_size: int
    group: str
    slices: tuple[StateSlice, ...]
    memory: mmap.mmap
    fd: int

    @property
    def bytes(self) -> Bytes:
        return np.frombuffer(self.memory, dtype=np.uint8)


class Server:
    """Answers workers until closed."""

    def __init__(self, config: StateManagerConfig, store: Store) -> None:
        self._config = config
        self._store = store
        self._lock = threading.Lock()
        self._tokens: dict[str, int] = {}
        self._arenas: dict[tuple[str, int], _Registration] = {}
        self._slots = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(config.listen)
        self._socket.listen(128)

    def serve(self) -> None:
        """Accept connections until `close`."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                LOG.warning("over %d connections; one refused", CONNECTIONS_MAX)
                connection.close()
                continue
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop accepting."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            LOG.debug("the socket was closed already: %s", error)
        self._socket.close()

    def _serve_one(self, connection: socket.socket) -> None:
        handler = _Connection(self, connection)
        try:
            _check_peer(connection)
            while True:
                header, _ = recv_frame(connection)
                send_frame(connection, handler.answer(header))
        except ConnectionLostError:
            LOG.debug("a client left")
        except PlexRLError as error:
            LOG.warning("a connection was refused: %s", error)
        except OSError as error:
            LOG.warning("a connection broke: %s", error)
        finally:
            handler.forget()
            connection.close()
            self._slots.release()

    def admit_token(self, group: str, token: int) -> None:
        """Refuse a former holder of a group's lock."""
        with self._lock:
            highest = self._tokens.get(group, 0)
            if token < highest:
                raise StaleTokenError(
                    f"token {token} of group {group!r} is stale, {highest} has been granted since: "
                    "the lock is another's, ask the scheduler again",
                    token=token,
                    highest=highest,
                )
            self._tokens[group] = token

    def add(self, registration: _Registration) -> None:
        """Take in an arena; a former one of the same rank is forgotten."""
        key = (registration.deployment, registration.rank)
        with self._lock:
            former = self._arenas.get(key)
            self._arenas[key] = registration
        if former is not None:
            os.close(former.fd)

    def remove(self, registration: _Registration) -> None:
        """Forget an arena, unless another has taken its place."""
        key = (registration.deployment, registration.rank)
        with self._lock:
            if self._arenas.get(key) is registration:
                del self._arenas[key]
                os.close(registration.fd)

    def release(self, deployment: str) -> None:
        """Drop all that is kept for a deployment."""
        self._store.drop(self._store.find(lambda m: m.deployment == deployment))

    def usage(self) -> Answer:
        """Who holds how much."""
        with self._lock:
            arenas = {key: resident_bytes(r.fd) for key, r in self._arenas.items()}
        deployments: dict[str, Answer] = {}
        for manifest in self._store.find(lambda _: True):
            entry = deployments.setdefault(manifest.deployment, {"versions": [], "arena_bytes": {}})
            entry["versions"].append(
                {
                    "rank": manifest.rank,
                    "seq": manifest.seq,
                    "kind": manifest.kind.value,
                    "nbytes": manifest.nbytes,
                }
            )
        for (deployment, rank), nbytes in arenas.items():
            entry = deployments.setdefault(deployment, {"versions": [], "arena_bytes": {}})
            entry["arena_bytes"][str(rank)] = nbytes
        return {
            "node": self._config.node,
            "host_bytes": self._store.used_bytes("host"),
            "host_bytes_max": self._config.host_bytes,
            "nvme_bytes": self._store.used_bytes("nvme"),
            "nvme_bytes_max": self._config.nvme_bytes,
            "deployments": deployments,
        }

    @property
    def store(self) -> Store:
        return self._store

    @property
    def published_versions(self) -> int:
        return self._config.published_versions


class _Connection:
    """One client."""

    def __init__(self, server: Server, connection: socket.socket) -> None:
        self._server = server
        self._socket = connection
        self._own: _Registration | None = None

    def answer(self, header: dict[str, Any]) -> Answer:
        """Carry out one request; a typed error becomes the answer."""
        methods: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "register": self._register,
            "offload": lambda h: self._save(h, discard=True),
            "snapshot": lambda h: self._save(h, discard=False),
            "load": self._load,
            "publish": self._publish,
            "open_published": self._open_published,
            "usage": lambda _: self._server.usage(),
            "release": self._release,
        }
        try:
            method = methods.get(str(header.get("method")))
            if method is None:
                raise InvalidRequestError(f"unknown method {header.get('method')!r}")
            return {"result": method(header)}
        except PlexRLError as error:
            return {"error": error.to_wire()}
        except (KeyError, TypeError, ValueError) as error:
            return {"error": InvalidRequestError(f"malformed request: {error!r}").to_wire()}

    def forget(self) -> None:
        """The client is gone."""
        if self._own is not None:
            self._server.remove(self._own)

    def _register(self, header: dict[str, Any]) -> Answer:
        # The descriptor follows the frame in any case, so it is taken before anything can fail.
        _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
        if len(fds) != 1:
            raise InvalidRequestError("register needs the arena's descriptor behind its frame")
        try:
            self._server.admit_token(header["group"], int(header["token"]))
            slices = msgspec.convert(header["slices"], tuple[StateSlice, ...])
            size = os.fstat(fds[0]).st_size
            end = max((piece.arena_offset + piece.nbytes for piece in slices), default=0)
            if end > size:
                raise InvalidRequestError(f"slices reach to byte {end} of an arena of {size}")
            registration = _Registration(
                deployment=header["deployment"],
                rank=int(header["rank"]),
                world_size=int(header["world_size"]),
                group=header["group"],
                slices=slices,
                memory=mmap.mmap(fds[0], size),
                fd=fds[0],
            )
        except BaseException:
            os.close(fds[0])
            raise
        self._server.add(registration)
        self._own = registration
        return {}

    def _save(self, header: dict[str, Any], *, discard: bool) -> Answer:
        own = self._registered(header)
        started = time.perf_counter()
        parts = frozenset(StatePart(part) for part in header["parts"])
        manifest = _manifest(own, VersionKind.STATE, header, parts)
        store = self._server.store
        tier = store.put(manifest, own.bytes, manifest.extents)
        keep = {manifest.seq, int(header["keep_seq"])}
        store.drop(
            store.find(lambda m: _same_shard(m, own, VersionKind.STATE) and m.seq not in keep)
        )
        if discard:
            own.memory.madvise(mmap.MADV_REMOVE)
        return _report(manifest.nbytes, started, tier)

    def _load(self, header: dict[str, Any]) -> Answer:
        own = self._registered(header)
        started = time.perf_counter()
        seq = int(header["seq"])
        what = f"version {seq} of {own.deployment!r} rank {own.rank}"
        name = _manifest(own, VersionKind.STATE, header, frozenset()).name
        with self._server.store.reading(name, what) as (manifest, tier):
            scatter(own.bytes, tier.read(manifest), manifest.extents)
            return {
                **_report(manifest.nbytes, started, tier.name),
                "parts": [part.value for part in manifest.parts],
                "meta": json.loads(manifest.meta_json),
            }

    def _publish(self, header: dict[str, Any]) -> Answer:
        own = self._registered(header)
        started = time.perf_counter()
        parts = frozenset({StatePart.PARAMETER, StatePart.BUFFER})
        manifest = _manifest(own, VersionKind.PUBLISHED, header, parts)
        store = self._server.store
        tier = store.put(manifest, own.bytes, manifest.extents)
        kept = sorted(
            store.find(lambda m: _same_shard(m, own, VersionKind.PUBLISHED)),
            key=lambda m: m.seq,
        )
        store.drop(kept[: -self._server.published_versions])
        return _report(manifest.nbytes, started, tier)

    def _open_published(self, header: dict[str, Any]) -> Answer:
        deployment, seq = header["source"], int(header["seq"])
        found = self._server.store.find(
            lambda m: (
                m.kind == VersionKind.PUBLISHED and m.deployment == deployment and m.seq == seq
            )
        )
        shards = []
        for manifest in found:
            what = f"published version {seq} of {deployment!r}"
            with self._server.store.reading(manifest.name, what) as (stored, tier):
                fd = tier.open(stored)
                try:
                    pieces = slices_in_file(stored)
                    send_frame(
                        self._socket,
                        {"shard": True, "nbytes": stored.nbytes},
                        msgspec.msgpack.encode(pieces),
                    )
                    socket.send_fds(self._socket, [b"\0"], [fd])
                finally:
                    os.close(fd)
            shards.append(manifest.rank)
        return {"shards": shards}

    def _release(self, header: dict[str, Any]) -> Answer:
        self._server.release(header["deployment"])
        return {}

    def _registered(self, header: dict[str, Any]) -> _Registration:
        if self._own is None:
            raise PermissionDeniedError("register an arena on this connection first")
        self._server.admit_token(self._own.group, int(header["token"]))
        return self._own


def _check_peer(connection: socket.socket) -> None:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (os.getuid(), 0):
        raise PermissionDeniedError(f"user {uid} is not the one this StateManager serves")


def _manifest(
    own: _Registration, kind: VersionKind, header: dict[str, Any], parts: frozenset[StatePart]
) -> Manifest:
    slices = tuple(piece for piece in own.slices if piece.key.part in parts)
    extents, nbytes = lay_out(slices)
    return Manifest(
        deployment=own.deployment,
        rank=own.rank,
        world_size=own.world_size,
        seq=int(header["seq"]),
        kind=kind,
        parts=tuple(sorted(parts)),
        meta_json=json.dumps(header.get("meta", {})),
        slices=slices,
        extents=extents,
        nbytes=nbytes,
    )


def _same_shard(manifest: Manifest, own: _Registration, kind: VersionKind) -> bool:
    return (manifest.deployment, manifest.rank, manifest.kind) == (own.deployment, own.rank, kind)


def _report(nbytes: int, started: float, tier: str) -> Answer:
    return {"bytes_moved": nbytes, "seconds": time.perf_counter() - started, "tier": tier}
