"""A worker's arena on a GPU."""

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.statemanager.device.backend import DeviceKind, DeviceSegment
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.device.memory import MemoryUsers


class CudaArena:
    """Implements `WorkerArena`. Any access while nothing is attached is a device error."""

    kind = DeviceKind.CUDA

    def __init__(self, driver: CudaDriver, nbytes: int, *, device: int = 0, uuid: str = "") -> None:
        """Reserve a range of at least `nbytes`. `device` is the GPU's index in this process, `uuid`
        its name in all; empty: the daemon sees the same GPUs in the same order."""
        driver.enter(device)
        unit = driver.granularity(device)
        self.device, self.uuid = device, uuid
        self.nbytes = max(1, -(-nbytes // unit)) * unit
        self.address = driver.reserve(self.nbytes)
        self.segments: tuple[DeviceSegment, ...] = ()
        self.users = MemoryUsers()
        self.driver = driver
        self._mapped = ExitStack()
        # Every view references the arena, so the range is released after the last view.
        ending = weakref.finalize(self, _end, driver, self._mapped, self.address, self.nbytes)
        ending.atexit = False

    @property
    def is_attached(self) -> bool:
        return bool(self.segments)

    def attach(
        self,
        segments: Sequence[DeviceSegment],
        *,
        keep_contents: bool,  # noqa: ARG002
        read_only: bool = False,
    ) -> None:
        """See `WorkerArena.attach`; nothing can be written while nothing is attached."""
        taken = tuple(segments)
        try:
            if self.segments or sum(s.nbytes for s in taken) != self.nbytes:
                raise InvalidRequestError(
                    f"segments of {[s.nbytes for s in taken]} bytes do not fit an arena of "
                    f"{self.nbytes} that has {len(self.segments)} attached"
                )
            self.driver.enter(self.device)
            with ExitStack() as undo:
                address = self.address
                for segment in taken:
                    handle = self.driver.import_fd(segment.fd)
                    try:
                        self.driver.map(address, segment.nbytes, handle)
                        undo.callback(self.driver.unmap, address, segment.nbytes)
                    finally:
                        # The mapping keeps the memory alive.
                        self.driver.release(handle)
                    address += segment.nbytes
                self.driver.allow_access(
                    self.device, self.address, self.nbytes, read_only=read_only
                )
                self._mapped.push(undo.pop_all())
        except BaseException:
            _close(taken)
            raise
        self.segments = taken

    def detach(self) -> None:
        self.users.end()
        if self.segments:
            self.driver.enter(self.device)
            # A running kernel would fault on unmapped memory.
            self.driver.synchronize()
            self._mapped.close()
            _close(self.segments)
            self.segments = ()

    def resident_bytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    def returned_bytes(self) -> int:
        """See `WorkerArena.returned_bytes`; a detach unmaps all."""
        return 0

    def forget_returned(self) -> None:
        """See `WorkerArena.forget_returned`."""

    def close(self) -> None:
        self.detach()


class ArenaBytes:
    """The arena's bytes as a `__cuda_array_interface__` (version 3) for torch, CuPy and Numba,
    whose views keep the arena alive."""

    def __init__(self, arena: CudaArena) -> None:
        self.arena = arena
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (arena.nbytes,),
            "typestr": "|u1",
            "data": (arena.address, False),
            "strides": None,
            "version": 3,
        }


def _end(driver: CudaDriver, mapped: ExitStack, address: int, nbytes: int) -> None:
    mapped.close()
    driver.unreserve(address, nbytes)


def _close(segments: Sequence[DeviceSegment]) -> None:
    for segment in segments:
        os.close(segment.fd)
