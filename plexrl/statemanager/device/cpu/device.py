"""The device backend of nodes without GPUs: a bounded pool of memory files.

A segment is a memory file, sealed against size changes. Another holder of its descriptor therefore
cannot truncate it under the daemon's mapping, which would kill the daemon (SIGBUS). A segment is
mapped once, with all its pages, and stays mapped between allocations, because the first use of a
page costs four to twenty times as much as a copy into it. A worker keeps the mapping of a segment
that it returned, too, so an idle segment's pages are freed for all before it is destroyed.

A worker may keep a descriptor. So a segment is reused only for workers of the same user, who can
read each other's memory anyway, and it is cleared before it is sent.
"""

import fcntl
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from plexrl.errors import (
    DeviceMemoryFullError,
    DeviceUnavailableError,
    InvalidRequestError,
    StateLostError,
)
from plexrl.statemanager.device.backend import DeviceAllocation, DeviceKind, DeviceUsage
from plexrl.statemanager.device.mapping import PAGE, map_file, move, punch, set_zero, unmap
from plexrl.statemanager.device.memory import ByteRun
from plexrl.statemanager.device.segments import (
    SEGMENT_BYTES_MAX,
    SEGMENT_BYTES_MIN,
    AddressTable,
    leading,
    segment_sizes,
)

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""F_SEAL_SEAL prevents a worker from sealing the segment against writes."""


@dataclass(slots=True, eq=False)
class _Segment:
    fd: int
    nbytes: int
    address: int
    uid: int | None
    """User whose workers have held it; absent: none."""
    is_clean: bool


class CpuAllocation:
    """Implements `DeviceAllocation`. No thread may use it while another ends it."""

    def __init__(self, segments: Sequence[_Segment]) -> None:
        self._segments = tuple(segments)
        self._table = AddressTable([(s.address, s.nbytes) for s in segments])
        self.nbytes = self._table.nbytes
        self.segment_bytes = tuple(segment.nbytes for segment in segments)

    @property
    def uid(self) -> int:
        """User of the worker."""
        self._check()
        uid = self._segments[0].uid
        assert uid is not None, "an allocation is for a user"
        return uid

    @property
    def is_clean(self) -> bool:
        return all(segment.is_clean for segment in self._segments)

    def read(self, runs: Sequence[ByteRun]) -> None:
        """As `DeviceMemory.read`; on the calling thread, and several may call at once."""
        self._check()
        for run in runs:
            target = run.address
            for address, count in self._table.split(run.offset, run.nbytes):
                move(target, address, count)
                target += count

    def write(self, runs: Sequence[ByteRun]) -> None:
        """As `DeviceMemory.write`; on the calling thread, and several may call at once."""
        self._check()
        self._dirty()
        for run in runs:
            source = run.address
            for address, count in self._table.split(run.offset, run.nbytes):
                move(address, source, count)
                source += count

    def clear(self, offset: int, nbytes: int) -> None:
        self._check()
        for address, count in self._table.split(offset, nbytes):
            set_zero(address, count)

    def descriptors(self, *, read_only: bool = False) -> list[int]:
        self._check()
        if read_only:
            flags = os.O_RDONLY | os.O_CLOEXEC
            return [os.open(f"/proc/self/fd/{segment.fd}", flags) for segment in self._segments]
        # The worker may write from now on.
        self._dirty()
        return [os.dup(segment.fd) for segment in self._segments]

    def end(self) -> tuple[_Segment, ...]:
        """Detach and return the segments, for the device."""
        self._check()
        segments, self._segments = self._segments, ()
        return segments

    def _dirty(self) -> None:
        for segment in self._segments:
            segment.is_clean = False

    def _check(self) -> None:
        if not self._segments:
            raise StateLostError("the worker has returned this memory: load its state first")


class CpuDevice:
    """Implements `DeviceBackend` for the node's single CPU device. Allocated and idle memory
    together never exceed the peak of allocated memory."""

    kind = DeviceKind.CPU

    def __init__(self, *, bytes_max: int | None = None, prefault_bytes: int = 0) -> None:
        """`bytes_max`: capacity, including idle memory; absent: unbounded. `prefault_bytes`: memory
        to prefault now, in segments of the usual size."""
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._ended = threading.Condition(self._lock)
        self._ending_bytes = 0
        """Bytes of freed segments that are not destroyed yet."""
        self._lent_bytes = 0
        self._idle: list[_Segment] = []
        """In the order in which they became idle."""
        count = min(prefault_bytes, bytes_max or prefault_bytes) // SEGMENT_BYTES_MAX
        self._lent_bytes_peak = count * SEGMENT_BYTES_MAX
        self._idle += [_make(SEGMENT_BYTES_MAX) for _ in range(count)]

    def allocate(self, nbytes: int, *, device: int, uid: int) -> CpuAllocation:
        _check_device(device)
        return CpuAllocation(self._segments_for(segment_sizes(nbytes), uid))

    def allocate_part(
        self, nbytes: int, *, device: int, uid: int, bytes_max: int, bytes_wanted: int
    ) -> CpuAllocation | None:
        _check_device(device)
        sizes = leading(segment_sizes(nbytes), bytes_max, bytes_wanted)
        return CpuAllocation(self._segments_for(sizes, uid)) if sizes else None

    def extend(self, part: DeviceAllocation, nbytes: int) -> CpuAllocation:
        assert isinstance(part, CpuAllocation)
        rest = self._segments_for(segment_sizes(nbytes)[len(part.segment_bytes) :], part.uid)
        # Sizes only fall, so the order is that of an arena that is allocated at once.
        return CpuAllocation((*part.end(), *rest))

    def adopt(
        self, fds: Sequence[int], segment_bytes: Sequence[int], *, device: int, uid: int
    ) -> CpuAllocation:
        _check_device(device)
        if not fds or len(fds) != len(segment_bytes):
            raise InvalidRequestError(
                f"{len(fds)} descriptors came for {len(segment_bytes)} segments"
            )
        for fd, nbytes in zip(fds, segment_bytes, strict=True):
            _check_segment(fd, nbytes)
        with self._lock:
            self._count_lent(sum(segment_bytes))
            surplus = self._take_surplus()
        _discard(surplus)
        taken: list[_Segment] = []
        try:
            for fd, nbytes in zip(fds, segment_bytes, strict=True):
                taken.append(_take_over(fd, nbytes, uid))
        except OSError as error:
            _destroy(taken)
            with self._lock:
                self._lent_bytes -= sum(segment_bytes)
            raise InvalidRequestError(f"a segment cannot be mapped ({error})") from error
        return CpuAllocation(taken)

    def recycle(self, allocation: DeviceAllocation) -> None:
        assert isinstance(allocation, CpuAllocation)
        segments = allocation.end()
        with self._lock:
            self._lent_bytes -= allocation.nbytes
            self._idle += segments
            surplus = self._take_surplus()
        _discard(surplus)

    def free(self, allocation: DeviceAllocation, *, is_unmapped: bool = False) -> None:
        """See `DeviceBackend.free`. Without `is_unmapped`, another worker that returned these
        segments before keeps their pages until it drops its mapping."""
        assert isinstance(allocation, CpuAllocation)
        segments = allocation.end()
        with self._lock:
            self._lent_bytes -= allocation.nbytes
            self._ending_bytes += allocation.nbytes
        # Unmapping takes as long as a copy, and no caller needs to wait for it.
        threading.Thread(target=self._end, args=(segments, is_unmapped), daemon=True).start()

    def _end(self, segments: Sequence[_Segment], is_unmapped: bool) -> None:
        """Destroy segments one at a time, because an allocation may wait for the memory."""
        for segment in segments:
            try:
                (_discard if is_unmapped else _destroy)([segment])
            finally:
                with self._lock:
                    self._ending_bytes -= segment.nbytes
                    self._ended.notify_all()

    def release_idle(self, device: int) -> None:
        """See `DeviceBackend.release_idle`; prefaulted memory is kept for the next workers."""

    def pci_addresses(self) -> tuple[str, ...]:
        return ()

    def index_of(self, uuid: str) -> int:
        raise DeviceUnavailableError(f"this StateManager has CPU memory only, and no GPU {uuid!r}")

    def usage(self, device: int) -> DeviceUsage:
        _check_device(device)
        with self._lock:
            idle_bytes = sum(segment.nbytes for segment in self._idle)
            used_bytes = self._lent_bytes + idle_bytes
            return DeviceUsage(
                lent_bytes=self._lent_bytes,
                idle_bytes=idle_bytes,
                free_bytes=None if self._bytes_max is None else self._bytes_max - used_bytes,
            )

    def process_bytes(self, device: int) -> Mapping[int, int] | None:  # noqa: ARG002
        """See `DeviceBackend.process_bytes`; workers have device memory in their arenas only."""
        return {}

    def register_host(self, address: int, nbytes: int) -> None:
        """See `DeviceBackend.register_host`; no effect, because CPU copies need no pinning."""

    def unregister_host(self, address: int, nbytes: int) -> None:
        """See `DeviceBackend.unregister_host`."""

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
            self._ended.wait_for(lambda: not self._ending_bytes)
        _discard(idle)

    def _segments_for(self, sizes: Sequence[int], uid: int) -> list[_Segment]:
        """Segments of these sizes, in that order."""
        with self._lock:
            self._count_lent(sum(sizes))
            found, missing = self._take_idle(sizes, uid)
            surplus = self._take_surplus()
        _discard(surplus)
        try:
            for size in missing:
                found.append(_make(size))
        except OSError as error:
            with self._lock:
                self._lent_bytes -= sum(sizes)
                self._idle += found
            raise DeviceMemoryFullError(
                f"no memory for {sum(sizes)} bytes of an arena ({error}): run fewer jobs on this "
                "node",
                needed_bytes=sum(sizes),
            ) from error
        for segment in found:
            segment.uid = uid
        # Every arena has the same order, regardless of the segments' history.
        return sorted(found, key=lambda s: -s.nbytes)

    def _count_lent(self, nbytes: int) -> None:
        if self._bytes_max is not None and self._lent_bytes + nbytes <= self._bytes_max:
            there = self._bytes_max - nbytes
            self._ended.wait_for(lambda: self._lent_bytes + self._ending_bytes <= there)
        if self._bytes_max is not None and self._lent_bytes + nbytes > self._bytes_max:
            raise DeviceMemoryFullError(
                f"an arena of {nbytes} bytes does not fit: {self._lent_bytes} of "
                f"{self._bytes_max} are allocated: offload another job, or raise device_bytes",
                needed_bytes=nbytes,
                lent_bytes=self._lent_bytes,
                bytes_max=self._bytes_max,
            )
        self._lent_bytes += nbytes
        self._lent_bytes_peak = max(self._lent_bytes_peak, self._lent_bytes)

    def _take_idle(self, sizes: Sequence[int], uid: int) -> tuple[list[_Segment], list[int]]:
        """Idle segments of these sizes for `uid`, and the sizes without a match.

        The most recently used segments first, because they may still be in the processor's cache.
        """
        found: list[_Segment] = []
        missing = []
        for size in sizes:
            for index in reversed(range(len(self._idle))):
                segment = self._idle[index]
                if segment.nbytes == size and segment.uid in (None, uid):
                    found.append(self._idle.pop(index))
                    break
            else:
                missing.append(size)
        return found, missing

    def _take_surplus(self) -> list[_Segment]:
        """Idle segments beyond the peak; the caller destroys them without the lock."""
        excess = self._lent_bytes + sum(s.nbytes for s in self._idle) - self._lent_bytes_peak
        surplus: list[_Segment] = []
        while excess > 0 and self._idle:
            surplus.append(self._idle.pop(0))
            excess -= surplus[-1].nbytes
        return surplus


def _make(nbytes: int) -> _Segment:
    fd = os.memfd_create("plexrl-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        return _Segment(fd, nbytes, map_file(fd, nbytes), uid=None, is_clean=True)
    except BaseException:
        os.close(fd)
        raise


def _take_over(fd: int, nbytes: int, uid: int) -> _Segment:
    address = map_file(fd, nbytes)
    try:
        return _Segment(os.dup(fd), nbytes, address, uid, is_clean=False)
    except BaseException:
        unmap(address, nbytes)
        raise


def _check_segment(fd: int, nbytes: int) -> None:
    """Refuse a file that its owner could truncate, or that has another size.

    Raises:
        InvalidRequestError: the file is not a segment.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidRequestError(
            f"a segment must be a sealed memory file, and this file is not ({error}): pass back "
            "what the daemon sent"
        ) from error
    if seals != SEALS:
        raise InvalidRequestError(
            f"a segment has the seals {SEALS:#x}, and this file has {seals:#x}: pass back what the "
            "daemon sent"
        )
    there = os.fstat(fd)
    # Another page size indicates a huge-page file, whose pages may be missing.
    if there.st_size != nbytes or nbytes < SEGMENT_BYTES_MIN or there.st_blksize != PAGE:
        raise InvalidRequestError(
            f"a segment of {nbytes} bytes is expected; the file has {there.st_size}: pass back "
            "what the daemon sent"
        )


def _discard(segments: Sequence[_Segment]) -> None:
    """Destroy idle segments, which workers may still have mapped outside of their arenas."""
    for segment in segments:
        punch(segment.address, segment.nbytes)
    _destroy(segments)


def _destroy(segments: Iterable[_Segment]) -> None:
    for segment in segments:
        unmap(segment.address, segment.nbytes)
        os.close(segment.fd)


def _check_device(device: int) -> None:
    if device != 0:
        raise InvalidRequestError(f"a CPU node has device 0 only, not device {device}")
