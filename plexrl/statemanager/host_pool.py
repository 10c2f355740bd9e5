"""The host tier's memory: segment files on a memory file system, mapped once and never unmapped.

Fresh pages cost five to twenty times what copying into them costs, so pages that were touched once
are kept and handed out again. What is handed out is ranges of pages of any segment; as an object
may lie in several, free bytes are never too scattered to be used. (Whole segments in size classes
would waste up to half of the last one, and have to be given back to the system whenever another
class lacks.)

Laws:

- A range has one owner: it is in use, or free and touched (`warm`), or free and untouched (`cold`).
- What is in use, what is warm and what was set aside for other files never exceed the bound
  together. Cold ranges cost no memory: a segment file is sparse.
- What is written to was set aside on the file system before, which refuses where it is full; it
  would end the process otherwise, when a page cannot be had.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from plexrl.errors import StateTierFullError
from plexrl.statemanager.free_ranges import FreeRanges, Piece
from plexrl.statemanager.mapping import PAGE_BYTES, MappedFile, discard, populate
from plexrl.statemanager.numa import place_pages

LOG = logging.getLogger(__name__)

SEGMENT_BYTES_MIN = 256 << 10
PREFAULT_BYTES = 64 << 20
"""Pages that are faulted in at a time, so that a close need not wait for all of them."""

_SUFFIX = ".segment"

OnMap = Callable[[int, int], None]
"""Given the address and size of a segment."""


class HostPool:
    """Thread-safe. Sizes are rounded up to whole pages."""

    def __init__(
        self,
        directory: Path,
        bytes_max: int,
        *,
        segment_bytes_max: int = 1 << 30,
        memory_node: int | None = None,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """Take in the segments that are there, all of them free until `claim` says otherwise.

        With `on_map`, a segment's pages are all there when it is called, and stay: for memory that
        is to be pinned.
        """
        self.bytes_max = bytes_max
        self._directory = directory
        self._segment_bytes_max = segment_bytes_max
        self._memory_node = memory_node
        self._on_map, self._on_unmap = on_map, on_unmap
        self._lock = threading.Lock()
        self._faulted = threading.Condition(self._lock)
        self._faulting_bytes = 0
        self._segments: dict[int, MappedFile] = {}
        self._readers: dict[int, int] = {}
        self._warm, self._cold = FreeRanges(), FreeRanges()
        self._used_bytes = 0
        self._aside_bytes = 0
        self._closing = threading.Event()
        self._prefaulting: threading.Thread | None = None
        self._resident_bytes_wanted = self._ready_bytes_wanted = 0
        self._unmapped: list[Piece] = []
        """What a daemon before this one left: resident, but not mapped here yet."""
        for path in sorted(directory.glob(f"*{_SUFFIX}")):
            self._take_in(path)

    @property
    def used_bytes(self) -> int:
        """In use, without what was set aside."""
        with self._lock:
            return self._used_bytes

    @property
    def resident_bytes(self) -> int:
        """In use, or touched and free."""
        with self._lock:
            return self._used_bytes + self._warm.nbytes

    def claim(self, pieces: Sequence[Piece]) -> bool:
        """Count ranges as in use that a daemon before this one handed out; False, and no effect,
        where one of them is not there or not free."""
        with self._lock:
            free = FreeRanges(self._warm)
            for piece in pieces:
                before = free.nbytes
                free.remove(piece)
                if before - free.nbytes != piece.nbytes:
                    return False
            self._warm = free
            self._used_bytes += sum(piece.nbytes for piece in pieces)
            return True

    def alloc(self, nbytes: int) -> tuple[Piece, ...]:
        """Ranges of `nbytes` bytes together, whole pages, whose contents are anything.

        Raises:
            StateTierFullError: the bound, or the file system, has no room.
        """
        nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            # Pages that are just being faulted in count as in use, and are free soon.
            self._faulted.wait_for(lambda: self._has_room(nbytes) or not self._faulting_bytes)
            if not self._has_room(nbytes):
                raise self._full(nbytes, "its bound is reached")
            self._grow(nbytes - self._warm.nbytes - self._cold.nbytes)
            warm = self._warm.take(nbytes)
            cold = self._cold.take(nbytes - _total(warm))
            self._used_bytes += nbytes
        try:
            for piece in cold:
                self._have_pages(piece)
                # Mapped at once: page by page, as they are touched, takes ten times as long.
                populate(self.address(piece), piece.nbytes)
        except OSError as error:
            with self._lock:
                self._used_bytes -= nbytes
                for piece in warm:
                    self._warm.add(piece)
                for piece in cold:
                    self._make_cold(piece)
            raise self._full(nbytes, str(error)) from error
        return (*warm, *cold)

    def free(self, pieces: Iterable[Piece]) -> None:
        """Let others have these ranges; their pages stay."""
        with self._lock:
            for piece in pieces:
                self._used_bytes -= piece.nbytes
                self._warm.add(piece)
            self._trim()

    def set_aside(self, nbytes: int) -> None:
        """Leave so much more (negative: less) of the bound to other files in the directory."""
        with self._lock:
            self._aside_bytes += nbytes
            self._trim()

    def view(self, piece: Piece) -> memoryview:
        """The memory of a range, writable."""
        return self._segments[piece.segment].view[piece.offset : piece.offset + piece.nbytes]

    def address(self, piece: Piece) -> int:
        """Where in this process a range begins."""
        return self._segments[piece.segment].address + piece.offset

    def descriptor(self, segment: int) -> int:
        """A read-only one of a segment's file; the pool's own, to be duplicated."""
        return self._readers[segment]

    def prefault(self, nbytes: int) -> None:
        """Have `nbytes` of the bound resident soon, from a thread of its own."""
        with self._lock:
            self._resident_bytes_wanted = nbytes
            self._start_prefaulting()

    def make_ready(self, nbytes: int) -> None:
        """Have `nbytes` free and resident soon, from a thread of its own, as far as the bound
        allows: they will be written to. Pinned segments come whole, so there it has no effect."""
        with self._lock:
            self._ready_bytes_wanted = nbytes
            if self._on_map is None and self._lacking() > 0:
                self._start_prefaulting()

    def close(self) -> None:
        """Unmap everything; the files stay. No range may be touched any more."""
        self._closing.set()
        with self._lock:
            prefaulting = self._prefaulting
        if prefaulting is not None:
            prefaulting.join()
        for number, segment in self._segments.items():
            if self._on_unmap is not None:
                self._on_unmap(segment.address, segment.nbytes)
            segment.close()
            os.close(self._readers[number])

    def check(self) -> None:
        """Assert the laws, as far as they can be seen from here."""
        with self._lock:
            sizes = {number: segment.nbytes for number, segment in self._segments.items()}
            free = FreeRanges(self._warm)
            for piece in self._cold:
                free.add(piece)
            assert free.nbytes + self._used_bytes == sum(sizes.values())
            resident = self._used_bytes + self._warm.nbytes + self._aside_bytes
            assert not self._warm.nbytes or resident <= self.bytes_max

    def _take_in(self, path: Path) -> None:
        """Map a segment that is there already, and count its touched pages as warm."""
        number = int(path.name.removesuffix(_SUFFIX))
        nbytes = path.stat().st_size // PAGE_BYTES * PAGE_BYTES
        if not nbytes:
            path.unlink()
            return
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            touched = FreeRanges(_touched(fd, number, nbytes))
            self._map(number, fd, nbytes)
        finally:
            os.close(fd)
        cold = FreeRanges([Piece(number, 0, nbytes)])
        self._unmapped += touched
        for piece in touched:
            self._warm.add(piece)
            cold.remove(piece)
        for piece in cold:
            if self._on_map is None:
                self._cold.add(piece)
            else:
                self._have_pages(piece)
                self._warm.add(piece)
        self._pin(number)

    # The following hold `_lock` already.

    def _start_prefaulting(self) -> None:
        if self._prefaulting is None and not self._closing.is_set():
            self._prefaulting = threading.Thread(target=self._prefault, daemon=True)
            self._prefaulting.start()

    def _lacking(self) -> int:
        """Bytes to fault in, of those that are wanted and that the bound has room for."""
        lacking = max(
            self._resident_bytes_wanted - self._used_bytes - self._warm.nbytes,
            self._ready_bytes_wanted - self._warm.nbytes,
        )
        room = self.bytes_max - self._used_bytes - self._warm.nbytes - self._aside_bytes
        return min(lacking, room, PREFAULT_BYTES) // PAGE_BYTES * PAGE_BYTES

    def _has_room(self, nbytes: int) -> bool:
        return self._used_bytes + self._aside_bytes + nbytes <= self.bytes_max

    def _grow(self, nbytes: int) -> None:
        """Add segments until there are so many bytes more."""
        while nbytes > 0:
            total = sum(segment.nbytes for segment in self._segments.values())
            # As much again as there is, so that many small versions do not make many small files.
            wanted = max(nbytes, total, SEGMENT_BYTES_MIN)
            size = min(1 << (wanted - 1).bit_length(), self._segment_bytes_max)
            room = (self.bytes_max - total) // PAGE_BYTES * PAGE_BYTES
            size = max(min(size, room), min(nbytes, self._segment_bytes_max))
            number = max(self._segments, default=-1) + 1
            try:
                self._create(number, size)
            except OSError as error:
                raise self._full(nbytes, str(error)) from error
            nbytes -= size

    def _create(self, number: int, nbytes: int) -> None:
        path = self._directory / f"{number:06d}{_SUFFIX}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        whole = Piece(number, 0, nbytes)
        try:
            os.ftruncate(fd, nbytes)
            self._map(number, fd, nbytes)
            if self._on_map is not None:
                self._have_pages(whole)
                populate(self.address(whole), nbytes)
        except OSError:
            self._unmap(number)
            path.unlink()
            raise
        finally:
            os.close(fd)
        (self._cold if self._on_map is None else self._warm).add(whole)
        self._pin(number)

    def _map(self, number: int, fd: int, nbytes: int) -> None:
        self._segments[number] = segment = MappedFile(fd, nbytes)
        self._readers[number] = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        place_pages(segment.address, nbytes, node=self._memory_node)

    def _unmap(self, number: int) -> None:
        if number in self._segments:
            self._segments.pop(number).close()
            os.close(self._readers.pop(number))

    def _pin(self, number: int) -> None:
        if self._on_map is not None:
            self._on_map(self._segments[number].address, self._segments[number].nbytes)

    def _trim(self) -> None:
        """Give warm pages back as far as the bound asks for it; pinned ones cannot be."""
        if self._on_map is not None:
            return
        excess = self._used_bytes + self._warm.nbytes + self._aside_bytes - self.bytes_max
        for piece in self._warm.take(-(-excess // PAGE_BYTES) * PAGE_BYTES) if excess > 0 else ():
            self._make_cold(piece)

    def _make_cold(self, piece: Piece) -> None:
        discard(self.address(piece), piece.nbytes)
        self._cold.add(piece)

    def _full(self, nbytes: int, why: str) -> StateTierFullError:
        return StateTierFullError(
            f"the host tier {self._directory} has no room on its file system for {nbytes} bytes "
            f"({why}): free space there or lower the tier's bound; the state stays where it was",
            tier="host",
        )

    # These hold no lock.

    def _have_pages(self, piece: Piece) -> None:
        """Have the file system set memory aside for a range."""
        with (self._directory / f"{piece.segment:06d}{_SUFFIX}").open("r+b") as file:
            os.posix_fallocate(file.fileno(), piece.offset, piece.nbytes)

    def _prefault(self) -> None:
        try:
            with self._lock:
                unmapped, self._unmapped = self._unmapped, []
            for piece in unmapped:
                self._fault_in(piece, is_warm=True)
            while not self._closing.is_set():
                with self._lock:
                    lacking = self._lacking()
                    if lacking <= 0:
                        return
                    if not self._cold.nbytes:
                        self._grow(lacking)
                    cold = self._cold.take(lacking)
                    # In use for as long as it takes, so that the bound holds.
                    self._used_bytes += _total(cold)
                    self._faulting_bytes = _total(cold)
                try:
                    for piece in cold:
                        self._fault_in(piece, is_warm=False)
                finally:
                    self.free(cold)
                    with self._lock:
                        self._faulting_bytes = 0
                        self._faulted.notify_all()
        except (OSError, StateTierFullError) as error:
            LOG.warning("the host tier is not wholly prefaulted: %s", error)
        finally:
            with self._lock:
                self._prefaulting = None

    def _fault_in(self, piece: Piece, *, is_warm: bool) -> None:
        for start in range(0, piece.nbytes, PREFAULT_BYTES):
            if self._closing.is_set():
                break
            nbytes = min(PREFAULT_BYTES, piece.nbytes - start)
            part = piece._replace(offset=piece.offset + start, nbytes=nbytes)
            if not is_warm:
                self._have_pages(part)
            populate(self.address(part), part.nbytes)


def _touched(fd: int, number: int, nbytes: int) -> list[Piece]:
    """Ranges of a sparse file that have pages."""
    found = []
    end = 0
    while end < nbytes:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError:
            # ENXIO: nothing but a hole from here on.
            break
        end = min(os.lseek(fd, start, os.SEEK_HOLE), nbytes)
        if start >= nbytes:
            break
        found.append(Piece(number, start, end - start))
    return found


def _total(pieces: Iterable[Piece]) -> int:
    return sum(piece.nbytes for piece in pieces)
