"""One client's connection as the daemon sees it: requests in, answers and descriptors out.

A connection belongs to the one rank that registered on it, and moves no other rank's state. One
that registered none is the node agent's, and may take whole versions over from another node.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec

from plexrl.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    PlexRLError,
    StateLostError,
)
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.fencing import Fencing
from plexrl.statemanager.keys import StatePart
from plexrl.statemanager.prefetch import Prefetcher
from plexrl.statemanager.protocol import (
    REQUESTS,
    Adopt,
    Answer,
    Load,
    OpenPublished,
    OpenState,
    Prefetch,
    Publish,
    PublishedShard,
    Register,
    Release,
    Request,
    Save,
    StoredShard,
    Usage,
    close_all,
)
from plexrl.statemanager.registry import Registration, Registry, check_slices
from plexrl.statemanager.residency import TierName
from plexrl.statemanager.store import Store, StoredVersion
from plexrl.statemanager.versions import Manifest, VersionKind, lay_out, slices_in_file

LOG = logging.getLogger(__name__)

PUBLISHED_PARTS = (StatePart.BUFFER, StatePart.PARAMETER)


class Session:
    """Carries out one connection's requests, one after the other."""

    def __init__(
        self,
        config: StateManagerConfig,
        store: Store,
        registry: Registry,
        fencing: Fencing,
        prefetcher: Prefetcher,
    ) -> None:
        self._config = config
        self._store = store
        self._registry = registry
        self._fencing = fencing
        self._prefetcher = prefetcher
        self._own: Registration | None = None
        self._leases = ExitStack()

    def answer(self, plain: Any, fds: Sequence[int]) -> tuple[Answer, list[int]]:
        """What comes of a request, and descriptors to send along; the caller closes those.

        The descriptors that came with the request are closed here.

        Raises:
            PlexRLError: the request is refused; nothing has changed.
        """
        try:
            try:
                request = REQUESTS.from_plain(plain)
            except (msgspec.ValidationError, AttributeError) as error:
                raise InvalidRequestError(f"malformed request: {error}") from error
            return self._dispatch(request, fds)
        except PlexRLError:
            raise
        except Exception as error:
            # A bug of ours must not leave this client without an answer or end the others' daemon.
            LOG.exception("a request failed")
            raise PlexRLError(
                f"the StateManager failed ({error!r}): see its log; the state stays where it was"
            ) from error
        finally:
            close_all(fds)

    def close(self) -> None:
        """The client is gone: forget its arena and let go of what it reads."""
        self._leases.close()
        if self._own is not None:
            self._registry.remove(self._own)

    def _dispatch(self, request: Request, fds: Sequence[int]) -> tuple[Answer, list[int]]:
        match request:
            case Register():
                return self._register(request, fds), []
            case Save():
                return self._save(request), []
            case Load():
                return self._load(request), []
            case Publish():
                return self._publish(request), []
            case OpenPublished():
                return self._open_published(request)
            case OpenState():
                return self._open_state(request)
            case Adopt():
                return self._adopt(request, fds), []
            case Prefetch():
                self._prefetcher.hint(request.deployment, request.seq)
                return {}, []
            case Usage():
                return self._usage(), []
            case Release():
                self._registry.remove_deployment(request.deployment)
                versions = self._store.find(lambda m: m.deployment == request.deployment)
                self._store.drop(_names(versions))
                return {}, []
            case _:
                raise InvalidRequestError(f"unknown request {type(request).__name__}")

    def _register(self, request: Register, fds: Sequence[int]) -> Answer:
        if len(fds) != 1:
            raise InvalidRequestError(f"register needs the arena's descriptor; {len(fds)} came")
        check_slices(request.slices, os.fstat(fds[0]).st_size)
        self._fencing.admit(request.group, request.token)
        registration = Registration(
            deployment=request.deployment,
            rank=request.rank,
            world_size=request.world_size,
            group=request.group,
            slices=request.slices,
            fd=os.dup(fds[0]),
        )
        former, self._own = self._own, registration
        self._registry.add(registration)
        if former is not None:
            self._registry.remove(former)
        return {}

    def _save(self, request: Save) -> Answer:
        own = self._registered()
        started = time.perf_counter()
        with own.moving() as arena_fd:
            self._fencing.admit(own.group, request.token)
            manifest = _manifest(
                own, VersionKind.STATE, request.seq, request.parts, request.meta_json
            )
            keep = {request.seq, request.keep_seq}
            found = self._versions(own, VersionKind.STATE)
            superseded = _names(v for v in found if v.manifest.seq not in keep)
            stored = _unchanged(manifest, request.same_as, found)
            moved = 0
            if stored is None:
                stored = self._store.put(manifest, arena_fd, superseded)
                moved = manifest.nbytes
            else:
                self._store.touch(manifest.name)
            self._store.drop(superseded)
            return {**_report(moved, started, stored.tier), "stamp": stored.manifest.stamp}

    def _load(self, request: Load) -> Answer:
        own = self._registered()
        started = time.perf_counter()
        with own.moving() as arena_fd:
            self._fencing.admit(own.group, request.token)
            wanted = _manifest(own, VersionKind.STATE, request.seq, (), "")
            with self._store.lease(wanted.name, wanted.description) as lease:
                manifest = lease.file.manifest
                _check_fits(manifest, own)
                lease.read(arena_fd, manifest.extents)
                return {
                    **_report(manifest.nbytes, started, lease.tier.name),
                    "parts": [part.value for part in manifest.parts],
                    "meta": json.loads(manifest.meta_json),
                    "stamp": manifest.stamp,
                }

    def _publish(self, request: Publish) -> Answer:
        own = self._registered()
        started = time.perf_counter()
        with own.moving() as arena_fd:
            self._fencing.admit(own.group, request.token)
            kind = VersionKind.PUBLISHED
            manifest = _manifest(own, kind, request.seq, PUBLISHED_PARTS, "{}")
            others = sorted(
                (v for v in self._versions(own, kind) if v.manifest.seq != request.seq),
                key=lambda version: version.manifest.seq,
            )
            surplus = max(0, len(others) + 1 - self._config.published_versions)
            superseded = _names(others[:surplus])
            stored = self._store.put(manifest, arena_fd, superseded)
            self._store.drop(superseded)
            return _report(manifest.nbytes, started, stored.tier)

    def _open_published(self, request: OpenPublished) -> tuple[Answer, list[int]]:
        found = self._store.find(
            lambda m: (
                m.kind == VersionKind.PUBLISHED
                and m.deployment == request.source
                and m.seq == request.seq
            )
        )
        shards: list[PublishedShard] = []
        fds: list[int] = []
        try:
            for version in found:
                # The mapping of a file on NVMe could not be verified, so it comes to memory first.
                manifest = version.manifest
                lease = self._leases.enter_context(
                    self._store.lease_in_memory(manifest.name, manifest.description)
                )
                fds.append(os.dup(lease.fd))
                shards.append(
                    PublishedShard(
                        slices=slices_in_file(lease.file.manifest, lease.file.data_offset),
                        file_bytes=lease.file.data_offset + lease.file.manifest.nbytes,
                    )
                )
        except BaseException:
            close_all(fds)
            raise
        return {"shards": msgspec.to_builtins(shards)}, fds

    def _open_state(self, request: OpenState) -> tuple[Answer, list[int]]:
        self._check_is_agent()
        found = self._store.find(
            lambda m: (
                m.kind == VersionKind.STATE
                and m.deployment == request.deployment
                and m.seq == request.seq
                and request.rank in (None, m.rank)
            )
        )
        if not found:
            raise StateLostError(
                f"version {request.seq} of {request.deployment!r} is not on this node: restore a "
                "checkpoint",
                deployment=request.deployment,
                seq=request.seq,
            )
        shards: list[StoredShard] = []
        fds: list[int] = []
        try:
            for version in found:
                manifest = version.manifest
                lease = self._leases.enter_context(
                    self._store.lease(manifest.name, manifest.description)
                )
                manifest = replace(lease.file.manifest, digest=lease.digest())
                shards.append(StoredShard(manifest=manifest, data_offset=lease.file.data_offset))
                fds.append(os.dup(lease.fd))
        except BaseException:
            close_all(fds)
            raise
        return {"shards": msgspec.to_builtins(shards)}, fds

    def _adopt(self, request: Adopt, fds: Sequence[int]) -> Answer:
        self._check_is_agent()
        if len(fds) != 1:
            raise InvalidRequestError(f"adopt needs the version's descriptor; {len(fds)} came")
        started = time.perf_counter()
        manifest = request.manifest
        _check_adoptable(manifest)
        for stored in self._store.find(lambda m: m.name == manifest.name):
            if stored.manifest.stamp == manifest.stamp:
                return _report(0, started, stored.tier)
        stored = self._store.adopt(manifest, fds[0], request.data_offset)
        return _report(manifest.nbytes, started, stored.tier)

    def _usage(self) -> Answer:
        deployments: dict[str, Answer] = {}

        def entry(deployment: str) -> Answer:
            return deployments.setdefault(deployment, {"versions": [], "arena_bytes": {}})

        for version in self._store.find(lambda _: True):
            manifest = version.manifest
            entry(manifest.deployment)["versions"].append(
                {
                    "rank": manifest.rank,
                    "seq": manifest.seq,
                    "kind": manifest.kind.value,
                    "nbytes": manifest.nbytes,
                    "world_size": manifest.world_size,
                    "stamp": manifest.stamp,
                    "tier": version.tier.value,
                }
            )
        for (deployment, rank), nbytes in self._registry.resident_bytes().items():
            entry(deployment)["arena_bytes"][str(rank)] = nbytes
        return {
            "node": self._config.node,
            "host_bytes": self._store.used_bytes(TierName.HOST),
            "host_bytes_max": self._config.host_bytes,
            "nvme_bytes": self._store.used_bytes(TierName.NVME),
            "nvme_bytes_max": self._config.nvme_bytes,
            "deployments": deployments,
        }

    def _registered(self) -> Registration:
        if self._own is None:
            raise PermissionDeniedError("register an arena on this connection first")
        return self._own

    def _check_is_agent(self) -> None:
        if self._own is not None:
            raise PermissionDeniedError(
                f"this connection is rank {self._own.rank}'s of {self._own.deployment!r}: only the "
                "node agent moves versions between nodes"
            )

    def _versions(self, own: Registration, kind: VersionKind) -> list[StoredVersion]:
        return self._store.find(lambda m: (m.deployment, m.rank) == own.shard and m.kind == kind)


def _manifest(
    own: Registration,
    kind: VersionKind,
    seq: int,
    parts: Sequence[StatePart],
    meta_json: str,
) -> Manifest:
    slices = tuple(piece for piece in own.slices if piece.key.part in parts)
    extents, nbytes = lay_out(slices)
    return Manifest(
        deployment=own.deployment,
        rank=own.rank,
        world_size=own.world_size,
        seq=seq,
        kind=kind,
        parts=tuple(sorted(parts)),
        meta_json=meta_json,
        slices=slices,
        extents=extents,
        nbytes=nbytes,
    )


def _unchanged(
    manifest: Manifest, same_as: str | None, stored: Sequence[StoredVersion]
) -> StoredVersion | None:
    """The stored version that already is what `manifest` asks for, where there is one."""
    for version in stored:
        there = version.manifest
        if there.stamp == same_as and there.seq == manifest.seq:
            wanted = replace(
                manifest, ordinal=there.ordinal, stamp=there.stamp, digest=there.digest
            )
            return version if wanted == there else None
    return None


def _check_fits(manifest: Manifest, own: Registration) -> None:
    """A version goes back only to an arena laid out as the one it was taken from."""
    if not set(manifest.slices) <= set(own.slices):
        raise InvalidRequestError(
            f"{manifest.description} was taken from an arena of another layout: load it with the "
            "model and number of workers that it was saved with",
            deployment=manifest.deployment,
            seq=manifest.seq,
        )


def _check_adoptable(manifest: Manifest) -> None:
    """A version that comes from elsewhere is laid out as one of ours would be."""
    what = manifest.description
    if manifest.kind != VersionKind.STATE:
        raise InvalidRequestError(f"{what} cannot be adopted: publish it again instead")
    if not manifest.stamp or not 0 <= manifest.rank < manifest.world_size:
        raise InvalidRequestError(f"{what} has no stamp, or no rank of {manifest.world_size}")
    check_slices(manifest.slices, sys.maxsize)
    if lay_out(manifest.slices) != (manifest.extents, manifest.nbytes):
        raise InvalidRequestError(f"{what} is not laid out as its slices say")


def _report(nbytes: int, started: float, tier: TierName) -> Answer:
    return {
        "bytes_moved": nbytes,
        "seconds": time.perf_counter() - started,
        "tier": tier.value,
    }


def _names(versions: Iterable[StoredVersion]) -> list[str]:
    return [version.manifest.name for version in versions]
