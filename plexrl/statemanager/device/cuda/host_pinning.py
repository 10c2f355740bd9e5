"""Pinned host memory, which the CUDA driver copies at full speed."""

import logging
import threading
from bisect import bisect_right
from collections.abc import Iterator

from plexrl.errors import DeviceError
from plexrl.statemanager.device.cuda.driver import CudaDriver

LOG = logging.getLogger(__name__)

PIN_BYTES_MAX = 64 << 30
"""Largest range per call: larger calls have failed on drivers where several smaller ones did
not."""
PIN_BYTES_MIN = 64 << 20
"""A range that cannot be pinned in pieces of this size is not pinned."""
_ALIGNMENT = 4096


class HostPinning:
    """Pins whole ranges or nothing. Thread-safe; calls need an entered device."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        """(address, bytes) of the pinned pieces of each range, by the range's address."""
        self._starts: tuple[int, ...] = ()
        """Where pinned pieces begin or end."""
        self._pinned: frozenset[int] = frozenset()
        """Addresses where a pinned piece begins."""
        self._warned = False

    def add(self, address: int, nbytes: int) -> None:
        """Pin a range. If the driver refuses, the range stays unpinned; the first failure is
        logged."""
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
        """(address, bytes) of pieces for single copies: the driver refuses a copy across two pinned
        pieces."""
        starts = self._starts
        index = bisect_right(starts, address)
        while nbytes:
            count = nbytes
            if index < len(starts):
                count = min(nbytes, starts[index] - address)
            yield address, count
            address, nbytes, index = address + count, nbytes - count, index + 1

    def is_pinned(self, address: int) -> bool:
        """Whether a piece that `split` returned is pinned, by its address."""
        starts = self._starts
        index = bisect_right(starts, address)
        return index > 0 and starts[index - 1] in self._pinned

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
        self._pinned = frozenset(start for pieces in self._ranges.values() for start, _ in pieces)
        # Replaced as a whole, because `split` reads it without the lock.
        self._starts = tuple(sorted(edges))
