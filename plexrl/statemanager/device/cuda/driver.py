"""The few calls of the CUDA driver that the StateManager and its workers make, as a seam.

Addresses, handles and streams are plain integers. Every call that fails raises what
`driver_error` makes of the driver's answer. Calls that need a context say so; `enter` gives the
calling thread one.
"""

from typing import Protocol

from plexrl.errors import DeviceError, DeviceMemoryFullError, DeviceUnavailableError


class CudaDriver(Protocol):
    """The driver of this process. Thread-safe; each thread enters a device for itself."""

    def enter(self, device: int) -> None:
        """Make the device's primary context the calling thread's, beginning it where need be.

        Raises:
            DeviceUnavailableError: there is no driver, or no such device.
        """
        ...

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the entered device."""
        ...

    def granularity(self, device: int) -> int:
        """What sizes of allocations and ranges of addresses are multiples of."""
        ...

    def create(self, device: int, nbytes: int) -> int:
        """A handle of new physical memory, which can be exported. Its contents are undefined.

        Raises:
            DeviceMemoryFullError: the device has not so much left.
        """
        ...

    def release(self, handle: int) -> None:
        """Give a handle up; the memory goes once no process has a handle, mapping or descriptor."""
        ...

    def device_of(self, handle: int) -> int:
        """The device that the memory lies on."""
        ...

    def export_fd(self, handle: int) -> int:
        """A new descriptor of the memory, which the caller closes."""
        ...

    def import_fd(self, fd: int) -> int:
        """A handle of the memory behind the descriptor, which stays the caller's."""
        ...

    def reserve(self, nbytes: int) -> int:
        """The start of a new range of addresses, with nothing behind them."""
        ...

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a range up that nothing is mapped in."""
        ...

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map all of the handle's memory, `nbytes`, into a reserved range."""
        ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo `map` for one or more whole mappings in a row."""
        ...

    def allow_access(self, device: int, address: int, nbytes: int) -> None:
        """Let the device read and write what is mapped."""
        ...

    def create_stream(self) -> int:
        """A stream of the entered device, which no default stream waits for."""
        ...

    def destroy_stream(self, stream: int) -> None: ...

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        """Begin a copy; done once the stream is synchronised."""
        ...

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        """Begin a copy; done once the stream is synchronised."""
        ...

    def set_zero(self, address: int, nbytes: int, stream: int) -> None:
        """Begin to clear; done once the stream is synchronised."""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Wait for all that was begun on it; raises what any of it failed with."""
        ...

    def synchronize(self) -> None:
        """Wait for all that this process began on the entered device."""
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
    "CUDA_ERROR_ILLEGAL_ADDRESS": "memory was touched that is not mapped: restart this process",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device's memory failed: take the node out of service",
    "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED": "the host memory is pinned already",
    "CUDA_ERROR_NOT_PERMITTED": "raise the limit of locked memory (ulimit -l)",
    "CUDA_ERROR_NOT_SUPPORTED": "the device or its driver cannot export memory as a descriptor",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel of this process failed: restart it",
}
_UNAVAILABLE = {
    "CUDA_ERROR_NO_DEVICE": "no CUDA device is visible: check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_DEVICE": "there is no device of that index: check CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "the CUDA driver is not initialised",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "driver and kernel module differ: reboot the node",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the fabric manager is not up: start it",
    "CUDA_ERROR_STUB_LIBRARY": "the CUDA library found is a stub: install the NVIDIA driver",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process uses the device exclusively",
}


def driver_error(call: str, result: str) -> DeviceError:
    """What to raise where the driver's function `call` answered with the code named `result`."""
    if result == "CUDA_ERROR_OUT_OF_MEMORY":
        return DeviceMemoryFullError(
            f"{call}: {result}: the device has not so much memory left: offload another job",
            call=call,
            result=result,
        )
    if result in _UNAVAILABLE:
        return DeviceUnavailableError(
            f"{call}: {result}: {_UNAVAILABLE[result]}", call=call, result=result
        )
    hint = _HINTS.get(result, "see the CUDA driver's documentation of this code")
    return DeviceError(f"{call}: {result}: {hint}", call=call, result=result)
