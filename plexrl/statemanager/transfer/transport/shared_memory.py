"""Transport to a StateManager on the same machine: its files are mapped."""

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

import msgspec

from plexrl.errors import UnavailableError
from plexrl.statemanager.bytes.file_data import FileData
from plexrl.statemanager.bytes.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.bytes.mapped_memory import Region
from plexrl.statemanager.bytes.strided_copy import Copier
from plexrl.statemanager.layout.plan.columns import Bytes, Layout
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.layout.versions import Manifest
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.connection import connect, exchange
from plexrl.statemanager.protocol.host_requests import PinVersions
from plexrl.statemanager.protocol.messages import (
    Confirm,
    OpenPublished,
    PublishedShard,
    StoredShard,
    regions_of,
)
from plexrl.statemanager.store.receiving.reader import (
    Arrived,
    Delta,
    HeldState,
    LayoutOf,
    offered_layout,
    while_there,
)
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.transfer.delta.stream import copy_changed

BYTES_PER_S = 10e9
REQUEST_S = 1e-6


class SharedMemory:
    """Opens published versions by the path of a Unix socket. One thread at a time."""

    def __init__(
        self, copier: Copier, layout_of: LayoutOf, ticket: bytes, timeout_s: float
    ) -> None:
        """`timeout_s` bounds each wait on a socket."""
        self._copier = copier
        self._layout_of = layout_of
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._files = MappedFiles()

    def open(
        self, held: ExitStack, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> "list[SharedMemoryReader]":
        """As `Transport.open`."""
        connection = held.enter_context(connect(address, self._timeout_s, self._ticket))
        request = OpenPublished(source=deployment, seq=seq, known=tuple(known))
        answer, fds = exchange(connection, request)
        try:
            found = []
            for shard in msgspec.convert(answer["shards"], tuple[PublishedShard, ...]):
                regions = regions_of(shard.regions, fds)
                data = MappedData.of(regions, self._files.of(regions))
                layout = offered_layout(shard.layout, shard.slices, self._layout_of)
                whole = SharedMemoryReader(
                    address=address,
                    rank=shard.rank,
                    stamp=shard.stamp,
                    layout=layout,
                    data=data,
                    copier=self._copier,
                    connection=connection,
                )
                found.append(whole)
            return found
        finally:
            close_all(fds)

    def forget_unused(self) -> None:
        """Unmap files that no reader used since the last call."""
        self._files.forget_unused()


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedMemoryReader:
    """A `VersionReader` of a published version. One thread at a time."""

    bytes_per_s = BYTES_PER_S
    request_s = REQUEST_S
    # A restarted daemon may have reused the memory, so bytes count only once confirmed.
    arrives_whole = False
    address: str
    rank: int
    stamp: str
    layout: Layout
    data: MappedData
    copier: Copier
    connection: Channel

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,
    ) -> None:
        """As `VersionReader.read`. A delta compares with the target's memory, not with the base."""
        if delta is None or delta.policy.only_where_quicker:
            self.copier.copy(self.data.jobs(copies), target)
            moved = copies.nbytes
        else:
            moved = copy_changed(self.data, copies, target, delta.policy)
        if arrived is not None:
            arrived(copies, moved)

    def confirm(self) -> None:
        """As `VersionReader.confirm`."""
        with while_there(self.address):
            exchange(self.connection, Confirm())


def open_neighbour(
    held: ExitStack, path: str, ticket: bytes, deployment: str, seq: int, timeout_s: float
) -> "list[NeighbourReader]":
    """Readers of the state versions at the daemon at `path`, which must be this process's user's.
    Raises as `connect`."""
    connection = held.enter_context(connect(path, timeout_s, ticket, of_user=os.getuid()))
    answer, fds = exchange(connection, PinVersions(deployment=deployment, seq=seq))
    held.callback(close_all, fds)
    files = MappedFiles()
    return [
        NeighbourReader(path, shard.manifest, regions_of(shard.regions, fds), files, connection)
        for shard in msgspec.convert(answer["versions"], tuple[StoredShard, ...])
    ]


class NeighbourReader(HeldState):
    """A `StateReader` of a version in the host tier of another daemon on this machine."""

    tier = TierName.HOST
    bytes_per_s = 8e9
    request_s = 0.0
    arrives_whole = False

    def __init__(
        self,
        address: str,
        manifest: Manifest,
        regions: Sequence[Region],
        files: MappedFiles,
        connection: Channel,
    ) -> None:
        """The caller owns the regions' descriptors, and the connection that holds the version."""
        super().__init__(manifest)
        self.address = address
        self._regions = regions
        self._files = files
        self._connection = connection
        self.read_data = FileData(regions, manifest.description).read_data

    @cached_property
    def mapped(self) -> MappedData:
        """As `StateReader.mapped`; the first use is by one thread."""
        try:
            return MappedData.of(self._regions, self._files.of(self._regions))
        except OSError as error:
            raise UnavailableError(
                f"{self.manifest.description} of another StateManager cannot be mapped ({error}): "
                "free some memory and try again"
            ) from error

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,  # noqa: ARG002
    ) -> None:
        """As `VersionReader.read`, of all bytes."""
        self.mapped.read(copies, target)
        if arrived is not None:
            arrived(copies, copies.nbytes)

    def confirm(self) -> None:
        """As `VersionReader.confirm`: a restarted daemon may have reused the memory."""
        with while_there(self.address):
            exchange(self._connection, Confirm())
