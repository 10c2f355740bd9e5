"""Transport to a StateManager on the same machine: its files are mapped."""

from collections.abc import Collection

import msgspec

from plexrl.errors import ConnectionLostError
from plexrl.statemanager.client.connection import connect, exchange
from plexrl.statemanager.layout.plan.columns import Layout
from plexrl.statemanager.protocol.channel import Channel, close_all
from plexrl.statemanager.protocol.messages import (
    Confirm,
    OpenPublished,
    PublishedShard,
    regions_of,
)
from plexrl.statemanager.transfer.copy.strided_copy import Bytes, Copier
from plexrl.statemanager.transfer.delta.delta import DeltaPolicy
from plexrl.statemanager.transfer.delta.stream import copy_changed
from plexrl.statemanager.transfer.transport.mapped_files import MappedData, MappedFiles
from plexrl.statemanager.transfer.transport.source import Arrived, LayoutOf, Shard, ShardCopies

BYTES_PER_S = 10e9
REQUEST_S = 1e-6


class SharedMemory:
    """Opens sources by the path of their Unix socket. One thread at a time."""

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
        self, address: str, deployment: str, seq: int, known: Collection[str]
    ) -> "SharedMemorySource":
        """As `Transport.open`."""
        connection = connect(address, self._timeout_s, self._ticket)
        try:
            request = OpenPublished(source=deployment, seq=seq, known=tuple(known))
            answer, fds = exchange(connection, request)
            try:
                offered = msgspec.convert(answer["shards"], tuple[PublishedShard, ...])
                placed = [regions_of(one.regions, fds) for one in offered]
                data = [MappedData.of(each, self._files.of(each)) for each in placed]
            finally:
                close_all(fds)
            shards = tuple(_shard(one, self._layout_of) for one in offered)
            return SharedMemorySource(address, connection, shards, data, self._copier)
        except BaseException:
            connection.close()
            raise

    def forget_unused(self) -> None:
        """Unmap files that no source used since the last call."""
        self._files.forget_unused()


class SharedMemorySource:
    """An `OpenSource` whose bytes are mapped into this process."""

    def __init__(
        self,
        address: str,
        connection: Channel,
        shards: tuple[Shard, ...],
        data: list[MappedData],
        copier: Copier,
    ) -> None:
        self.address = address
        self.shards = shards
        self.bytes_per_s = BYTES_PER_S
        self.request_s = REQUEST_S
        # A restarted daemon may have reused the memory, so bytes count only once confirmed.
        self.arrives_whole = False
        self._connection = connection
        self._data = data
        self._copier = copier

    def read(
        self,
        parts: tuple[ShardCopies, ...],
        target: Bytes,
        arrived: Arrived,
        delta: DeltaPolicy | None = None,
    ) -> None:
        """As `OpenSource.read`. A delta compares with the target's memory, not with the base."""
        if delta is not None and delta.only_where_quicker:
            delta = None
        whole = [part for part in parts if delta is None or part.base is None]
        jobs = [job for part in whole for job in self._data[part.shard].jobs(part.copies)]
        self._copier.copy(jobs, target)
        for part in whole:
            arrived(part.copies, part.copies.nbytes)
        for part in parts:
            if delta is not None and part.base is not None:
                moved = copy_changed(self._data[part.shard], part.copies, target, delta)
                arrived(part.copies, moved)

    def confirm(self) -> None:
        """As `OpenSource.confirm`."""
        exchange(self._connection, Confirm())

    def close(self) -> None:
        """As `OpenSource.close`."""
        self._data = []
        self._connection.close()


def _shard(offered: PublishedShard, layout_of: LayoutOf) -> Shard:
    layout = layout_of(offered.layout) if offered.slices is None else Layout.of(offered.slices)
    if layout is None or layout.digest != offered.layout:
        raise ConnectionLostError("the source sent a layout with another digest")
    return Shard(rank=offered.rank, stamp=offered.stamp, layout=layout, nbytes=offered.nbytes)
