"""Choice of the device backend from the configuration."""

import os

from plexrl.statemanager.device.backend import DeviceBackend, DeviceKind
from plexrl.statemanager.device.cpu.device import CpuDevice
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.device.cuda.device import CudaDevices


def open_devices(
    kind: DeviceKind,
    *,
    bytes_max: int | None = None,
    prefault_bytes: int = 0,
    idle_bytes_max: int | None = None,
) -> DeviceBackend:
    """The backend of that kind; `idle_bytes_max` is for GPUs only. The default capacity of a
    CPU node is the machine's memory.

    Raises:
        DeviceUnavailableError: this node has no device of that kind.
    """
    if kind == DeviceKind.CPU:
        if bytes_max is None:
            bytes_max = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return CpuDevice(bytes_max=bytes_max, prefault_bytes=prefault_bytes)
    driver = BoundDriver()
    driver.enter(0)
    return CudaDevices(driver, bytes_max=bytes_max, idle_bytes_max=idle_bytes_max)
