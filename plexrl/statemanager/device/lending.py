"""Lending memory in the state that a worker may see it in: what was loaded, and zero elsewhere."""

from collections.abc import Callable, Sequence

from plexrl.statemanager.device.backend import DeviceBackend, Loan
from plexrl.statemanager.device.segments import uncovered

Fill = Callable[[Loan], Sequence[tuple[int, int]]]
"""Writes to a loan; returns the (offset, bytes) ranges that it wrote."""


def lend(
    backend: DeviceBackend, nbytes: int, *, device: int, uid: int, fill: Fill | None = None
) -> Loan:
    """A loan that is clean but for what `fill` writes. Filled before its descriptors exist, so that
    memory which is to be written anyway is not cleared first, and no one sees it half done.

    Raises:
        DeviceMemoryFullError: there is no room; nothing has changed.
        PlexRLError: what `fill` raises; nothing has changed.
    """
    loan = backend.allocate(nbytes, device=device, uid=uid)
    try:
        was_clean = loan.is_clean
        filled = fill(loan) if fill is not None else ()
        if not was_clean:
            for offset, count in uncovered(filled, loan.nbytes):
                loan.clear(offset, count)
    except BaseException:
        # Nobody has borrowed it yet, so it may be lent again at once.
        backend.recycle(loan)
        raise
    return loan
