"""The memory that a pull fills: of the host, or of a GPU over pinned host memory.

A GPU's arena is filled block by block. The copies into one block are read into pinned memory of
that size, and written to the device while the next block is read. So a pull needs host memory for
two blocks a source, whatever the model's size.
"""

import ctypes
import threading
from typing import NamedTuple, Protocol

import numpy as np

from plexrl.statemanager.device.cuda.arena import CudaArena
from plexrl.statemanager.device.cuda.host_pinning import HostPinning
from plexrl.statemanager.device.mapping import map_zero, unmap
from plexrl.statemanager.layout.plan.columns import Bytes
from plexrl.statemanager.layout.staging import StagingBlocks, covered
from plexrl.statemanager.layout.strided.copies import StridedCopies
from plexrl.statemanager.store.receiving.reader import Arrived, Delta, VersionReader

BLOCK_BYTES = 8 << 20


class PullTarget(Protocol):
    """The memory of a target's slices. One thread for each source."""

    def read(
        self,
        reader: VersionReader,
        copies: StridedCopies,
        arrived: Arrived,
        delta: Delta | None,
    ) -> None:
        """Perform `copies` from the version to the target; its bytes are there when `arrived` is
        called. Raises as `VersionReader.read`."""
        ...


class HostTarget:
    """Host memory."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def read(
        self,
        reader: VersionReader,
        copies: StridedCopies,
        arrived: Arrived,
        delta: Delta | None,
    ) -> None:
        """As `PullTarget.read`."""
        reader.read(copies, self._memory, arrived, delta)


class _Stage:
    """Pinned memory of one block, and a stream for its copies."""

    def __init__(self, arena: CudaArena, pinning: HostPinning, nbytes: int) -> None:
        self.stream = arena.driver.create_stream()
        self.address = map_zero(nbytes)
        pinning.add(self.address, nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(self.address)
        self.bytes = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)


class _Written(NamedTuple):
    """A block on its way to the device."""

    stage: _Stage
    arrivals: list[tuple[StridedCopies, int]]


class CudaTarget:
    """The memory of an arena on a GPU, which must be attached during a pull."""

    def __init__(self, arena: CudaArena, block_bytes: int = BLOCK_BYTES) -> None:
        """`block_bytes`: a power of two of at least 4096."""
        self.arena = arena
        self._block_bytes = block_bytes
        self._driver = arena.driver
        self._pinning = HostPinning(arena.driver)
        self._lock = threading.Lock()
        self._free: list[_Stage] = []
        """Kept for the next pull: pinning takes longer than a copy."""

    def read(
        self,
        reader: VersionReader,
        copies: StridedCopies,
        arrived: Arrived,
        delta: Delta | None,
    ) -> None:
        """As `PullTarget.read`."""
        self._driver.enter(self.arena.device)
        blocks = StagingBlocks(copies, self._block_bytes)
        stages = [self._taken(), self._taken()]
        before: _Written | None = None
        try:
            for number, start in enumerate(blocks.starts()):
                stage = stages[number % 2]
                written = self._read_block(reader, blocks.copies(start), start, stage, delta)
                self._finish(before, arrived)
                before = written
            self._finish(before, arrived)
        finally:
            # Pinned memory must not be reused during a copy, not even after a failure.
            for stage in stages:
                self._driver.synchronize_stream(stage.stream)
            with self._lock:
                self._free += stages

    def _read_block(
        self,
        reader: VersionReader,
        copies: StridedCopies,
        start: int,
        stage: _Stage,
        delta: Delta | None,
    ) -> _Written:
        """Read one block, and start to write it. A delta is applied to what the device holds."""
        ranges = covered(copies)
        if delta is not None:
            for at, nbytes in ranges:
                source = self.arena.address + start + at
                self._driver.copy_to_host(stage.address + at, source, nbytes, stage.stream)
            self._driver.synchronize_stream(stage.stream)
        arrivals: list[tuple[StridedCopies, int]] = []
        reader.read(
            copies,
            stage.bytes,
            lambda part, nbytes: arrivals.append((part.written_at(start), nbytes)),
            delta,
        )
        for at, nbytes in ranges:
            target = self.arena.address + start + at
            self._driver.copy_to_device(target, stage.address + at, nbytes, stage.stream)
        return _Written(stage, arrivals)

    def _finish(self, block: _Written | None, arrived: Arrived) -> None:
        if block is None:
            return
        self._driver.synchronize_stream(block.stage.stream)
        for copies, nbytes in block.arrivals:
            arrived(copies, nbytes)

    def _taken(self) -> _Stage:
        with self._lock:
            if self._free:
                return self._free.pop()
        return _Stage(self.arena, self._pinning, self._block_bytes)

    def close(self) -> None:
        """Free the pinned memory."""
        self._driver.enter(self.arena.device)
        while self._free:
            stage = self._free.pop()
            self._driver.destroy_stream(stage.stream)
            self._pinning.remove(stage.address)
            unmap(stage.address, self._block_bytes)
