"""Allocation of device memory with initial contents: what a load wrote, and zeros elsewhere."""

from collections.abc import Callable, Sequence

from plexrl.statemanager.device.backend import DeviceAllocation, DeviceBackend
from plexrl.statemanager.device.segments import uncovered

Fill = Callable[[DeviceAllocation], Sequence[tuple[int, int]]]
"""Writes to an allocation; returns the (offset, bytes) ranges that it wrote."""


def allocate_filled(
    backend: DeviceBackend,
    nbytes: int,
    *,
    device: int,
    uid: int,
    fill: Fill | None = None,
    part: DeviceAllocation | None = None,
) -> DeviceAllocation:
    """Allocate memory that is zero except for what `fill` writes.

    `fill` runs before the descriptors exist. So bytes that it writes are not cleared first, and no
    worker sees a partial load. `part`: its first segments, as for `DeviceBackend.extend`.

    Raises:
        DeviceMemoryFullError: the device has too little free memory; nothing has changed.
        PlexRLError: raised by `fill`; nothing is allocated.
    """
    if part is None:
        allocation = backend.allocate(nbytes, device=device, uid=uid)
    else:
        allocation = backend.extend(part, nbytes)
    try:
        was_clean = allocation.is_clean
        filled = fill(allocation) if fill is not None else ()
        if not was_clean:
            for offset, count in uncovered(filled, allocation.nbytes):
                allocation.clear(offset, count)
    except BaseException:
        # No worker has it mapped, so it can be reused at once.
        backend.recycle(allocation)
        raise
    return allocation
