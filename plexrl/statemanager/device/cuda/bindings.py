"""The CUDA driver through NVIDIA's `cuda-bindings` (extra `cuda`)."""

import logging
import subprocess
import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from plexrl.errors import DeviceError, DeviceMemoryFullError, DeviceUnavailableError
from plexrl.process.children.startup import visible_parts
from plexrl.statemanager.device.cuda.driver import DeviceCopy, driver_error

LOG = logging.getLogger(__name__)

TOOL_TIMEOUT_S = 10.0
BATCH_COPIES_MAX = 1024


def load_bindings() -> Any:
    """Import the driver's functions.

    Raises:
        DeviceUnavailableError: the extra or the driver is not installed.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DeviceUnavailableError(
            f"cuda-bindings cannot be imported ({error}): install plexrl[cuda]"
        ) from error
    return driver


def device_names(uuids: Sequence[bytes]) -> tuple[str, ...]:
    """Names by which `CUDA_VISIBLE_DEVICES` finds the devices of this process.

    Args:
        uuids: 16 bytes of each device, in the driver's order.
    """
    parts = visible_parts()
    if parts:
        return parts[: len(uuids)]
    return tuple([f"GPU-{UUID(bytes=bytes(uuid))}" for uuid in uuids])


def bytes_by_process(rows: str, uuid: str) -> dict[int, int]:
    """Memory by process id of one device, from the rows `UUID, id, MiB` of `nvidia-smi`."""
    found: dict[int, int] = {}
    for row in rows.splitlines():
        fields = [field.strip() for field in row.split(",")]
        # A process of another user has "[N/A]" in place of its memory.
        if len(fields) == 3 and fields[0] == uuid and fields[1].isdigit() and fields[2].isdigit():
            found[int(fields[1])] = found.get(int(fields[1]), 0) + (int(fields[2]) << 20)
    return found


class BoundDriver:
    """Implements `CudaDriver`. Keeps the context of each entered device until the process ends."""

    def __init__(self) -> None:
        self._api = load_bindings()
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._initialised = False
        self._has_batches = True
        """Whether `cuMemcpyBatchAsync` (drivers from CUDA 13.0 on) has not failed yet."""
        self._allows_rdma: dict[int, bool] = {}
        """Whether a device's memory may be created for GPUDirect RDMA."""

    def enter(self, device: int) -> None:
        self._call("cuCtxSetCurrent", self._context(device))

    def uuids(self) -> tuple[str, ...]:
        return device_names(
            [self._call("cuDeviceGetUuid", device).bytes for device in self._devices()]
        )

    def pci_addresses(self) -> tuple[str, ...]:
        found = [self._call("cuDeviceGetPCIBusId", 32, device) for device in self._devices()]
        return tuple([text.split(b"\0")[0].decode() for text in found])

    def _devices(self) -> list[Any]:
        self._initialise()
        return [self._call("cuDeviceGet", at) for at in range(self._call("cuDeviceGetCount"))]

    def memory_info(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo")
        return int(free), int(total)

    def process_bytes(self, uuid: str) -> dict[int, int] | None:
        """See `CudaDriver.process_bytes`; by `nvidia-smi`."""
        query = ["--query-compute-apps=gpu_uuid,pid,used_memory", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(
                ["nvidia-smi", *query],
                capture_output=True,
                text=True,
                timeout=TOOL_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return bytes_by_process(done.stdout, uuid)

    def granularity(self, device: int) -> int:
        self._initialise()
        options = self._api.CUmemAllocationGranularity_flags
        smallest = options.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._call("cuMemGetAllocationGranularity", self._props(device), smallest))

    def create(self, device: int, nbytes: int) -> int:
        """See `CudaDriver.create`. Network cards can reach the memory (GPUDirect RDMA) if device
        and driver support that."""
        try:
            return int(self._call("cuMemCreate", nbytes, self._props(device), 0))
        except (DeviceMemoryFullError, DeviceUnavailableError):
            raise
        except DeviceError as error:
            if not self._supports_rdma(device):
                raise
            LOG.warning("memory of device %d is created without GPUDirect RDMA: %s", device, error)
            self._allows_rdma[device] = False
        return int(self._call("cuMemCreate", nbytes, self._props(device), 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def device_of(self, handle: int) -> int:
        return int(self._call("cuMemGetAllocationPropertiesFromHandle", handle).location.id)

    def export_fd(self, handle: int) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def import_fd(self, fd: int) -> int:
        return int(self._call("cuMemImportFromShareableHandle", fd, self._fd_type))

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def allow_access(
        self, device: int, address: int, nbytes: int, *, read_only: bool = False
    ) -> None:
        allowed = self._api.CUmemAccess_flags
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = (
            allowed.CU_MEM_ACCESS_FLAGS_PROT_READ
            if read_only
            else allowed.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def create_stream(self) -> int:
        flags = self._api.CUstream_flags.CU_STREAM_NON_BLOCKING
        return int(self._call("cuStreamCreate", flags.value))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream)

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync", host, address, nbytes, stream)

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync", address, host, nbytes, stream)

    def copy_batch(self, copies: Sequence[DeviceCopy], stream: int, *, to_host: bool) -> None:
        """See `CudaDriver.copy_batch`. A driver without batches gets one call for each copy."""
        if len(copies) > 1 and self._has_batches:
            try:
                for start in range(0, len(copies), BATCH_COPIES_MAX):
                    self._copy_at_once(copies[start : start + BATCH_COPIES_MAX], stream)
                return
            except (DeviceError, TypeError) as error:
                # Copies of a part that was started are repeated, with the same result.
                LOG.warning("copies are started one by one, because batches fail: %s", error)
                self._has_batches = False
        for target, source, nbytes in copies:
            if to_host:
                self.copy_to_host(target, source, nbytes, stream)
            else:
                self.copy_to_device(target, source, nbytes, stream)

    def _copy_at_once(self, copies: Sequence[DeviceCopy], stream: int) -> None:
        api = self._api
        how = api.CUmemcpyAttributes()
        how.srcAccessOrder = api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._call(
            "cuMemcpyBatchAsync",
            [api.CUdeviceptr(target) for target, _, _ in copies],
            [api.CUdeviceptr(source) for _, source, _ in copies],
            [nbytes for _, _, nbytes in copies],
            len(copies),
            [how],
            [0],
            1,
            stream,
        )

    def set_zero(self, address: int, nbytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, 0, nbytes, stream)

    def synchronize_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def register_host(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister", address, nbytes, self._api.CU_MEMHOSTREGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    @property
    def _fd_type(self) -> Any:
        types = self._api.CUmemAllocationHandleType
        return types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _initialise(self) -> None:
        with self._lock:
            if not self._initialised:
                self._call("cuInit", 0)
                self._initialised = True

    def _context(self, device: int) -> Any:
        self._initialise()
        with self._lock:
            if device not in self._contexts:
                # The API does not guarantee that a device's handle equals its index.
                handle = self._call("cuDeviceGet", device)
                self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", handle)
            return self._contexts[device]

    def _props(self, device: int) -> Any:
        """Properties of device memory that can be exported as a descriptor."""
        props = self._api.CUmemAllocationProp()
        props.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        props.requestedHandleTypes = self._fd_type
        props.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        props.location.id = device
        props.allocFlags.gpuDirectRDMACapable = int(self._supports_rdma(device))
        return props

    def _supports_rdma(self, device: int) -> bool:
        if device not in self._allows_rdma:
            attributes = self._api.CUdevice_attribute
            wanted = attributes.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            handle = self._call("cuDeviceGet", device)
            self._allows_rdma[device] = bool(self._call("cuDeviceGetAttribute", wanted, handle))
        return self._allows_rdma[device]

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function; returns None, one value or a tuple.

        Raises:
            DeviceError: the result code is not success.
        """
        try:
            result, *values = getattr(self._api, name)(*arguments)
        except RuntimeError as error:
            # The bindings raise this if the driver library or this function is missing.
            raise DeviceUnavailableError(
                f"{name}: no usable NVIDIA driver ({error}): install or update it", call=name
            ) from error
        if result != self._api.CUresult.CUDA_SUCCESS:
            raise driver_error(name, result.name)
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)
