"""Memory of one GPU, lent to one arena."""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from plexrl.errors import DeviceError, InvalidRequestError, StateLostError
from plexrl.statemanager.device.cuda.copy_streams import CopyStreams
from plexrl.statemanager.device.cuda.driver import CudaDriver
from plexrl.statemanager.device.cuda.idle_segments import IdleSegment
from plexrl.statemanager.device.memory import ByteRun


class CudaAllocation:
    """Implements `DeviceAllocation`. No thread may use it while another ends it."""

    is_clean = False
    """The contents of new memory are undefined."""

    def __init__(
        self,
        driver: CudaDriver,
        streams: CopyStreams,
        *,
        device: int,
        address: int,
        handles: Sequence[int],
        segment_bytes: Sequence[int],
        uid: int,
        unmap: ExitStack,
    ) -> None:
        """`unmap` ends the mapping and its address range, but no handle. `uid`: user of the
        worker."""
        self._driver = driver
        self._uid = uid
        self._streams = streams
        self._device = device
        self._address = address
        self._handles = tuple(handles)
        self._unmap = unmap
        self.segment_bytes = tuple(segment_bytes)
        self.nbytes = sum(segment_bytes)

    @property
    def device(self) -> int:
        """Index of the memory's device."""
        return self._device

    @property
    def uid(self) -> int:
        """User of the worker."""
        return self._uid

    @property
    def segments(self) -> list[IdleSegment]:
        """Its segments, in arena order."""
        self._check(0, 0)
        return [
            IdleSegment(handle, nbytes, self._uid)
            for handle, nbytes in zip(self._handles, self.segment_bytes, strict=True)
        ]

    def read(self, runs: Sequence[ByteRun]) -> None:
        """See `DeviceMemory.read`."""
        self._check_runs(runs)
        self._carry_out(lambda: self._streams.read(self._address, runs))

    def write(self, runs: Sequence[ByteRun]) -> None:
        """See `DeviceMemory.write`."""
        self._check_runs(runs)
        self._carry_out(lambda: self._streams.write(self._address, runs))

    def clear(self, offset: int, nbytes: int) -> None:
        self._check(offset, nbytes)
        if nbytes:
            self._carry_out(lambda: self._streams.clear(self._address + offset, nbytes))

    def descriptors(self, *, read_only: bool = False) -> list[int]:  # noqa: ARG002
        """See `DeviceAllocation.descriptors`; the driver has no read-only descriptors."""
        self._check(0, 0)
        self._driver.enter(self._device)
        found: list[int] = []
        try:
            # `extend` keeps the descriptors before a failure; they are closed below.
            found.extend(self._driver.export_fd(handle) for handle in self._handles)
        except BaseException:
            for fd in found:
                os.close(fd)
            raise
        return found

    def end(self) -> list[IdleSegment]:
        """Unmap the memory; returns its segments, which the caller keeps or releases. A failure
        releases them."""
        segments = self.segments
        with ExitStack() as undo:
            for segment in segments:
                undo.callback(self._driver.release, segment.handle)
            self.unmap()
            undo.pop_all()
        return segments

    def unmap(self) -> None:
        """Unmap the memory; its segments belong to another allocation from now on."""
        self._check(0, 0)
        self._handles = ()
        self._driver.enter(self._device)
        self._unmap.close()

    def _carry_out(self, copy: Callable[[], None]) -> None:
        try:
            copy()
        except DeviceError as error:
            raise StateLostError(
                f"device {self._device} failed in a copy ({error}): restart the worker and load "
                "its last version",
                device=self._device,
            ) from error

    def _check_runs(self, runs: Sequence[ByteRun]) -> None:
        for run in runs:
            self._check(run.offset, run.nbytes)

    def _check(self, offset: int, nbytes: int) -> None:
        if not self._handles:
            raise StateLostError("the worker has returned this memory: load its state first")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise InvalidRequestError(
                f"bytes {offset} to {offset + nbytes} are not in an arena of {self.nbytes}"
            )
