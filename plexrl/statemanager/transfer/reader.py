"""Readers of versions: in this daemon's store, in another daemon's memory, on another node."""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np

from plexrl.errors import ConnectionLostError, PlexRLError, UnavailableError
from plexrl.statemanager.checkpoint.requests import PinnedVersion, PinVersions
from plexrl.statemanager.client.connection import connect, exchange
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import slices_in_data
from plexrl.statemanager.layout.plan.columns import Ints
from plexrl.statemanager.layout.strided_copies import StridedCopies, cut_at, one_range
from plexrl.statemanager.protocol.address import host_and_port, nearest
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.messages import Confirm, regions_of
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind
from plexrl.statemanager.transfer.copy.data_plane import BLOCK_BYTES
from plexrl.statemanager.transfer.copy.file_memory import version_memory
from plexrl.statemanager.transfer.copy.mapped_memory import Region, address_of
from plexrl.statemanager.transfer.copy.strided_copy import Bytes, copy_strided
from plexrl.statemanager.transfer.transport.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.transfer.transport.tcp.state_client import RemoteShard, RemoteState

TIMEOUT_S = 30.0
"""Timeout of another StateManager's answer."""
BLOCKS_KEPT = 8
"""Cached blocks of a version on NVMe: neighbouring copies mostly need the same block."""


class VersionReader(Protocol):
    """One rank's version, which does not change while it is read. Thread-safe.

    Loads under another layout, checkpoints and other nodes all read through this protocol.
    """

    @property
    def manifest(self) -> Manifest: ...

    @property
    def slices(self) -> Sequence[StateSlice]:
        """The version's slices; `arena_offset` is an offset in the data."""
        ...

    @property
    def tier(self) -> TierName:
        """The tier that is read: NVMe only for a spilled version of this node."""
        ...

    @property
    def mapped(self) -> MappedData | None:
        """The data in this process's memory; absent where it is not mapped."""
        ...

    def read(self, copies: StridedCopies, target: Bytes) -> None:
        """Copy the ranges that `copies` names from the data to their offsets in `target`.

        Raises:
            CorruptStateError: the version is damaged.
            UnavailableError: the StateManager that holds it is gone.
        """
        ...

    def read_data(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the data from offset `start` on. Raises as `read`."""
        ...

    def confirm(self) -> None:
        """Return if the source held the version until now, so that what was read is valid.

        Raises:
            UnavailableError: it may not have.
        """
        ...


class LocalReader:
    """A version in this daemon's store: in its memory, or block by block from its NVMe."""

    def __init__(self, lease: Lease) -> None:
        """The caller owns the lease."""
        self.manifest = lease.manifest
        self.tier = lease.tier
        self._lease = lease
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`; computed at first use, so that opening is quick."""
        return slices_in_data(self.manifest)

    @cached_property
    def mapped(self) -> MappedData | None:
        """As `VersionReader.mapped`."""
        return self._lease.mapped()

    def read(self, copies: StridedCopies, target: Bytes) -> None:
        """As `VersionReader.read`."""
        if self.mapped is not None:
            for memory, job in self.mapped.jobs(copies):
                copy_strided(memory, target, job)
            return
        edges = self._edges
        cut, homes = cut_at(copies, edges)
        for home in np.unique(homes).tolist():
            block = self._block(int(edges[home]), self._ends[home])
            copy_strided(block, target, cut.chosen(homes == home).moved(-int(edges[home])))

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`."""
        self._lease.read_data(start, buffer)

    def confirm(self) -> None:
        """As `VersionReader.confirm`; the lease holds the version."""

    @cached_property
    def _edges(self) -> Ints:
        """Offsets at which verified blocks begin; the blocks of a section start at its start."""
        starts = [
            at
            for section in self.manifest.sections
            for at in range(section.start, section.start + section.nbytes, BLOCK_BYTES)
        ]
        return np.array(starts, dtype=np.int64)

    @cached_property
    def _ends(self) -> list[int]:
        return [
            min(at + BLOCK_BYTES, section.start + section.nbytes)
            for section in self.manifest.sections
            for at in range(section.start, section.start + section.nbytes, BLOCK_BYTES)
        ]

    def _block(self, start: int, end: int) -> Bytes:
        with self._lock:
            block = self._blocks.get(start)
            if block is None:
                memory = bytearray(end - start)
                self._lease.read_data(start, memoryview(memory))
                block = self._blocks[start] = np.frombuffer(memory, dtype=np.uint8)
                if len(self._blocks) > BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(start)
            return block


class NeighbourReader:
    """A version in the host tier of another daemon on this machine."""

    tier = TierName.HOST

    def __init__(
        self,
        manifest: Manifest,
        regions: Sequence[Region],
        files: MappedFiles,
        connection: Channel,
    ) -> None:
        """The caller owns the regions' descriptors, and the connection that holds the version."""
        self.manifest = manifest
        self._regions = regions
        self._files = files
        self._memory = version_memory(regions, manifest.description)
        self._connection = connection

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`."""
        return slices_in_data(self.manifest)

    @cached_property
    def mapped(self) -> MappedData:
        """As `VersionReader.mapped`; the first use is by one thread."""
        try:
            return MappedData.of(self._regions, self._files.of(self._regions))
        except OSError as error:
            raise UnavailableError(
                f"{self.manifest.description} of another StateManager cannot be mapped ({error}): "
                "free some memory and try again"
            ) from error

    def read(self, copies: StridedCopies, target: Bytes) -> None:
        """As `VersionReader.read`."""
        for memory, job in self.mapped.jobs(copies):
            copy_strided(memory, target, job)

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`, without mapping the files."""
        self._memory.read([Run(offset=start, address=address_of(buffer), nbytes=len(buffer))])

    def confirm(self) -> None:
        """As `VersionReader.confirm`: a restarted daemon may have reused the memory."""
        try:
            exchange(self._connection, Confirm())
        except (ConnectionLostError, OSError) as error:
            raise _gone(self.manifest, error) from error


class RemoteReader:
    """A version on another node, over TCP; every answer's checksum is verified."""

    tier = TierName.HOST
    mapped = None

    def __init__(self, shard: RemoteShard, state: RemoteState, lock: threading.Lock) -> None:
        """The caller owns the connection. Readers with the same lock share it."""
        self.manifest = shard.manifest
        self._shard = shard
        self._state = state
        self._lock = lock

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `VersionReader.slices`."""
        return slices_in_data(self.manifest)

    def read(self, copies: StridedCopies, target: Bytes) -> None:
        """As `VersionReader.read`."""
        try:
            with self._lock:
                self._state.read(self._shard, copies, target, verify=True)
        except (ConnectionLostError, OSError) as error:
            raise _gone(self.manifest, error) from error

    def read_data(self, start: int, buffer: memoryview) -> None:
        """As `VersionReader.read_data`."""
        self.read(one_range(start, len(buffer)), np.frombuffer(buffer, dtype=np.uint8))

    def confirm(self) -> None:
        """As `VersionReader.confirm`; the source held the version while it sent it."""


def open_here(held: ExitStack, store: Store, deployment: str, seq: int) -> list[VersionReader]:
    """Readers of the state versions in `store`, valid while `held` is open."""
    found = store.find(
        lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
    )
    return [
        LocalReader(held.enter_context(store.lease(v.manifest.name, v.manifest.description)))
        for v in found
    ]


def open_elsewhere(
    held: ExitStack, address: str, ticket: bytes, deployment: str, seq: int
) -> list[VersionReader]:
    """Readers of the state versions at another StateManager, valid while `held` is open.

    `address` is the path of its socket on this machine, or `tcp://host:port`. `ticket` is an
    agent's; on this machine it is shown only to daemons of this process's user, since a worker may
    have named the address.

    Raises:
        PermissionDeniedError: another user listens there.
        UnavailableError: the StateManager cannot be reached.
    """
    try:
        near = nearest(address)
        remote = host_and_port(near)
        if remote is not None:
            return _open_remote(held, remote, ticket, deployment, seq)
        return _open_neighbour(held, near, ticket, deployment, seq)
    except (ConnectionLostError, OSError) as error:
        raise UnavailableError(
            f"the StateManager at {address} cannot be reached ({error}): see its log",
            statemanager=address,
        ) from error


def _open_neighbour(
    held: ExitStack, path: str, ticket: bytes, deployment: str, seq: int
) -> list[VersionReader]:
    connection = held.enter_context(connect(path, TIMEOUT_S, ticket, of_user=os.getuid()))
    answer, fds = exchange(connection, PinVersions(deployment=deployment, seq=seq))
    held.callback(close_all, fds)
    files = MappedFiles()
    return [
        NeighbourReader(version.manifest, regions_of(version.regions, fds), files, connection)
        for version in msgspec.convert(answer["versions"], tuple[PinnedVersion, ...])
    ]


def _open_remote(
    held: ExitStack, address: str, ticket: bytes, deployment: str, seq: int
) -> list[VersionReader]:
    state = RemoteState(address, ticket, TIMEOUT_S)
    held.callback(state.close)
    lock = threading.Lock()
    return [RemoteReader(shard, state, lock) for shard in state.open(deployment, seq)]


def _gone(manifest: Manifest, error: Exception) -> PlexRLError:
    return UnavailableError(
        f"the StateManager that has {manifest.description} ended while it was read ({error}): try "
        "again"
    )
