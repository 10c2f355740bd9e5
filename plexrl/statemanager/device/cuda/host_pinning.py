"""Host memory that the CUDA driver copies at full speed."""

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterator

from plexrl.errors import DeviceError
from plexrl.statemanager.device.cuda.driver import CudaDriver

LOG = logging.getLogger(__name__)

PIN_BYTES_MAX = 64 << 30
"""Of one call: larger ones have failed on drivers where several small ones did not."""
PIN_BYTES_MIN = 64 << 20
"""A range that cannot be pinned in pieces of this size is not pinned at all."""
_ALIGNMENT = 4096


class HostPinning:
    """Pins ranges whole or not at all. Thread-safe; calls need an entered device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """Of each range that was asked for, by address: (address, bytes) of its pinned pieces."""
        self._starts: tuple[int, ...] = ()
        self._warned = False

    def add(self, address: int, nbytes: int) -> None:
        """Pin the range; where the driver refuses, it stays as it is and the first time a warning
        is logged."""
        with self._lock:
            if nbytes <= 0 or address in self._ranges:
                return
            try:
                self._ranges[address] = self._pin(address, nbytes)
            except DeviceError as error:
                if not self._warned:
                    self._warned = True
                    LOG.warning(
                        "host memory cannot be pinned, so copies will be slow: raise the limit of "
                        "locked memory (%s)",
                        error,
                    )
                return
            self._index()

    def remove(self, address: int) -> None:
        """Undo `add`."""
        with self._lock:
            pieces = self._ranges.pop(address, [])
            self._index()
            for start, _ in pieces:
                self._driver.unregister_host(start)

    def close(self) -> None:
        """Unpin everything."""
        for address in list(self._ranges):
            self.remove(address)

    def split(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """(address, bytes) of pieces that a single copy may have: none crosses from one pinned
        piece to the next, which the driver refuses."""
        starts = self._starts
        index = bisect_right(starts, address)
        while nbytes:
            count = nbytes
            if index < len(starts):
                count = min(nbytes, starts[index] - address)
            yield address, count
            address, nbytes, index = address + count, nbytes - count, index + 1

    def _pin(self, address: int, nbytes: int) -> list[tuple[int, int]]:
        pieces: list[tuple[int, int]] = []
        size = PIN_BYTES_MAX
        done = 0
        try:
            while done < nbytes:
                count = min(size, nbytes - done)
                try:
                    self._driver.register_host(address + done, count)
                except DeviceError:
                    if count <= PIN_BYTES_MIN:
                        raise
                    size = max(PIN_BYTES_MIN, -(-count // (2 * _ALIGNMENT)) * _ALIGNMENT)
                    continue
                pieces.append((address + done, count))
                done += count
        except DeviceError:
            for start, _ in pieces:
                self._driver.unregister_host(start)
            raise
        return pieces

    def _index(self) -> None:
        edges = {
            edge
            for pieces in self._ranges.values()
            for start, nbytes in pieces
            for edge in (start, start + nbytes)
        }
        # Replaced whole: `split` reads it without the lock.
        self._starts = tuple(sorted(edges))
