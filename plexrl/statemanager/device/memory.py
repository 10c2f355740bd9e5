"""Access to an arena's memory, on any device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class ByteRun(NamedTuple):
    """A contiguous copy between the arena and this process's host memory. A tuple, because a
    version may have many thousands of runs."""

    offset: int
    """Offset from the start of the arena."""
    address: int
    """Address of mapped host memory in this process; pinned if the device requires it."""
    nbytes: int


class WritableDevice(Protocol):
    """The memory of one rank's arena. Thread-safe; calls block until done."""

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        ...

    def read(self, runs: Sequence[ByteRun]) -> None:
        """Copy from the arena to host memory.

        Raises:
            StateLostError: the device failed or the memory was freed; the copied bytes are
                undefined.
        """
        ...

    def write(self, runs: Sequence[ByteRun]) -> None:
        """Copy from host memory to the arena. Raises as `read`."""
        ...


class MemoryUsers:
    """Threads that use a worker's arena in the background. The arena ends their work before it
    replaces, unmaps or changes the memory at its addresses, so none can touch what is gone."""

    def __init__(self) -> None:
        self._ends: list[Callable[[], None]] = []

    def add(self, end: Callable[[], None]) -> None:
        """`end` returns when the thread has left the memory; the thread may use it again when its
        owner asks for it, which happens after the change. It must not raise."""
        self._ends.append(end)

    def end(self) -> None:
        """Wait until no thread uses the memory."""
        for end in self._ends:
            end()


class MemoryRange:
    """As `WritableDevice`, of which copies take only the bytes from `start` to `end`."""

    def __init__(self, memory: WritableDevice, start: int, end: int) -> None:
        self._memory = memory
        self.start = start
        self._end = end
        self.nbytes = memory.nbytes

    def read(self, runs: Sequence[ByteRun]) -> None:
        self._memory.read(self._inside(runs))

    def write(self, runs: Sequence[ByteRun]) -> None:
        self._memory.write(self._inside(runs))

    def _inside(self, runs: Sequence[ByteRun]) -> list[ByteRun]:
        found = []
        for run in runs:
            first = max(run.offset, self.start)
            last = min(run.offset + run.nbytes, self._end)
            if first < last:
                found.append(ByteRun(first, run.address + first - run.offset, last - first))
        return found
