"""The memory that a worker's tensors live in, which it borrows from its node's StateManager.

The range of addresses is the worker's for good; what is behind them comes with a registration or a
load, and goes with an offload (`plexrl.statemanager.device.backend`).
"""

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind, WorkerArena
from plexrl.statemanager.device.cpu.arena import CpuArena as Arena

__all__ = ["Arena", "make_arena"]


def make_arena(kind: DeviceKind, nbytes: int, *, device: int = 0) -> WorkerArena:
    """An arena of at least `nbytes` on a device of that kind and index.

    Raises:
        DeviceUnavailableError: there is no such device.
    """
    if kind == DeviceKind.CPU:
        if device != 0:
            raise InvalidRequestError(f"a CPU node has device 0 only; {device} was asked for")
        return Arena(nbytes)
    from plexrl.statemanager.device.cuda.arena import CudaArena
    from plexrl.statemanager.device.cuda.bindings import BoundDriver

    return CudaArena(BoundDriver(), nbytes, device=device)
