"""The threads that move bytes, and the few buffers that bytes pass through on their way to a disk.

Two small pools: one splits a copy between memories, which one thread cannot saturate; one keeps a
drive's queue full. Their tasks never wait for one another.
"""

import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from plexrl.errors import OperationCancelledError
from plexrl.statemanager.device.memory import Run
from plexrl.statemanager.transfer.copy.mapped_memory import address_of

BLOCK_BYTES = 4 << 20
"""Of a drive's requests and of a digest."""
THREADED_BYTES_MIN = 4 << 20
"""A smaller copy is done before a second thread has woken up."""
PIECE_BYTES = 16 << 20
"""That a thread takes at a time."""
SPLIT_ALIGNMENT = 4096
DATA_THREADS_MAX = 4
"""More gain little: two already come near a socket's bandwidth."""

Copy = Callable[[Sequence[Run]], None]
OnMap = Callable[[int, int], None]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Page-aligned memory of `BLOCK_BYTES`, which a drive and a device both take."""

    address: int
    view: memoryview


class DataPlane:
    """Thread-safe."""

    def __init__(
        self,
        *,
        data_threads: int | None = None,
        queue_depth: int = 8,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """`data_threads` absent: as many as there are cores, up to `DATA_THREADS_MAX`."""
        self.data_threads = data_threads or min(DATA_THREADS_MAX, os.cpu_count() or 1)
        self._queue_depth = queue_depth
        self._movers = ThreadPoolExecutor(self.data_threads, thread_name_prefix="mover")
        self._drivers = ThreadPoolExecutor(queue_depth, thread_name_prefix="nvme")
        self._on_unmap = on_unmap
        # One for each thread that may want one: nobody waits for a buffer while holding another.
        count = queue_depth + self.data_threads
        self._memory = mmap.mmap(-1, count * BLOCK_BYTES)
        self._address = address_of(self._memory)
        if on_map is not None:
            on_map(self._address, len(self._memory))
        self._buffers: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        whole = memoryview(self._memory)
        for start in range(0, len(self._memory), BLOCK_BYTES):
            self._buffers.put(Buffer(self._address + start, whole[start : start + BLOCK_BYTES]))

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """A buffer, once one is free. Nobody may ask for a second one meanwhile."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def copy(self, runs: Sequence[Run], copy: Copy) -> None:
        """Have `copy` carry out all runs, on several threads where that is worth it."""
        total = sum(run.nbytes for run in runs)
        if total < THREADED_BYTES_MIN or self.data_threads == 1:
            copy(runs)
            return
        pieces = -(-total // PIECE_BYTES)
        left = deque(split(runs, total, max(pieces, self.data_threads)))

        def work() -> None:
            # All take from one list, the caller too: on a busy machine nobody waits for a thread
            # that does not get a processor.
            while left:
                try:
                    share = left.popleft()
                except IndexError:
                    return
                copy(share)

        others = [self._movers.submit(work) for _ in range(self.data_threads - 1)]
        try:
            work()
        except BaseException:
            left.clear()
            raise
        finally:
            _finish([other for other in others if not other.cancel()])

    def spread(self, task: Callable[[int], ResultT], places: Iterable[int]) -> Iterator[ResultT]:
        """What `task` returns for each place, in their order, worked out on the data threads."""
        return self._movers.map(task, places)

    def pipeline(
        self, tasks: Iterable[Callable[[], None]], cancelled: threading.Event | None = None
    ) -> None:
        """Run drive tasks, a queue's depth at once; raises what the first failing one raised.

        Raises:
            OperationCancelledError: `cancelled` was set; tasks under way were finished.
        """
        under_way: set[Future[None]] = set()
        try:
            for task in tasks:
                if cancelled is not None and cancelled.is_set():
                    raise OperationCancelledError("the move gave way to another")
                under_way.add(self._drivers.submit(task))
                if len(under_way) >= self._queue_depth:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    _finish(done)
        finally:
            wait(under_way)
        _finish(under_way)

    def close(self) -> None:
        """End the threads, what they do finished."""
        self._movers.shutdown()
        self._drivers.shutdown()
        if self._on_unmap is not None:
            self._on_unmap(self._address, len(self._memory))


def split(runs: Sequence[Run], total: int, count: int) -> list[list[Run]]:
    """The runs' bytes in up to `count` shares of about one size, in their order."""
    size = -(-total // count // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT
    shares: list[list[Run]] = [[]]
    room = size
    for run in runs:
        if run.nbytes <= room:
            shares[-1].append(run)
            room -= run.nbytes
            continue
        done = 0
        while done < run.nbytes:
            if room == 0:
                shares.append([])
                room = size
            nbytes = min(room, run.nbytes - done)
            shares[-1].append(Run(run.offset + done, run.address + done, nbytes))
            done += nbytes
            room -= nbytes
    return shares


def _finish(futures: Iterable[Future[None]]) -> None:
    """Wait for all, then raise what one of them raised."""
    futures = list(futures)
    wait(futures)
    for future in futures:
        future.result()
