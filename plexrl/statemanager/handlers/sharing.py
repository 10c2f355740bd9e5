"""Versions that others read, or that come from another node."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from plexrl.errors import InvalidRequestError, StateLostError
from plexrl.statemanager.handlers.caller import Caller, Reply, handles, move_report
from plexrl.statemanager.protocol import (
    Adopt,
    OpenPublished,
    OpenState,
    Prefetch,
    PublishedShard,
    StoredShard,
    close_all,
)
from plexrl.statemanager.registry import check_slices
from plexrl.statemanager.versions import Manifest, VersionKind, lay_out, slices_in_file


def _open_published(caller: Caller, request: OpenPublished, _: Sequence[int]) -> Reply:
    store = caller.services.store
    found = store.find(
        lambda m: (
            m.kind == VersionKind.PUBLISHED
            and m.deployment == request.source
            and m.seq == request.seq
        )
    )
    shards: list[PublishedShard] = []
    opened: list[int] = []
    try:
        for version in found:
            # The mapping of a file on NVMe could not be verified, so it comes to memory first.
            manifest = version.manifest
            lease = caller.leases.enter_context(
                store.lease_in_memory(manifest.name, manifest.description)
            )
            opened.append(os.dup(lease.fd))
            shards.append(
                PublishedShard(
                    slices=slices_in_file(lease.file.manifest, lease.file.data_offset),
                    file_bytes=lease.file.data_offset + lease.file.manifest.nbytes,
                )
            )
    except BaseException:
        close_all(opened)
        raise
    return Reply({"shards": msgspec.to_builtins(shards)}, opened)


def _open_state(caller: Caller, request: OpenState, _: Sequence[int]) -> Reply:
    caller.check_is_agent()
    store = caller.services.store
    found = store.find(
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
    opened: list[int] = []
    try:
        for version in found:
            manifest = version.manifest
            lease = caller.leases.enter_context(store.lease(manifest.name, manifest.description))
            manifest = replace(lease.file.manifest, digest=lease.digest())
            shards.append(StoredShard(manifest=manifest, data_offset=lease.file.data_offset))
            opened.append(os.dup(lease.fd))
    except BaseException:
        close_all(opened)
        raise
    return Reply({"shards": msgspec.to_builtins(shards)}, opened)


def _adopt(caller: Caller, request: Adopt, fds: Sequence[int]) -> Reply:
    caller.check_is_agent()
    if len(fds) != 1:
        raise InvalidRequestError(f"adopt needs the version's descriptor; {len(fds)} came")
    started = time.perf_counter()
    manifest = request.manifest
    _check_adoptable(manifest)
    store = caller.services.store
    for stored in store.find(lambda m: m.name == manifest.name):
        if stored.manifest.stamp == manifest.stamp:
            return Reply(move_report(0, time.perf_counter() - started, stored.tier))
    stored = store.adopt(manifest, fds[0], request.data_offset)
    return Reply(move_report(manifest.nbytes, time.perf_counter() - started, stored.tier))


def _prefetch(caller: Caller, request: Prefetch, _: Sequence[int]) -> Reply:
    caller.services.prefetcher.hint(request.deployment, request.seq)
    return Reply({})


ENTRIES = (
    handles(OpenPublished, _open_published),
    handles(OpenState, _open_state),
    handles(Adopt, _adopt),
    handles(Prefetch, _prefetch),
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
