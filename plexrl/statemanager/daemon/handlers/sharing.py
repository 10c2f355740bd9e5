"""Versions that other processes read, or that this node takes from another node."""

import logging
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import msgspec

from plexrl.errors import InvalidRequestError, StateLostError, StorageError
from plexrl.statemanager.bytes.file_data import FileData
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.daemon.handlers.caller import (
    AGENTS,
    TICKETS,
    WORKERS,
    DaemonCaller,
    DaemonReply,
    handles,
    move_report,
)
from plexrl.statemanager.daemon.registry.registry import check_slices
from plexrl.statemanager.layout.layout import check_layout
from plexrl.statemanager.layout.versions import Manifest, VersionKind
from plexrl.statemanager.protocol.address import is_remote
from plexrl.statemanager.protocol.host_requests import PinVersions
from plexrl.statemanager.protocol.messages import (
    Adopt,
    Confirm,
    Fetch,
    OpenPublished,
    OpenState,
    Prefetch,
    PublishedShard,
    ReplicaArrived,
    Replicate,
    StoredShard,
    regions_of,
)
from plexrl.statemanager.protocol.tickets import AGENT
from plexrl.statemanager.store.store import Store, TieredVersion
from plexrl.statemanager.store.versions.leasing import lease_published, lease_states, offer
from plexrl.statemanager.transfer.transport.tcp.state import ReconnectingReader

LOG = logging.getLogger(__name__)


def _open_published(caller: DaemonCaller, request: OpenPublished, _: Sequence[int]) -> DaemonReply:
    caller.claims.check_may_pull(request.source)
    caller.count_open()
    files = _Files()
    shards = [
        PublishedShard(**offer(lease, request.known), regions=files.add(lease.regions))
        for lease in lease_published(caller.services.store, caller.leases, request)
    ]
    return DaemonReply({"shards": msgspec.to_builtins(shards)}, files.duplicates())


def _open_state(caller: DaemonCaller, request: OpenState, _: Sequence[int]) -> DaemonReply:
    leases = lease_states(
        *(caller.services.store, caller.leases, request.deployment, request.seq), rank=request.rank
    )
    if not leases:
        raise StateLostError(
            f"version {request.seq} of {request.deployment!r} is not on this node: restore a "
            "checkpoint",
            deployment=request.deployment,
            seq=request.seq,
        )
    files = _Files()
    shards = [
        StoredShard(
            manifest=replace(lease.manifest, digest=lease.digest()),
            regions=files.add(lease.regions),
        )
        for lease in leases
    ]
    return DaemonReply({"shards": msgspec.to_builtins(shards)}, files.duplicates())


def _pin(caller: DaemonCaller, request: PinVersions, _: Sequence[int]) -> DaemonReply:
    # The reader cannot verify data on NVMe, so a spilled version is loaded to memory first.
    leases = lease_states(
        *(caller.services.store, caller.leases, request.deployment, request.seq), in_memory=True
    )
    files = _Files()
    shards = [
        StoredShard(manifest=lease.manifest, regions=files.add(lease.regions)) for lease in leases
    ]
    return DaemonReply({"versions": msgspec.to_builtins(shards)}, files.duplicates())


def _adopt(caller: DaemonCaller, request: Adopt, fds: Sequence[int]) -> DaemonReply:
    started = time.perf_counter()
    manifest = request.manifest
    _check_adoptable(manifest)
    store = caller.services.store
    for stored in store.find(lambda m: m.name == manifest.name):
        if stored.manifest.stamp == manifest.stamp:
            return _moved(store, stored, 0, started)
    data = FileData(regions_of(request.regions, fds), manifest.description)
    return _moved(store, store.adopt(manifest, data), manifest.nbytes, started)


def _fetch(caller: DaemonCaller, request: Fetch, _: Sequence[int]) -> DaemonReply:
    started = time.perf_counter()
    if not is_remote(request.source):
        raise InvalidRequestError(
            f"a version is fetched from another node's address, not from {request.source}"
        )
    network, store = caller.services.network, caller.services.store
    wanted = (request.deployment, request.seq, request.rank, request.stamp)
    for stored in store.find(lambda m: (m.deployment, m.seq, m.rank, m.stamp) == wanted):
        return _moved(store, stored, 0, started)
    ticket = caller.services.key.mint(AGENT)
    with closing(ReconnectingReader(network, request.source, ticket, wanted)) as reader:
        manifest = reader.manifest
        _check_adoptable(manifest)
        if (manifest.deployment, manifest.seq, manifest.rank) != wanted[:3]:
            raise InvalidRequestError(f"{request.source} answered with {manifest.description}")
        version, moved = store.receive(manifest, reader.blocks, reader)
    return _moved(store, version, moved, started)


def _moved(store: Store, version: TieredVersion, nbytes: int, started: float) -> DaemonReply:
    """The answer to a migration, after which the other nodes forget the version. So it goes to NVMe
    first, where there is space: a power cut takes what is in host memory only."""
    try:
        store.allocator.copy_to_nvme(version.manifest.name)
    except StorageError as error:
        LOG.info("%s is in host memory only: %s", version.manifest.description, error)
    return DaemonReply(move_report(nbytes, time.perf_counter() - started, version.tier))


def _replicate(caller: DaemonCaller, request: Replicate, _: Sequence[int]) -> DaemonReply:
    claims, services = caller.claims, caller.services
    claims.check_may_pull(request.source)
    _check_remote(request.addresses)
    pulled = services.registry.note_pull(caller.registered(), request.source, request.nbytes)
    found = services.replicas.fetch(claims, request.source, request.seq, request.addresses, pulled)
    if found is None:
        return DaemonReply({"held": False, "bytes_moved": 0, "seconds": 0.0})
    return DaemonReply({"held": True, "bytes_moved": found.nbytes, "seconds": found.seconds})


def _replica_arrived(
    caller: DaemonCaller, request: ReplicaArrived, _: Sequence[int]
) -> DaemonReply:
    services = caller.services
    caller.claims.check_may_pull(request.source)
    _check_remote(request.addresses)
    pulled = services.registry.note_pull(caller.registered(), request.source, request.nbytes)
    place = (request.source, request.seq, request.addresses, pulled)
    return DaemonReply({"arrived": services.replicas.has_arrived(*place)})


def _confirm(_: DaemonCaller, __: Confirm, ___: Sequence[int]) -> DaemonReply:
    return DaemonReply({})


def _prefetch(caller: DaemonCaller, request: Prefetch, _: Sequence[int]) -> DaemonReply:
    if request.sources:
        pulled = caller.services.registry.bytes_pulled(request.deployment)
        caller.services.replicas.prefetch(request.deployment, request.seq, request.sources, pulled)
        return DaemonReply({})
    if request.next_use_s is not None:
        caller.services.store.expect_use_in(request.deployment, request.next_use_s)
    caller.services.prefetcher.hint(request.deployment, request.seq)
    return DaemonReply({})


ENTRIES = (
    handles(OpenPublished, _open_published, TICKETS, is_move=True),
    handles(Replicate, _replicate, WORKERS, is_move=True),
    handles(ReplicaArrived, _replica_arrived, WORKERS),
    handles(OpenState, _open_state, AGENTS, is_move=True),
    handles(PinVersions, _pin, AGENTS),
    handles(Confirm, _confirm, TICKETS),
    handles(Adopt, _adopt, AGENTS, is_move=True),
    handles(Fetch, _fetch, AGENTS, is_move=True),
    handles(Prefetch, _prefetch, AGENTS),
)


def _check_remote(addresses: Sequence[str]) -> None:
    if not all(map(is_remote, addresses)):
        raise InvalidRequestError("a replica is fetched from the remote addresses of other nodes")


def _check_adoptable(manifest: Manifest) -> None:
    """Refuse another node's version whose layout this store would not produce.

    Raises:
        InvalidRequestError: the manifest is not valid.
    """
    what = manifest.description
    if manifest.kind != VersionKind.STATE:
        raise InvalidRequestError(f"{what} cannot be adopted: publish it again")
    if not manifest.stamp or not 0 <= manifest.rank < manifest.world_size:
        raise InvalidRequestError(f"{what} has no stamp, or no rank of {manifest.world_size}")
    check_slices(manifest.slices, sys.maxsize)
    check_layout(manifest)


class _Files:
    """The distinct files of a reply."""

    def __init__(self) -> None:
        self._fds: dict[int, int] = {}

    def add(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """The regions, with an index instead of a descriptor, as they go over the wire."""
        return tuple(
            replace(region, fd=self._fds.setdefault(region.fd, len(self._fds)))
            for region in regions
        )

    def duplicates(self) -> list[int]:
        """Duplicates of the descriptors, in index order; the sender closes them."""
        return [os.dup(fd) for fd in self._fds]
