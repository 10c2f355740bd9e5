"""Readers of ranks' state versions on another node, over TCP."""

import threading
import time
from contextlib import ExitStack

import msgspec
import numpy as np

from plexrl.errors import (
    ConnectionLostError,
    CorruptStateError,
    DeadlineExceededError,
    StateLostError,
    UnavailableError,
)
from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.strided.copies import StridedCopies, one_range
from plexrl.statemanager.layout.versions import Manifest, VersionKind, digest_of
from plexrl.statemanager.protocol.network import Network
from plexrl.statemanager.store.receiving.reader import Arrived, Delta, HeldState, while_there
from plexrl.statemanager.store.tiers.eviction.policy import TierName
from plexrl.statemanager.store.tiers.nvme import digests_bytes
from plexrl.statemanager.transfer.transport.tcp.client import BYTES_PER_S, Opened, TcpConnection

PATIENCE_S = 10.0
"""Timeout of a source that sends nothing."""
RECONNECT_S = 0.05


class _Offered(msgspec.Struct):
    manifest: Manifest
    blocks: tuple[bytes, ...]


class RemoteReader(HeldState):
    """A `StateReader` of a version on another node; every answer's checksum is verified."""

    tier = TierName.HOST
    mapped = None
    bytes_per_s = BYTES_PER_S
    request_s = 0.0
    arrives_whole = True

    def __init__(
        self, connection: TcpConnection, index: int, manifest: Manifest, blocks: tuple[bytes, ...]
    ) -> None:
        """The caller owns the connection."""
        super().__init__(manifest)
        self.address = connection.address
        self.blocks = blocks
        """Checksums of the version's blocks, by section, if requested."""
        self._connection = connection
        self._opened = Opened("read_state", index, manifest.stamp)

    def read(
        self,
        copies: StridedCopies,
        target: Bytes,
        arrived: Arrived | None = None,
        delta: Delta | None = None,  # noqa: ARG002
    ) -> None:
        """As `VersionReader.read`, of all bytes."""
        with while_there(self.address):
            self._connection.read(self._opened, copies, target, arrived, verify=True)

    def read_data(self, start: int, target: memoryview) -> None:
        """As `StateReader.read_data`."""
        self.read(one_range(start, len(target)), np.frombuffer(target, dtype=np.uint8))

    def read_unverified(self, start: int, target: memoryview) -> None:
        """As `read_data`, without a checksum. Raises as `TcpConnection.read`."""
        copies = one_range(start, len(target))
        self._connection.read(self._opened, copies, np.frombuffer(target, dtype=np.uint8))

    def confirm(self) -> None:
        """As `VersionReader.confirm`; the source held the version while it sent it."""


def open_states(
    connection: TcpConnection,
    deployment: str,
    seq: int,
    *,
    rank: int | None = None,
    digests: bool = False,
    kind: VersionKind = VersionKind.STATE,
) -> list[RemoteReader]:
    """Open every rank's version, or one rank's; they are held until the next call, or until the
    connection closes.

    Raises:
        PermissionDeniedError: the ticket is of another deployment's worker.
        ConnectionLostError: the server closed.
    """
    request = {"type": "open_state", "deployment": deployment, "seq": seq, "digests": digests}
    if rank is not None:
        request["rank"] = rank
    if kind != VersionKind.STATE:
        request["kind"] = kind.value
    offered = msgspec.convert(connection.ask(request)["shards"], list[_Offered])
    return [
        RemoteReader(connection, index, one.manifest, one.blocks)
        for index, one in enumerate(offered)
    ]


class ReconnectingReader:
    """Reads one remote version, unverified; reconnects if necessary. Thread-safe."""

    def __init__(
        self,
        network: Network,
        address: str,
        ticket: bytes,
        wanted: tuple[str, int, int, str],
        kind: VersionKind = VersionKind.STATE,
    ) -> None:
        """`wanted` is the version's deployment, seq, rank and stamp.

        Raises:
            UnavailableError: nothing listens there.
            StateLostError: it has no such version with that stamp.
            CorruptStateError: the version or its description is damaged.
        """
        self._network = network
        self._address = address
        self._ticket = ticket
        self._wanted = wanted
        self._kind = kind
        self._lock = threading.Lock()
        self._held = ExitStack()
        self._reader: RemoteReader | None = None
        self._given_at = time.monotonic()
        while self._reader is None:
            try:
                self._reader = self._opened(digests=True)
            except (ConnectionLostError, OSError) as error:
                self._cut(error)
        self.manifest, self.blocks = self._reader.manifest, self._reader.blocks
        self._check()

    def read_data(self, start: int, target: memoryview) -> None:
        """Fill `target` with the data from offset `start` on.

        Raises:
            UnavailableError: the source is gone.
            StateLostError: it no longer has the version.
        """
        with self._lock:
            while True:
                try:
                    if self._reader is None:
                        self._reader = self._opened(digests=False)
                    self._reader.read_unverified(start, target)
                except (ConnectionLostError, DeadlineExceededError, OSError) as error:
                    self._cut(error)
                else:
                    self._given_at = time.monotonic()
                    return

    def close(self) -> None:
        """Release the version."""
        self._reader = None
        self._held.close()

    def _opened(self, *, digests: bool) -> RemoteReader:
        deployment, seq, rank, stamp = self._wanted
        connection = TcpConnection(self._network, self._address, self._ticket, PATIENCE_S)
        self._held.callback(connection.close)
        for reader in open_states(
            connection, deployment, seq, rank=rank, digests=digests, kind=self._kind
        ):
            if reader.stamp == stamp:
                return reader
        raise StateLostError(
            f"version {seq} of {deployment!r} rank {rank} is no longer at {self._address}: "
            "migrate again",
            deployment=deployment,
            seq=seq,
        )

    def _cut(self, error: Exception) -> None:
        self.close()
        if time.monotonic() - self._given_at > PATIENCE_S:
            raise UnavailableError(
                f"the StateManager at {self._address} cannot be reached ({error}): see its log",
                statemanager=self._address,
            ) from error
        time.sleep(RECONNECT_S)

    def _check(self) -> None:
        sizes = [digests_bytes(section.nbytes) for section in self.manifest.sections]
        have = [len(block) for block in self.blocks]
        if have != sizes or digest_of(self.blocks) != self.manifest.digest:
            self.close()
            raise CorruptStateError(
                f"the checksums of {self.manifest.description} at {self._address} do not "
                "match its sections: run one release of PlexRL on all nodes"
            )
