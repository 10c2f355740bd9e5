"""Interface of the CUDA driver calls that the StateManager and its workers use.

Addresses, handles and streams are integers. A failed call raises the error that `driver_error`
builds from the driver's result. `enter` sets the context of the calling thread.
"""

from collections.abc import Sequence
from typing import Protocol

from plexrl.errors import DeviceError, DeviceMemoryFullError, DeviceUnavailableError

DeviceCopy = tuple[int, int, int]
"""Target address, source address and bytes of a copy between host and device."""


class CudaDriver(Protocol):
    """The driver of this process. Thread-safe; each thread enters a device separately."""

    def enter(self, device: int) -> None:
        """Set the device's primary context on the calling thread; creates it if necessary.

        Raises:
            DeviceUnavailableError: there is no driver, or no such device.
        """
        ...

    def uuids(self) -> tuple[str, ...]:
        """UUIDs of the devices that this process sees, by index, as `GPU-…`."""
        ...

    def pci_addresses(self) -> tuple[str, ...]:
        """Address of each of these devices on the PCI bus, such as `0000:18:00.0`."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the entered device."""
        ...

    def process_bytes(self, uuid: str) -> dict[int, int] | None:
        """Memory of that device by process id, as the driver's tools report it; None: they do not
        answer. Processes of other containers have the host's ids."""
        ...

    def granularity(self, device: int) -> int:
        """Granularity of allocation sizes and address ranges, in bytes."""
        ...

    def create(self, device: int, nbytes: int) -> int:
        """Create exportable physical memory with undefined contents; returns a handle.

        Raises:
            DeviceMemoryFullError: the device has too little free memory.
        """
        ...

    def release(self, handle: int) -> None:
        """Release a handle; the memory is freed with the last handle, mapping and descriptor."""
        ...

    def device_of(self, handle: int) -> int:
        """Index of the memory's device."""
        ...

    def export_fd(self, handle: int) -> int:
        """Export a descriptor of the memory; the caller closes it."""
        ...

    def import_fd(self, fd: int) -> int:
        """Import the memory of a descriptor; returns a handle. The caller keeps the descriptor."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve an unmapped address range; returns its start."""
        ...

    def unreserve(self, address: int, nbytes: int) -> None:
        """Release a reserved range without mappings."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map all of a handle's memory into a reserved range."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap one or more adjacent whole mappings."""
        ...

    def allow_access(
        self, device: int, address: int, nbytes: int, *, read_only: bool = False
    ) -> None:
        """Allow the device to read, and unless `read_only` to write, mapped memory."""
        ...

    def create_stream(self) -> int:
        """Create a non-blocking stream on the entered device."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        """Start a copy; it is complete after the stream is synchronised."""
        ...

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        """Start a copy; it is complete after the stream is synchronised."""
        ...

    def copy_batch(self, copies: Sequence[DeviceCopy], stream: int, *, to_host: bool) -> None:
        """Start copies between the device and pinned host memory, in any order among each other;
        all are complete after the stream is synchronised."""
        ...

    def set_zero(self, address: int, nbytes: int, stream: int) -> None:
        """Start to clear memory; it is complete after the stream is synchronised."""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Wait for a stream's work; raises the error of any failed operation."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of this process on the entered device."""
        ...

    def register_host(self, address: int, nbytes: int) -> None:
        """Pin host memory for all devices. Needs an entered device."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo `register_host`. Needs an entered device."""
        ...


_HINTS = {
    "CUDA_ERROR_INVALID_VALUE": "the call's arguments do not fit what is allocated or mapped",
    "CUDA_ERROR_INVALID_CONTEXT": "no device is entered on this thread",
    "CUDA_ERROR_DEINITIALIZED": "the process is ending",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "unmapped memory was accessed: restart this process",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory failed: take the node out of service",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the host memory is already pinned",
    "CUDA_ERROR_NOT_PERMITTED": "raise the limit of locked memory (ulimit -l)",
    "CUDA_ERROR_NOT_SUPPORTED": "the device or its driver cannot export memory as a descriptor",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel of this process failed: restart it",
}
_UNAVAILABLE = {
    "CUDA_ERROR_NO_DEVICE": "no CUDA device is visible: check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "no device has that index: check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "the CUDA driver is not initialised",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and kernel module differ: reboot the node",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager is not up: start it",
    "CUDA_ERROR_STUB_LIBRARY": "the CUDA library found is a stub: install the NVIDIA driver",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process uses the device exclusively",
}


def driver_error(call: str, result: str) -> DeviceError:
    """The error for driver function `call` that returned the code named `result`."""
    if result == "CUDA_ERROR_OUT_OF_MEMORY":
        return DeviceMemoryFullError(
            f"{call}: {result}: the device has too little free memory: offload another job",
            call=call,
            result=result,
        )
    if result in _UNAVAILABLE:
        return DeviceUnavailableError(
            f"{call}: {result}: {_UNAVAILABLE[result]}", call=call, result=result
        )
    hint = _HINTS.get(result, "see the CUDA driver's documentation of this code")
    return DeviceError(f"{call}: {result}: {hint}", call=call, result=result)
