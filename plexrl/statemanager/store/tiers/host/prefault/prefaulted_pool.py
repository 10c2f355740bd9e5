"""The host tier's memory pool, some of whose free memory is made ready in the background.

The first use of a page costs several times a copy, and pinning it for a GPU as much again. Pinned
segments are made one by one, without the pool's lock: a process of idle priority allocates the
pages, then this process maps and pins them. Memory that is not pinned is prefaulted piece by piece.

An allocation that needs the memory of a segment in the making ends the making.
"""

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plexrl.errors import StateTierFullError
from plexrl.process.memory.usable import available_bytes, usable_bytes
from plexrl.statemanager.bytes.mapped_memory import populate
from plexrl.statemanager.layout.ranges import PAGE_BYTES, Piece, chunks, total_bytes
from plexrl.statemanager.store.tiers.host.pool import SEGMENT_BYTES_MIN, HostPool
from plexrl.statemanager.store.tiers.host.prefault.budget import emptiest, may_prefault
from plexrl.statemanager.store.tiers.host.prefault.idle_process import IdleProcess
from plexrl.statemanager.store.tiers.host.segment import HostSegment

LOG = logging.getLogger(__name__)

PREFAULT_BYTES = 64 << 20
"""Bytes to prefault at a time, so that `close` does not wait for all of them."""
PREFAULT_SEGMENTS = 8
"""Minimum number of prefaulted segments, so that several tenants can use them."""
PAUSE_S = 5.0
"""Time between two looks whether the machine has memory to spare."""


def machine_may_spare(nbytes: int) -> bool:
    """Whether this machine has `nbytes` of memory to spare now."""
    return may_prefault(nbytes, usable_bytes=usable_bytes(), available_bytes=available_bytes())


class PrefaultedPool(HostPool):
    """As `HostPool`. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        *,
        may_spare: Callable[[int], bool] = machine_may_spare,
        **options: Any,
    ) -> None:
        """As `HostPool`. `may_spare`: whether so many bytes more may be made ready now."""
        super().__init__(directory, bytes_max, **options)
        self._may_spare = may_spare
        self._changed = threading.Condition(self._lock)
        self._faulting_bytes = 0
        self._waiting = 0
        """Allocations that wait for memory of background work."""
        self._closing = threading.Event()
        self._prefaulting: threading.Thread | None = None
        self._is_prefaulting = False
        self._resident_bytes_wanted = self._free_bytes_wanted = 0
        self._idle = IdleProcess()

    @property
    def resident_bytes(self) -> int:
        with self._lock:
            return self._used_bytes + self._warm_bytes() - self._faulting_bytes

    def prefault(self, nbytes: int) -> None:
        """Make `nbytes` of the capacity ready, on a thread, and pin what was recovered."""
        with self._lock:
            self._resident_bytes_wanted = nbytes
            if nbytes or self._unpinned:
                self._start_prefaulting()

    def prefault_free(self, nbytes: int) -> None:
        """Prefault up to `nbytes` of free memory, which will be written soon. No effect on pinned
        segments, which are always resident."""
        with self._lock:
            self._free_bytes_wanted = nbytes
            if self._on_map is None and self._bytes_to_prefault() > 0:
                self._start_prefaulting()

    def close(self) -> None:
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        if self._prefaulting is not None:
            # Twice, if it has just started a process.
            while self._prefaulting.is_alive():
                self._idle.end()
                self._prefaulting.join(timeout=0.1)
        super().close()

    # The caller holds `_lock` in the following methods.

    def _await_space(self, nbytes: int, tenant: str | None) -> None:
        # Ranges that are being prefaulted count as in use, and become free soon.
        self._changed.wait_for(lambda: self._fits(nbytes) or not self._faulting_bytes)
        if not self._making_bytes:
            return
        free = 0 if tenant is None or tenant not in self._free else self._free[tenant].nbytes
        if self._fits(nbytes) and (
            free >= nbytes or self._mapped_bytes() + nbytes <= self.bytes_max
        ):
            return
        self._waiting += 1
        try:
            while self._making_bytes:
                self._idle.end()
                self._changed.wait(timeout=0.1)
        finally:
            self._waiting -= 1
            self._changed.notify_all()

    def _start_prefaulting(self) -> None:
        if not self._is_prefaulting and not self._closing.is_set():
            self._is_prefaulting = True
            self._prefaulting = threading.Thread(target=self._prefault, daemon=True)
            self._prefaulting.start()

    def _bytes_to_prefault(self) -> int:
        """Bytes that are to be made ready, and fit."""
        warm = self._warm_bytes()
        wanted = max(self._resident_bytes_wanted - self._used_bytes, self._free_bytes_wanted)
        free = self.bytes_max - self._used_bytes - warm - self._other_bytes
        if self._on_map is not None:
            # Its own count, because the files of workers are mapped too.
            wanted = self._resident_bytes_wanted - self._files_bytes - self._used_bytes
            free = min(free, self.bytes_max - self._mapped_bytes())
        return max(0, min(wanted - warm, free)) // PAGE_BYTES * PAGE_BYTES

    def _bytes_to_make(self) -> int:
        """Size of the next segment that is made in advance; 0: there is none."""
        share = max(SEGMENT_BYTES_MIN, -(-self._resident_bytes_wanted // PREFAULT_SEGMENTS))
        size = min(1 << (share - 1).bit_length(), self._segment_bytes_max)
        return min(self._bytes_to_prefault(), size)

    def _bytes_on_nodes(self) -> dict[int | None, int]:
        found: dict[int | None, int] = {}
        for segment in self._segments.values():
            found[segment.node] = found.get(segment.node, 0) + segment.nbytes
        return found

    # The caller holds no lock in the following methods.

    def _prefault(self) -> None:
        step = self._prefault_pieces if self._on_map is None else self._make_segment
        try:
            self._map_recovered()
            while not self._closing.is_set() and step():
                pass
        except (OSError, StateTierFullError) as error:
            LOG.warning("the host tier is not completely prefaulted: %s", error)
            with self._lock:
                self._is_prefaulting = False
        finally:
            self._idle.end()

    def _map_recovered(self) -> None:
        """Map and pin memory of a previous daemon, which is resident."""
        while True:
            # Under the lock, because unused memory can be removed at any time.
            with self._lock:
                if self._closing.is_set() or not self._unpinned:
                    break
                self._pin(self._unpinned.pop())
        with self._lock:
            resident, self._unmapped = self._unmapped, []
        for piece in resident:
            for chunk in chunks(piece, PREFAULT_BYTES):
                with self._lock:
                    if self._closing.is_set() or chunk.segment not in self._segments:
                        break
                    populate(self.address(chunk), chunk.nbytes)

    def _make_segment(self) -> bool:
        """Make one pinned segment; returns whether there may be more to do."""
        with self._lock:
            nbytes = self._bytes_to_make()
            if not nbytes:
                self._is_prefaulting = False
                return False
        if not self._may_spare(nbytes):
            self._closing.wait(PAUSE_S)
            return True
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting or self._closing.is_set())
            nbytes = self._making_bytes = self._bytes_to_make()
            memory_nodes = emptiest(self._memory_nodes, self._bytes_on_nodes())
            number, self._numbers = self._numbers, self._numbers + 1
        made: HostSegment | None = None
        try:
            if not nbytes:
                return True
            made = HostSegment(self._directory, number, nbytes, memory_nodes=memory_nodes)
            for chunk in chunks(made.whole, PREFAULT_BYTES):
                self._idle.allocate(made.path, chunk.offset, chunk.nbytes)
                made.fallocate(chunk)
            self._pin(made)
        except OSError as error:
            if made is not None:
                made.remove()
                made = None
            if error.errno != errno.ECANCELED:
                raise
        finally:
            with self._changed:
                self._making_bytes = 0
                if made is not None:
                    self._add(made)
                self._changed.notify_all()
        return True

    def _prefault_pieces(self) -> bool:
        """Prefault some pieces; returns whether there may be more to do."""
        cold = self._next_cold_pieces()
        if not cold:
            return False
        is_touched = False
        try:
            for piece in cold:
                self._fault_in(piece)
            is_touched = True
        finally:
            with self._changed:
                (self._free_warm if is_touched else self._free_cold)(cold)
                self._trim()
                self._faulting_bytes = 0
                self._changed.notify_all()
        return True

    def _next_cold_pieces(self) -> list[Piece]:
        """Cold ranges to prefault next. They count as in use meanwhile, so that the capacity is
        respected."""
        with self._lock:
            nbytes = min(self._bytes_to_prefault(), PREFAULT_BYTES)
            if not nbytes:
                self._is_prefaulting = False
                return []
            wanted = -(-self._resident_bytes_wanted // PREFAULT_SEGMENTS)
            segment_bytes = max(SEGMENT_BYTES_MIN, wanted or nbytes)
            if not any(one.cold.nbytes for one in self._free.values()):
                size = min(nbytes, segment_bytes)
                self._grow(size, None, self._memory_nodes, segment_bytes)
            # Unassigned segments first, because any tenant may use them.
            owners = sorted(self._free.values(), key=lambda one: one is not self._free[None])
            cold = next(one for one in owners if one.cold.nbytes).cold.take(nbytes)
            self._count_used(cold)
            self._faulting_bytes = total_bytes(cold)
            return cold

    def _fault_in(self, piece: Piece) -> None:
        for chunk in chunks(piece, PREFAULT_BYTES):
            if self._closing.is_set():
                return
            self._segments[chunk.segment].fallocate(chunk)
