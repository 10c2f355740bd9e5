"""Versions of ranks' state as a load under another layout reads them, wherever they lie."""

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
from plexrl.statemanager.layout.keys import StateSlice
from plexrl.statemanager.layout.layout import slices_in_data
from plexrl.statemanager.layout.plan.columns import Ints
from plexrl.statemanager.layout.strided_copies import Runs, cut_at
from plexrl.statemanager.protocol.address import host_and_port, nearest
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.messages import Confirm, regions_of
from plexrl.statemanager.store.store import Store
from plexrl.statemanager.store.versions.lease import Lease
from plexrl.statemanager.store.versions.versions import Manifest, VersionKind
from plexrl.statemanager.transfer.copy.data_plane import BLOCK_BYTES
from plexrl.statemanager.transfer.copy.strided_copy import Bytes, copy_runs
from plexrl.statemanager.transfer.transport.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.transfer.transport.tcp.state_client import RemoteShard, RemoteState

TIMEOUT_S = 30.0
"""Of another StateManager's answer."""
BLOCKS_KEPT = 8
"""Of a version on NVMe, while runs of it are read: neighbours mostly need the same one."""


class StateReader(Protocol):
    """One rank's version, which stays as it is while it is read. Thread-safe."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def slices(self) -> Sequence[StateSlice]:
        """`arena_offset` counts in the data."""
        ...

    @property
    def mapped(self) -> MappedData | None:
        """The data where this process sees it; absent where it does not."""
        ...

    @property
    def is_fast(self) -> bool:
        """Whether it does not lie on this node's NVMe."""
        ...

    def read(self, runs: Runs, target: Bytes) -> None:
        """Bring runs to their places in `target`.

        Raises:
            CorruptStateError: the version is damaged.
            UnavailableError: whoever has it is gone.
        """
        ...

    def confirm(self) -> None:
        """Return if what was read so far is the version. Raises UnavailableError: it may not be."""
        ...


class LocalReader:
    """A version of this daemon's store: in its memory, or block by block from its NVMe."""

    def __init__(self, lease: Lease) -> None:
        """The lease stays the caller's."""
        self.manifest = lease.manifest
        self.mapped = lease.mapped()
        self.is_fast = self.mapped is not None
        self._lease = lease
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, Bytes] = OrderedDict()

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `StateReader.slices`."""
        return slices_in_data(self.manifest)

    def read(self, runs: Runs, target: Bytes) -> None:
        """As `StateReader.read`."""
        if self.mapped is not None:
            for memory, job in self.mapped.jobs(runs):
                copy_runs(memory, target, job)
            return
        edges = self._edges
        cut, homes = cut_at(runs, edges)
        for home in np.unique(homes).tolist():
            block = self._block(int(edges[home]), self._ends[home])
            copy_runs(block, target, cut.chosen(homes == home).moved(-int(edges[home])))

    def confirm(self) -> None:
        """As `StateReader.confirm`; the lease has held it."""

    @cached_property
    def _edges(self) -> Ints:
        """Where blocks begin as they are verified: in each section from its start on."""
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

    def __init__(self, manifest: Manifest, mapped: MappedData, connection: Channel) -> None:
        """The connection that holds the version in place is the caller's."""
        self.manifest = manifest
        self.mapped: MappedData | None = mapped
        self._mapped = mapped
        self.is_fast = True
        self._connection = connection

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `StateReader.slices`."""
        return slices_in_data(self.manifest)

    def read(self, runs: Runs, target: Bytes) -> None:
        """As `StateReader.read`."""
        for memory, job in self._mapped.jobs(runs):
            copy_runs(memory, target, job)

    def confirm(self) -> None:
        """As `StateReader.confirm`: a daemon that came back may have used the memory anew."""
        try:
            exchange(self._connection, Confirm())
        except (ConnectionLostError, OSError) as error:
            raise _gone(self.manifest, error) from error


class RemoteReader:
    """A version on another node, over TCP; every answer's digest is checked."""

    def __init__(self, shard: RemoteShard, state: RemoteState, lock: threading.Lock) -> None:
        """The connection is the caller's, and shared with readers that have the same lock."""
        self.manifest = shard.manifest
        self.mapped: MappedData | None = None
        self.is_fast = True
        self._shard = shard
        self._state = state
        self._lock = lock

    @cached_property
    def slices(self) -> Sequence[StateSlice]:
        """As `StateReader.slices`."""
        return slices_in_data(self.manifest)

    def read(self, runs: Runs, target: Bytes) -> None:
        """As `StateReader.read`."""
        try:
            with self._lock:
                self._state.read(self._shard, runs, target, verify=True)
        except (ConnectionLostError, OSError) as error:
            raise _gone(self.manifest, error) from error

    def confirm(self) -> None:
        """As `StateReader.confirm`; the daemon itself held the version while it sent it."""


def open_here(held: ExitStack, store: Store, deployment: str, seq: int) -> list[LocalReader]:
    """Readers of the versions that `store` has, for as long as `held` is open."""
    found = store.find(
        lambda m: (m.deployment, m.seq, m.kind) == (deployment, seq, VersionKind.STATE)
    )
    return [
        LocalReader(held.enter_context(store.lease(v.manifest.name, v.manifest.description)))
        for v in found
    ]


def open_elsewhere(
    held: ExitStack, address: str, ticket: bytes, user: int, deployment: str, seq: int
) -> list[StateReader]:
    """Readers of the versions that the StateManager at `address` has: the path of its socket on
    this machine, or `tcp://host:port`.

    `ticket` is an agent's, and goes to no daemon on this machine that is not `user`'s.

    Raises:
        UnavailableError: it cannot be reached.
    """
    try:
        near = nearest(address)
        remote = host_and_port(near)
        if remote is not None:
            return _open_remote(held, remote, ticket, deployment, seq)
        return _open_neighbour(held, near, ticket, user, deployment, seq)
    except (ConnectionLostError, OSError) as error:
        raise UnavailableError(
            f"the StateManager at {address} cannot be reached ({error}): see its log",
            statemanager=address,
        ) from error


def _open_neighbour(
    held: ExitStack, path: str, ticket: bytes, user: int, deployment: str, seq: int
) -> list[StateReader]:
    connection = held.enter_context(connect(path, TIMEOUT_S, ticket, of_user=user))
    answer, fds = exchange(connection, PinVersions(deployment=deployment, seq=seq))
    try:
        files = MappedFiles()
        readers: list[StateReader] = []
        for version in msgspec.convert(answer["versions"], tuple[PinnedVersion, ...]):
            regions = regions_of(version.regions, fds)
            mapped = MappedData.of(regions, files.of(regions))
            readers.append(NeighbourReader(version.manifest, mapped, connection))
        return readers
    finally:
        close_all(fds)


def _open_remote(
    held: ExitStack, address: str, ticket: bytes, deployment: str, seq: int
) -> list[StateReader]:
    state = RemoteState(address, ticket, TIMEOUT_S)
    held.callback(state.close)
    lock = threading.Lock()
    return [RemoteReader(shard, state, lock) for shard in state.open(deployment, seq)]


def _gone(manifest: Manifest, error: Exception) -> PlexRLError:
    return UnavailableError(
        f"the StateManager that has {manifest.description} ended while it was read ({error}): load "
        "again"
    )
