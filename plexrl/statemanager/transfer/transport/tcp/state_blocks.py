"""One rank's version on another node, fetched range by range with reconnects."""

import ctypes
import threading
import time
from collections.abc import Sequence

import numpy as np

from plexrl.errors import (
    ConflictError,
    ConnectionLostError,
    CorruptStateError,
    DeadlineExceededError,
    StateLostError,
    UnavailableError,
)
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.store.tiers.nvme import digests_bytes
from plexrl.statemanager.store.versions.versions import digest_of
from plexrl.statemanager.transfer.copy.strided_copy import Bytes
from plexrl.statemanager.transfer.transport.tcp.state_client import RemoteShard, RemoteState

PATIENCE_S = 10.0
"""Timeout of a source that sends nothing."""
RECONNECT_S = 0.05


class RemoteBlocks:
    """Reads one remote version, also as `DeviceMemory`. Thread-safe; reconnects if necessary."""

    def __init__(
        self,
        address: str,
        ticket: bytes,
        deployment: str,
        seq: int,
        rank: int,
        stamp: str,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`address` is `host:port`.

        Raises:
            UnavailableError: nothing listens there.
            StateLostError: it has no such version with that stamp.
            CorruptStateError: the version or its description is damaged.
        """
        self._address = address
        self._ticket = ticket
        self._wanted = (deployment, seq, rank, stamp)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._state: RemoteState | None = None
        self._given_at = time.monotonic()
        while True:
            try:
                self.shard = self._opened(digests=True)
                break
            except (ConnectionLostError, OSError) as error:
                self._cut(error)
        self.nbytes = self.shard.manifest.nbytes
        self._check()

    def fetch(self, start: int, views: Sequence[memoryview]) -> None:
        """Fill memory with the data from offset `start` on, unverified.

        Raises:
            UnavailableError: the source is gone.
            StateLostError: it no longer has the version.
        """
        with self._lock:
            for view in views:
                self._fetch(start, np.frombuffer(view, dtype=np.uint8))
                start += len(view)

    def read(self, runs: Sequence[Run]) -> None:
        """As `DeviceMemory.read`, unverified. Raises as `fetch`."""
        for run in runs:
            memory = (ctypes.c_ubyte * run.nbytes).from_address(run.address)
            self.fetch(run.offset, [memoryview(memory).cast("B")])

    def write(self, runs: Sequence[Run]) -> None:
        """Raises ConflictError: versions are immutable."""
        raise ConflictError(f"a version at tcp://{self._address} is immutable ({len(runs)})")

    def close(self) -> None:
        """Release the version."""
        if self._state is not None:
            self._state.close()
            self._state = None

    def _fetch(self, start: int, target: Bytes) -> None:
        while True:
            try:
                if self._state is None:
                    shard = self._opened(digests=False)
                    assert shard.manifest.stamp == self.shard.manifest.stamp
                    self.shard = RemoteShard(
                        index=shard.index, manifest=self.shard.manifest, blocks=self.shard.blocks
                    )
                assert self._state is not None
                self._state.read_range(self.shard, start, target)
            except (ConnectionLostError, DeadlineExceededError, OSError) as error:
                self._cut(error)
            else:
                self._given_at = time.monotonic()
                return

    def _opened(self, *, digests: bool) -> RemoteShard:
        deployment, seq, rank, stamp = self._wanted
        self._state = RemoteState(self._address, self._ticket, self._patience_s)
        for shard in self._state.open(deployment, seq, rank=rank, digests=digests):
            if shard.manifest.stamp == stamp:
                return shard
        raise StateLostError(
            f"version {seq} of {deployment!r} rank {rank} is no longer at tcp://{self._address}: "
            "migrate again",
            deployment=deployment,
            seq=seq,
        )

    def _cut(self, error: Exception) -> None:
        self.close()
        if time.monotonic() - self._given_at > self._patience_s:
            raise UnavailableError(
                f"the StateManager at tcp://{self._address} cannot be reached ({error}): see its "
                "log",
                statemanager=f"tcp://{self._address}",
            ) from error
        time.sleep(RECONNECT_S)

    def _check(self) -> None:
        manifest, blocks = self.shard.manifest, self.shard.blocks
        sizes = [digests_bytes(section.nbytes) for section in manifest.sections]
        if [len(block) for block in blocks] != sizes or digest_of(blocks) != manifest.digest:
            self.close()
            raise CorruptStateError(
                f"the checksums of {manifest.description} at tcp://{self._address} do not match "
                "its sections: run one release of PlexRL on all nodes"
            )
