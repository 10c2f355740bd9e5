"""Copies between a GPU and host memory, on several streams in each direction.

A caller has a stream for itself during a copy, so it waits for its own work only. Offloads and
loads use different streams, because a GPU copies in both directions at once.
"""

import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from plexrl.statemanager.device.cuda.driver import CudaDriver, DeviceCopy
from plexrl.statemanager.device.cuda.host_pinning import HostPinning
from plexrl.statemanager.device.memory import ByteRun

STREAMS_PER_DIRECTION = 4
"""As many as threads that copy for one move (`DATA_THREADS_MAX`)."""


class CopyStreams:
    """The streams of one device. Thread-safe; the device must be entered at construction."""

    def __init__(self, driver: CudaDriver, pinning: HostPinning, device: int) -> None:
        self._driver = driver
        self._pinning = pinning
        self._device = device
        self._to_host = self._create()
        self._to_device = self._create()

    def read(self, address: int, runs: Sequence[ByteRun]) -> None:
        """Copy runs of the arena at `address` to host memory. Raises DeviceError."""

        def begin(stream: int) -> None:
            for is_pinned, copies in self._pieces(address, runs, to_host=True):
                if is_pinned:
                    self._driver.copy_batch(copies, stream, to_host=True)
                    continue
                for target, source, nbytes in copies:
                    self._driver.copy_to_host(target, source, nbytes, stream)

        self._run(self._to_host, begin)

    def write(self, address: int, runs: Sequence[ByteRun]) -> None:
        """Copy runs from host memory to the arena at `address`. Raises DeviceError."""

        def begin(stream: int) -> None:
            for is_pinned, copies in self._pieces(address, runs, to_host=False):
                if is_pinned:
                    self._driver.copy_batch(copies, stream, to_host=False)
                    continue
                for target, source, nbytes in copies:
                    self._driver.copy_to_device(target, source, nbytes, stream)

        self._run(self._to_device, begin)

    def clear(self, address: int, nbytes: int) -> None:
        """Zero device memory. Raises DeviceError."""
        self._run(self._to_device, lambda stream: self._driver.set_zero(address, nbytes, stream))

    def close(self) -> None:
        """Destroy the streams; nothing may use them any more."""
        self._driver.enter(self._device)
        for streams in (self._to_host, self._to_device):
            while not streams.empty():
                self._driver.destroy_stream(streams.get())

    def _pieces(
        self, address: int, runs: Sequence[ByteRun], *, to_host: bool
    ) -> Iterator[tuple[bool, list[DeviceCopy]]]:
        """Single copies, those of pinned memory apart: only they may be in a batch."""
        pinned: list[DeviceCopy] = []
        pageable: list[DeviceCopy] = []
        for run in runs:
            for host, nbytes in self._pinning.split(run.address, run.nbytes):
                device = address + run.offset + host - run.address
                copy = (host, device, nbytes) if to_host else (device, host, nbytes)
                (pinned if self._pinning.is_pinned(host) else pageable).append(copy)
        if pinned:
            yield True, pinned
        if pageable:
            yield False, pageable

    def _run(self, streams: "queue.SimpleQueue[int]", begin: Callable[[int], None]) -> None:
        """Start work on a free stream and wait for it, even if starting failed in between: host
        memory must not be reused during a copy."""
        self._driver.enter(self._device)
        with _taken(streams) as stream:
            try:
                begin(stream)
            finally:
                self._driver.synchronize_stream(stream)

    def _create(self) -> "queue.SimpleQueue[int]":
        made: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(STREAMS_PER_DIRECTION):
            made.put(self._driver.create_stream())
        return made


@contextmanager
def _taken(streams: "queue.SimpleQueue[int]") -> Iterator[int]:
    stream = streams.get()
    try:
        yield stream
    finally:
        streams.put(stream)
