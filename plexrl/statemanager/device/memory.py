"""What the StateManager asks of a registered arena, whatever device it lies on."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Run(NamedTuple):
    """Bytes in a row, at one place of the arena and one of this process's host memory. A tuple,
    because a version may have many thousands of them."""

    offset: int
    """From the start of the arena."""
    address: int
    """Of mapped host memory in this process, pinned where the device wants it so."""
    nbytes: int


class DeviceMemory(Protocol):
    """One rank's arena, as long as its pages are there. Thread-safe; calls block until done."""

    @property
    def nbytes(self) -> int:
        """Of the whole arena."""
        ...

    def read(self, runs: Sequence[Run]) -> None:
        """Copy from the arena to host memory.

        Raises:
            StateLostError: the device or the worker's memory is gone; what was copied is undefined.
        """
        ...

    def write(self, runs: Sequence[Run]) -> None:
        """Copy from host memory to the arena. Raises as `read`."""
        ...
