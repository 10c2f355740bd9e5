"""The device backend of GPU nodes, with CUDA's virtual memory management.

The daemon creates physical memory, exports it as descriptors and maps it. A worker imports the
descriptors, so the worker's death only removes a mapping. If the daemon dies, the worker keeps the
memory, and a restarted daemon imports the worker's descriptors. The driver frees the memory with
the last handle, mapping and descriptor, so an offload closes all of them on both sides, and no idle
memory is kept.

Copies use two streams of the daemon, one per direction, and are complete when a call returns. The
daemon runs no kernels.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from plexrl.errors import (
    DeviceError,
    DeviceMemoryFullError,
    DeviceUnavailableError,
    InvalidRequestError,
    StateLostError,
)
from plexrl.statemanager.device.backend import DeviceAllocation, DeviceKind, DeviceUsage
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.device.cuda.host_pinning import HostPinning
from plexrl.statemanager.device.memory import Run

CUDA_SEGMENT_BYTES_MAX = 1 << 30
"""Largest segment: few descriptors per arena, and no unusually large driver allocation."""


@dataclass(frozen=True, slots=True)
class _Streams:
    to_host: int
    to_device: int


class _Copy(Protocol):
    def __call__(self, run: Run, done: int, host: int, nbytes: int, stream: int) -> None: ...


class CudaAllocation:
    """Implements `DeviceAllocation`. No thread may use it while another ends it."""

    is_clean = False
    """The contents of new memory are undefined."""

    def __init__(
        self,
        driver: CudaDriver,
        pinning: HostPinning,
        streams: _Streams,
        *,
        device: int,
        address: int,
        handles: Sequence[int],
        segment_bytes: Sequence[int],
        teardown: ExitStack,
    ) -> None:
        self._driver = driver
        self._pinning = pinning
        self._streams = streams
        self._device = device
        self._address = address
        self._handles = tuple(handles)
        self._teardown = teardown
        self.segment_bytes = tuple(segment_bytes)
        self.nbytes = sum(segment_bytes)

    @property
    def device(self) -> int:
        """Index of the memory's device."""
        return self._device

    def read(self, runs: Sequence[Run]) -> None:
        """See `DeviceMemory.read`."""

        def copy(run: Run, done: int, host: int, nbytes: int, stream: int) -> None:
            source = self._address + run.offset + done
            self._driver.copy_to_host(host, source, nbytes, stream)

        self._copy(runs, self._streams.to_host, copy)

    def write(self, runs: Sequence[Run]) -> None:
        """See `DeviceMemory.write`."""

        def copy(run: Run, done: int, host: int, nbytes: int, stream: int) -> None:
            target = self._address + run.offset + done
            self._driver.copy_to_device(target, host, nbytes, stream)

        self._copy(runs, self._streams.to_device, copy)

    def clear(self, offset: int, nbytes: int) -> None:
        self._check(offset, nbytes)
        stream = self._streams.to_device

        def begin() -> None:
            self._driver.set_zero(self._address + offset, nbytes, stream)

        if nbytes:
            self._carry_out(begin, stream)

    def descriptors(self, *, read_only: bool = False) -> list[int]:  # noqa: ARG002
        """See `DeviceAllocation.descriptors`; the driver has no read-only descriptors."""
        self._check(0, 0)
        self._driver.enter(self._device)
        found: list[int] = []
        try:
            # `extend` keeps the descriptors before a failure; they are closed below.
            found.extend(self._driver.export_fd(handle) for handle in self._handles)
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def end(self) -> None:
        """Unmap the memory and release it to the driver, for the device."""
        self._check(0, 0)
        self._handles = ()
        self._driver.enter(self._device)
        self._teardown.close()

    def _copy(self, runs: Sequence[Run], stream: int, copy: _Copy) -> None:
        for run in runs:
            self._check(run.offset, run.nbytes)

        def begin() -> None:
            for run in runs:
                for host, nbytes in self._pinning.split(run.address, run.nbytes):
                    copy(run, host - run.address, host, nbytes, stream)

        self._carry_out(begin, stream)

    def _carry_out(self, begin: Callable[[], None], stream: int) -> None:
        """Start work on a stream and wait for it, even if starting failed in between: host memory
        must not be reused during a copy."""
        try:
            self._driver.enter(self._device)
            try:
                begin()
            finally:
                self._driver.synchronize_stream(stream)
        except DeviceError as error:
            raise StateLostError(
                f"device {self._device} failed in a copy ({error}): restart the worker and load "
                "its last version",
                device=self._device,
            ) from error

    def _check(self, offset: int, nbytes: int) -> None:
        if not self._handles:
            raise StateLostError("the worker has returned this memory: load its state first")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidRequestError(
                f"bytes {offset} to {offset + nbytes} are not in an arena of {self.nbytes}"
            )


class CudaDevices:
    """Implements `DeviceBackend` for all GPUs of the node; a GPU is initialised on its first
    use."""

    kind = DeviceKind.CUDA

    def __init__(self, driver: CudaDriver, *, bytes_max: int | None = None) -> None:
        """`bytes_max`: capacity per device; absent: the device's memory."""
        self._driver = driver
        self._bytes_max = bytes_max
        self._pinning = HostPinning(driver)
        self._lock = threading.Lock()
        self._streams: dict[int, _Streams] = {}
        self._lent_bytes: dict[int, int] = {}

    def allocate(self, nbytes: int, *, device: int, uid: int) -> CudaAllocation:  # noqa: ARG002
        """See `DeviceBackend.allocate`; no memory is reused, so `uid` is unused."""
        streams = self._enter(device)
        unit = self._driver.granularity(device)
        sizes = cuda_segment_sizes(nbytes, unit)
        self._count_lent(device, sum(sizes))
        try:
            with ExitStack() as undo:
                handles = []
                for size in sizes:
                    handles.append(self._driver.create(device, size))
                    undo.callback(self._driver.release, handles[-1])
                return self._map(device, handles, sizes, streams, undo)
        except BaseException:
            self._count_returned(device, sum(sizes))
            raise

    def adopt(
        self,
        fds: Sequence[int],
        segment_bytes: Sequence[int],
        *,
        device: int,
        uid: int,  # noqa: ARG002
    ) -> CudaAllocation:
        if not fds or len(fds) != len(segment_bytes):
            raise InvalidRequestError(
                f"{len(fds)} descriptors came for {len(segment_bytes)} segments"
            )
        streams = self._enter(device)
        unit = self._driver.granularity(device)
        if any(nbytes <= 0 or nbytes % unit for nbytes in segment_bytes):
            raise InvalidRequestError(
                f"segment sizes must be multiples of {unit} bytes on this device"
            )
        self._count_lent(device, sum(segment_bytes))
        try:
            with ExitStack() as undo:
                handles = []
                for fd in fds:
                    handles.append(self._driver.import_fd(fd))
                    undo.callback(self._driver.release, handles[-1])
                    if self._driver.device_of(handles[-1]) != device:
                        raise InvalidRequestError(f"a segment does not lie on device {device}")
                return self._map(device, handles, segment_bytes, streams, undo)
        except (DeviceMemoryFullError, DeviceUnavailableError, InvalidRequestError):
            self._count_returned(device, sum(segment_bytes))
            raise
        except DeviceError as error:
            self._count_returned(device, sum(segment_bytes))
            raise InvalidRequestError(
                f"a descriptor is not a segment of the daemon ({error}): pass back what the "
                "daemon sent"
            ) from error

    def recycle(self, allocation: DeviceAllocation) -> None:
        """See `DeviceBackend.recycle`; the memory is released to the driver."""
        self.free(allocation)

    def free(self, allocation: DeviceAllocation, *, is_unmapped: bool = False) -> None:  # noqa: ARG002
        """See `DeviceBackend.free`; the driver frees the memory after the worker's mapping ends."""
        assert isinstance(allocation, CudaAllocation)
        try:
            allocation.end()
        finally:
            self._count_returned(allocation.device, allocation.nbytes)

    def index_of(self, uuid: str) -> int:
        found = self._driver.uuids()
        if uuid not in found:
            raise DeviceUnavailableError(
                f"the StateManager sees no GPU {uuid!r}, only {', '.join(found) or 'none'}: let "
                "its CUDA_VISIBLE_DEVICES name all GPUs of the node's workers, or leave it unset"
            )
        return found.index(uuid)

    def usage(self, device: int) -> DeviceUsage:
        self._enter(device)
        free_bytes, _ = self._driver.memory_info()
        with self._lock:
            lent_bytes = self._lent_bytes.get(device, 0)
        return DeviceUsage(lent_bytes=lent_bytes, idle_bytes=0, free_bytes=free_bytes)

    def process_bytes(self, device: int) -> Mapping[int, int] | None:
        """See `DeviceBackend.process_bytes`. What a process has borrowed may be counted, too."""
        found = self._driver.process_bytes(self._driver.uuids()[device])
        if found is None:
            return None
        return {pid: nbytes for pid, nbytes in found.items() if pid != os.getpid()}

    def register_host(self, address: int, nbytes: int) -> None:
        self._driver.enter(0)
        self._pinning.add(address, nbytes)

    def unregister_host(self, address: int, nbytes: int) -> None:  # noqa: ARG002
        """See `DeviceBackend.unregister_host`."""
        self._driver.enter(0)
        self._pinning.remove(address)

    def close(self) -> None:
        with self._lock:
            streams, self._streams = self._streams, {}
        for device, pair in sorted(streams.items()):
            self._driver.enter(device)
            self._driver.destroy_stream(pair.to_host)
            self._driver.destroy_stream(pair.to_device)
        if streams:
            self._pinning.close()

    def _enter(self, device: int) -> _Streams:
        self._driver.enter(device)
        with self._lock:
            if device not in self._streams:
                self._streams[device] = _Streams(
                    self._driver.create_stream(), self._driver.create_stream()
                )
            return self._streams[device]

    def _map(
        self,
        device: int,
        handles: Sequence[int],
        sizes: Sequence[int],
        streams: _Streams,
        undo: ExitStack,
    ) -> CudaAllocation:
        total = sum(sizes)
        address = self._driver.reserve(total)
        undo.callback(self._driver.unreserve, address, total)
        at = address
        for handle, size in zip(handles, sizes, strict=True):
            self._driver.map(at, size, handle)
            undo.callback(self._driver.unmap, at, size)
            at += size
        self._driver.allow_access(device, address, total)
        return CudaAllocation(
            self._driver,
            self._pinning,
            streams,
            device=device,
            address=address,
            handles=handles,
            segment_bytes=sizes,
            teardown=undo.pop_all(),
        )

    def _count_lent(self, device: int, nbytes: int) -> None:
        with self._lock:
            lent_bytes = self._lent_bytes.get(device, 0)
            if self._bytes_max is not None and lent_bytes + nbytes > self._bytes_max:
                raise DeviceMemoryFullError(
                    f"an arena of {nbytes} bytes does not fit on device {device}: {lent_bytes} of "
                    f"{self._bytes_max} are allocated: offload another job, or raise device_bytes",
                    needed_bytes=nbytes,
                    lent_bytes=lent_bytes,
                    bytes_max=self._bytes_max,
                )
            self._lent_bytes[device] = lent_bytes + nbytes

    def _count_returned(self, device: int, nbytes: int) -> None:
        with self._lock:
            self._lent_bytes[device] -= nbytes


def cuda_segment_sizes(nbytes: int, unit: int) -> tuple[int, ...]:
    """Multiples of `unit` whose sum exceeds `nbytes` by less than one unit."""
    largest = CUDA_SEGMENT_BYTES_MAX // unit * unit
    whole, rest = divmod(max(1, -(-nbytes // unit)) * unit, largest)
    return (largest,) * whole + ((rest,) if rest else ())
