"""The device backend of GPU nodes, with CUDA's virtual memory management.

The daemon creates physical memory, exports it as descriptors and maps it. A worker imports the
descriptors, so the worker's death only removes a mapping. If the daemon dies, the worker keeps the
memory, and a restarted daemon imports the worker's descriptors. The driver frees the memory with
the last handle, mapping and descriptor, so an offload closes the mappings and descriptors on both
sides. The daemon keeps handles of returned memory for the next load (`idle_segments`), and releases
all others.

Copies are complete when a call returns. The daemon runs no kernels.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from plexrl.errors import (
    DeviceError,
    DeviceMemoryFullError,
    DeviceUnavailableError,
    InvalidRequestError,
)
from plexrl.statemanager.device.backend import DeviceAllocation, DeviceKind, DeviceUsage
from plexrl.statemanager.device.cuda.allocation import CudaAllocation
from plexrl.statemanager.device.cuda.copy_streams import CopyStreams
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.device.cuda.host_pinning import HostPinning
from plexrl.statemanager.device.cuda.idle_segments import IdleSegment, IdleSegments
from plexrl.statemanager.device.segments import leading

CUDA_SEGMENT_BYTES_MAX = 1 << 30
"""Largest segment: few descriptors per arena, and no unusually large driver allocation."""


class CudaDevices:
    """Implements `DeviceBackend` for all GPUs of the node; a GPU is initialised on its first
    use."""

    kind = DeviceKind.CUDA

    def __init__(
        self,
        driver: CudaDriver,
        *,
        bytes_max: int | None = None,
        idle_bytes_max: int | None = None,
        segment_bytes_max: int = CUDA_SEGMENT_BYTES_MAX,
    ) -> None:
        """`bytes_max`: capacity per device; absent: the device's memory. `idle_bytes_max`: returned
        memory to keep per device; absent: half of the device's memory. `segment_bytes_max`: largest
        segment."""
        self._driver = driver
        self._segment_bytes_max = segment_bytes_max
        self._bytes_max = bytes_max
        self._idle_bytes_max = idle_bytes_max
        self._pinning = HostPinning(driver)
        self._lock = threading.Lock()
        self._streams: dict[int, CopyStreams] = {}
        self._lent_bytes: dict[int, int] = {}
        self._idle: dict[int, IdleSegments] = {}
        self._parts: set[CudaAllocation] = set()
        """Allocations that no worker has yet."""

    def allocate(self, nbytes: int, *, device: int, uid: int) -> CudaAllocation:
        """See `DeviceBackend.allocate`."""
        self._enter(device)
        sizes = self._sizes(nbytes, device)
        return self._allocate(sizes, (), device, uid)

    def allocate_part(
        self, nbytes: int, *, device: int, uid: int, bytes_max: int, bytes_wanted: int
    ) -> CudaAllocation | None:
        self._enter(device)
        if self._bytes_max is not None:
            with self._lock:
                bytes_max = min(bytes_max, self._bytes_max - self._lent_bytes.get(device, 0))
        sizes = leading(self._sizes(nbytes, device), bytes_max, bytes_wanted)
        if not sizes:
            return None
        part = self._allocate(sizes, (), device, uid)
        with self._lock:
            self._parts.add(part)
        return part

    def extend(self, part: DeviceAllocation, nbytes: int) -> CudaAllocation:
        """See `DeviceBackend.extend`; the driver maps the part's memory a second time, with what is
        added behind it, before the first mapping ends."""
        assert isinstance(part, CudaAllocation)
        self._enter(part.device)
        sizes = self._sizes(nbytes, part.device)
        rest = sizes[len(part.segment_bytes) :]
        try:
            whole = self._allocate(rest, part.segments, part.device, part.uid)
        except DeviceMemoryFullError:
            raise
        except BaseException:
            self.recycle(part)
            raise
        with self._lock:
            self._parts.discard(part)
        try:
            part.unmap()
        except BaseException:
            self.free(whole)
            raise
        return whole

    def _allocate(
        self, sizes: Sequence[int], part: Sequence[IdleSegment], device: int, uid: int
    ) -> CudaAllocation:
        """Segments of these sizes, mapped behind those of `part`, which a failure leaves."""
        streams = self._enter(device)
        added_bytes = sum(sizes)
        self._count_lent(device, added_bytes)
        try:
            with ExitStack() as undo:
                with self._lock:
                    found, left = self._idle[device].take(sizes, uid)
                for segment in found:
                    if segment is not None:
                        undo.callback(self._driver.release, segment.handle)
                self._release(left)
                handles = [segment.handle for segment in part]
                for size, segment in zip(sizes, found, strict=True):
                    if segment is None:
                        handles.append(self._driver.create(device, size))
                        undo.callback(self._driver.release, handles[-1])
                    else:
                        handles.append(segment.handle)
                whole = (*(segment.nbytes for segment in part), *sizes)
                return self._map(device, handles, whole, streams, undo, uid)
        except BaseException:
            self._count_returned(device, added_bytes)
            raise

    def adopt(
        self,
        fds: Sequence[int],
        segment_bytes: Sequence[int],
        *,
        device: int,
        uid: int,
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
                return self._map(device, handles, segment_bytes, streams, undo, uid)
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
        """See `DeviceBackend.recycle`; its segments are kept for the next load, within a bound, if
        no other rank works on the device."""
        assert isinstance(allocation, CudaAllocation)
        device = allocation.device
        with self._lock:
            self._parts.discard(allocation)
        try:
            returned = allocation.end()
        finally:
            self._count_returned(device, allocation.nbytes)
        with self._lock:
            if self._lent_bytes[device] == sum(p.nbytes for p in self._parts if p.device == device):
                returned = self._idle[device].put(returned)
        self._release(returned)

    def free(self, allocation: DeviceAllocation, *, is_unmapped: bool = False) -> None:  # noqa: ARG002
        """See `DeviceBackend.free`; the driver frees the memory after the worker's mapping ends."""
        assert isinstance(allocation, CudaAllocation)
        try:
            self._release(allocation.end())
        finally:
            self._count_returned(allocation.device, allocation.nbytes)

    def release_idle(self, device: int) -> None:
        """See `DeviceBackend.release_idle`."""
        self._enter(device)
        with self._lock:
            _, left = self._idle[device].take((), 0)
        self._release(left)

    def pci_addresses(self) -> tuple[str, ...]:
        return self._driver.pci_addresses()

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
            idle_bytes = self._idle[device].nbytes
        return DeviceUsage(lent_bytes=lent_bytes, idle_bytes=idle_bytes, free_bytes=free_bytes)

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
        for device in sorted(self._streams):
            self.release_idle(device)
        with self._lock:
            streams, self._streams = self._streams, {}
        for _, each in sorted(streams.items()):
            each.close()
        if streams:
            self._pinning.close()

    def _enter(self, device: int) -> CopyStreams:
        self._driver.enter(device)
        with self._lock:
            if device not in self._streams:
                bound = self._idle_bytes_max
                if bound is None:
                    bound = self._driver.memory_info()[1] // 2
                self._idle[device] = IdleSegments(bound)
                self._streams[device] = CopyStreams(self._driver, self._pinning, device)
            return self._streams[device]

    def _sizes(self, nbytes: int, device: int) -> tuple[int, ...]:
        unit = self._driver.granularity(device)
        return cuda_segment_sizes(nbytes, unit, self._segment_bytes_max)

    def _release(self, segments: Sequence[IdleSegment]) -> None:
        # All of them, even if one fails.
        with ExitStack() as releases:
            for segment in segments:
                releases.callback(self._driver.release, segment.handle)

    def _map(
        self,
        device: int,
        handles: Sequence[int],
        sizes: Sequence[int],
        streams: CopyStreams,
        undo: ExitStack,
        uid: int,
    ) -> CudaAllocation:
        """The allocation of these handles, whose release `undo` undertakes until this returns."""
        total = sum(sizes)
        with ExitStack() as unmap:
            address = self._driver.reserve(total)
            unmap.callback(self._driver.unreserve, address, total)
            at = address
            for handle, size in zip(handles, sizes, strict=True):
                self._driver.map(at, size, handle)
                unmap.callback(self._driver.unmap, at, size)
                at += size
            self._driver.allow_access(device, address, total)
            undo.pop_all()
            return CudaAllocation(
                self._driver,
                streams,
                device=device,
                address=address,
                handles=handles,
                segment_bytes=sizes,
                uid=uid,
                unmap=unmap.pop_all(),
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


def cuda_segment_sizes(
    nbytes: int, unit: int, bytes_max: int = CUDA_SEGMENT_BYTES_MAX
) -> tuple[int, ...]:
    """Multiples of `unit` whose sum exceeds `nbytes` by less than one unit, the largest first."""
    largest = max(1, bytes_max // unit) * unit
    whole, rest = divmod(max(1, -(-nbytes // unit)) * unit, largest)
    return (largest,) * whole + ((rest,) if rest else ())
