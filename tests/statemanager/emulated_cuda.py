"""A stand-in for the CUDA driver, so that our use of it runs where there is no GPU.

It proves the sequence of calls, not the hardware: what a real driver would refuse, this refuses
(double unmap, release of what is not held, a copy outside what is mapped and accessible, host
ranges pinned twice or crossed, a call without a context), and a copy happens when its stream is
synchronised, not before. It proves nothing of speed, of the driver's own bugs, or of a GPU.

Physical memory is a memory file, which lives as long as any process has it open or mapped; how much
is taken is read from the kernel's tables of all processes, so a leak cannot hide and a death frees.
"""

import fcntl
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

from plexrl.statemanager.device.cuda.driver import DeviceCopy, driver_error
from plexrl.statemanager.device.mapping import map_file, map_zero, move, set_zero, unmap
from tests.statemanager.memory_files import memory_file_bytes

GRANULARITY = 1 << 16
"""Smaller than a GPU's 2 MiB, so that small arenas have several units."""


class EmulatedCuda:
    """As `CudaDriver`. Processes with drivers of one `name` share their devices."""

    def __init__(
        self,
        name: str,
        *,
        devices: int = 2,
        device_bytes: int = 64 << 20,
        pin_bytes_max: int = 1 << 40,
    ) -> None:
        """`pin_bytes_max`: no call may pin more."""
        self.name = name
        self._devices = devices
        self._device_bytes = device_bytes
        self._pin_bytes_max = pin_bytes_max
        self._local = threading.local()
        self._ids = count(1)
        self._handles: dict[int, tuple[int, int]] = {}
        self._reserved: dict[int, int] = {}
        self._mapped: dict[int, int] = {}
        self._accessible: set[int] = set()
        self._read_only: set[int] = set()
        self._streams: dict[int, list[tuple[int, int, Callable[[], object]]]] = {}
        """Work that was started and not waited for: the device memory that it uses, and itself."""
        self.batches: list[int] = []
        """Copies of each batch."""
        self.pinned: dict[int, int] = {}
        self.broken = False
        """Whether every copy fails from now on, as on a device that fell off its bus."""
        self._failing: str | None = None

    def enter(self, device: int) -> None:
        if not 0 <= device < self._devices:
            raise driver_error("cuDeviceGet", "CUDA_ERROR_INVALID_DEVICE")
        self._local.device = device

    def uuids(self) -> tuple[str, ...]:
        return tuple(f"GPU-{self.name}-{device}" for device in range(self._devices))

    def pci_addresses(self) -> tuple[str, ...]:
        return tuple(f"0000:{device + 0xAA:02X}:00.0" for device in range(self._devices))

    def memory_info(self) -> tuple[int, int]:
        return self._device_bytes - self.taken_bytes(self._entered()), self._device_bytes

    def process_bytes(self, uuid: str) -> dict[int, int] | None:
        device = self.uuids().index(uuid)
        found = {
            int(process.name): memory_file_bytes(f"{self.name}-{device}-", pid=int(process.name))
            for process in Path("/proc").iterdir()
            if process.name.isdigit()
        }
        return {pid: nbytes for pid, nbytes in found.items() if nbytes}

    def granularity(self, device: int) -> int:
        return GRANULARITY if device < self._devices else 0

    def create(self, device: int, nbytes: int) -> int:
        self._fail_if_told("create")
        self._check(nbytes > 0 and nbytes % GRANULARITY == 0, "cuMemCreate")
        if self.taken_bytes(device) + nbytes > self._device_bytes:
            raise driver_error("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY")
        fd = os.memfd_create(f"{self.name}-{device}-", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # A GPU's memory holds what was there before.
        os.pwrite(fd, b"\xa5" * nbytes, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return self._hold(fd, nbytes)

    def release(self, handle: int) -> None:
        self._fail_if_told("release")
        self._check(handle in self._handles, "cuMemRelease")
        fd, _ = self._handles.pop(handle)
        os.close(fd)

    def device_of(self, handle: int) -> int:
        self._check(handle in self._handles, "cuMemGetAllocationPropertiesFromHandle")
        return self._device_behind(self._handles[handle][0])

    def export_fd(self, handle: int) -> int:
        self._check(handle in self._handles, "cuMemExportToShareableHandle")
        return os.dup(self._handles[handle][0])

    def import_fd(self, fd: int) -> int:
        self._fail_if_told("import_fd")
        self._check(self._device_behind(fd) >= 0, "cuMemImportFromShareableHandle")
        return self._hold(os.dup(fd), os.fstat(fd).st_size)

    def reserve(self, nbytes: int) -> int:
        self._fail_if_told("reserve")
        self._check(nbytes > 0 and nbytes % GRANULARITY == 0, "cuMemAddressReserve")
        address = map_zero(nbytes)
        self._reserved[address] = nbytes
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        free = not any(address <= at < address + nbytes for at in self._mapped)
        self._check(self._reserved.get(address) == nbytes and free, "cuMemAddressFree")
        del self._reserved[address]
        unmap(address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._fail_if_told("map")
        fits = any(
            start <= address and address + nbytes <= start + length
            for start, length in self._reserved.items()
        )
        free = not any(
            at < address + nbytes and address < at + length for at, length in self._mapped.items()
        )
        self._check(handle in self._handles and fits and free, "cuMemMap")
        fd, whole = self._handles[handle]
        self._check(nbytes == whole, "cuMemMap")
        map_file(fd, nbytes, address)
        self._mapped[address] = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        self._fail_if_told("unmap")
        end = address + nbytes
        for work in list(self._streams.values()):
            uses = [at < end and address < at + length for at, length, _ in list(work)]
            self._check(not any(uses), "cuMemUnmap")
        while address < end:
            length = self._mapped.get(address, 0)
            self._check(0 < length <= end - address, "cuMemUnmap")
            map_zero(length, address)
            del self._mapped[address]
            self._accessible.discard(address)
            self._read_only.discard(address)
            address += length

    def allow_access(
        self, device: int, address: int, nbytes: int, *, read_only: bool = False
    ) -> None:
        self._fail_if_told("allow_access")
        self._check(0 <= device < self._devices, "cuMemSetAccess")
        inside = {at for at in self._mapped if address <= at < address + nbytes}
        self._check(sum(self._mapped[at] for at in inside) == nbytes, "cuMemSetAccess")
        self._accessible |= inside
        self._read_only = self._read_only | inside if read_only else self._read_only - inside

    def create_stream(self) -> int:
        self._entered()
        stream = next(self._ids)
        self._streams[stream] = []
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._check(self._streams.get(stream) == [], "cuStreamDestroy")
        del self._streams[stream]

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._check_copy("cuMemcpyDtoHAsync", address, nbytes, host)
        self._start(stream, address, nbytes, lambda: move(host, address, nbytes))

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._check_copy("cuMemcpyHtoDAsync", address, nbytes, host)
        self._check_writable("cuMemcpyHtoDAsync", address, nbytes)
        self._start(stream, address, nbytes, lambda: move(address, host, nbytes))

    def copy_batch(self, copies: Sequence[DeviceCopy], stream: int, *, to_host: bool) -> None:
        hosts = [(copy[0] if to_host else copy[1], copy[2]) for copy in copies]
        for host, nbytes in hosts:
            pinned = any(at <= host < at + length for at, length in self.pinned.items())
            self._check(pinned and nbytes > 0, "cuMemcpyBatchAsync")
        self.batches.append(len(copies))
        # The order within a batch is not defined.
        for target, source, nbytes in random.sample(list(copies), len(copies)):
            if to_host:
                self.copy_to_host(target, source, nbytes, stream)
            else:
                self.copy_to_device(target, source, nbytes, stream)

    def set_zero(self, address: int, nbytes: int, stream: int) -> None:
        self._check_copy("cuMemsetD8Async", address, nbytes, None)
        self._check_writable("cuMemsetD8Async", address, nbytes)
        self._start(stream, address, nbytes, lambda: set_zero(address, nbytes))

    def _start(self, stream: int, address: int, nbytes: int, work: Callable[[], object]) -> None:
        self._check(stream in self._streams, "cuMemcpyAsync")
        self._streams[stream].append((address, nbytes, work))

    def synchronize_stream(self, stream: int) -> None:
        self._entered()
        self._check(stream in self._streams, "cuStreamSynchronize")
        while self._streams[stream]:
            self._streams[stream][0][2]()
            del self._streams[stream][0]

    def synchronize(self) -> None:
        self._entered()
        for stream in self._streams:
            self.synchronize_stream(stream)

    def register_host(self, address: int, nbytes: int) -> None:
        self._entered()
        if nbytes > self._pin_bytes_max:
            raise driver_error("cuMemHostRegister", "CUDA_ERROR_OUT_OF_MEMORY")
        for at, length in self.pinned.items():
            if at < address + nbytes and address < at + length:
                raise driver_error("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self._check(address % mmap.PAGESIZE == 0, "cuMemHostRegister")
        self.pinned[address] = nbytes

    def unregister_host(self, address: int) -> None:
        self._entered()
        if address not in self.pinned:
            raise driver_error("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")
        del self.pinned[address]

    def taken_bytes(self, device: int) -> int:
        """Physical memory of the device that any process has open or mapped."""
        return memory_file_bytes(f"{self.name}-{device}-")

    @property
    def is_busy(self) -> bool:
        """Whether work of this process was started and not waited for."""
        return any(self._streams.values())

    @property
    def handles_held(self) -> int:
        """Handles of physical memory that this process has not released."""
        return len(self._handles)

    def fail_next(self, call: str) -> None:
        """The next call of this method fails, and has done nothing."""
        self._failing = call

    def check_nothing_left(self) -> None:
        """Fail where this process still holds anything of the driver's."""
        assert not self._handles
        assert not self._mapped
        assert not self._reserved
        assert not self.pinned

    def _hold(self, fd: int, nbytes: int) -> int:
        handle = next(self._ids)
        self._handles[handle] = (fd, nbytes)
        return handle

    def _device_behind(self, fd: int) -> int:
        """The device of the memory behind the descriptor; -1 for a descriptor of something else."""
        with suppress(OSError):
            target = str(Path(f"/proc/self/fd/{fd}").readlink())
            for device in range(self._devices):
                if f"memfd:{self.name}-{device}-" in target:
                    return device
        return -1

    def _entered(self) -> int:
        device: int | None = getattr(self._local, "device", None)
        if device is None:
            raise driver_error("cuCtxGetCurrent", "CUDA_ERROR_INVALID_CONTEXT")
        return device

    def _fail_if_told(self, call: str) -> None:
        if self._failing == call:
            self._failing = None
            raise driver_error(call, "CUDA_ERROR_UNKNOWN")

    def _check(self, holds: bool, call: str) -> None:
        if not holds:
            raise driver_error(call, "CUDA_ERROR_INVALID_VALUE")

    def _check_writable(self, call: str, address: int, nbytes: int) -> None:
        for at in self._read_only:
            if at < address + nbytes and address < at + self._mapped[at]:
                raise driver_error(call, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def _check_copy(self, call: str, address: int, nbytes: int, host: int | None) -> None:
        self._entered()
        if self.broken:
            raise driver_error(call, "CUDA_ERROR_ECC_UNCORRECTABLE")
        reached = address
        while reached < address + nbytes:
            home = [
                at + self._mapped[at]
                for at in self._accessible
                if at <= reached < at + self._mapped[at]
            ]
            if not home:
                raise driver_error(call, "CUDA_ERROR_ILLEGAL_ADDRESS")
            reached = home[0]
        if host is not None:
            for at, length in self.pinned.items():
                touches = at < host + nbytes and host < at + length
                inside = at <= host and host + nbytes <= at + length
                self._check(inside or not touches, call)
