"""Threads that move bytes, and the buffers that bytes pass through on their way to a disk.

There are two small thread pools. One splits copies between memories, because one thread does not
saturate the memory bandwidth. The other keeps a drive's queue full. Tasks of one pool never wait
for the other.
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
from plexrl.statemanager.bytes.mapped_memory import address_of
from plexrl.statemanager.device.memory import ByteRun

BLOCK_BYTES = 4 << 20
"""Block size of a drive's requests and of checksums."""
THREADED_BYTES_MIN = 4 << 20
"""Minimum size of a threaded copy; a smaller one ends before a second thread wakes up."""
PIECE_BYTES = 16 << 20
"""Size of the pieces that threads take."""
SPLIT_ALIGNMENT = 4096
DATA_THREADS_MAX = 4
"""More threads gain little: two nearly reach a CPU socket's bandwidth."""

Copy = Callable[[Sequence[ByteRun]], None]
OnMap = Callable[[int, int], None]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """Page-aligned memory of `BLOCK_BYTES`, usable by drives and devices."""

    address: int
    view: memoryview


class DataPlane:
    """Copies bytes on threads. Thread-safe."""

    def __init__(
        self,
        *,
        data_threads: int | None = None,
        queue_depth: int = 8,
        on_map: OnMap | None = None,
        on_unmap: OnMap | None = None,
    ) -> None:
        """`data_threads` absent: one per core, up to `DATA_THREADS_MAX`."""
        self.data_threads = data_threads or min(DATA_THREADS_MAX, os.cpu_count() or 1)
        self._queue_depth = queue_depth
        self._movers = ThreadPoolExecutor(self.data_threads, thread_name_prefix="mover")
        self._drivers = ThreadPoolExecutor(queue_depth, thread_name_prefix="nvme")
        self._on_unmap = on_unmap
        # One buffer for each thread, so that no thread waits for one while it holds another.
        count = queue_depth + self.data_threads
        self._memory = mmap.mmap(-1, count * BLOCK_BYTES)
        self._address = address_of(self._memory)
        if on_map is not None:
            on_map(self._address, len(self._memory))
        self._buffers: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        whole = memoryview(self._memory)
        for start in range(0, len(self._memory), BLOCK_BYTES):
            self._buffers.put(
                StagingBuffer(self._address + start, whole[start : start + BLOCK_BYTES])
            )

    @contextmanager
    def buffer(self) -> Iterator[StagingBuffer]:
        """Wait for a free buffer. A thread must not take a second one meanwhile."""
        buffer = self._buffers.get()
        try:
            yield buffer
        finally:
            self._buffers.put(buffer)

    def copy(self, runs: Sequence[ByteRun], copy: Copy) -> None:
        """Call `copy` for all runs, on several threads if they are large."""
        total = sum(run.nbytes for run in runs)
        if total < THREADED_BYTES_MIN or self.data_threads == 1:
            copy(runs)
            return
        pieces = -(-total // PIECE_BYTES)
        left = deque(split(runs, total, max(pieces, self.data_threads)))

        def work() -> None:
            # All threads, the caller too, take work from one list. So on a busy machine no
            # copy waits for a thread without a CPU.
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

    def spread(self, task: Callable[[int], ResultT], places: Iterable[int]) -> list[ResultT]:
        """The results of `task` for each offset, in order, computed on the data threads. After a
        failure, too, no task runs any more: the memory that tasks use may go after the return."""
        tasks = [self._movers.submit(task, place) for place in places]
        try:
            return [task.result() for task in tasks]
        finally:
            wait([task for task in tasks if not task.cancel()])

    def pipeline(
        self, tasks: Iterable[Callable[[], None]], cancelled: threading.Event | None = None
    ) -> None:
        """Run drive tasks, `queue_depth` at once. Raises the error of the first that fails.

        Raises:
            OperationCancelledError: `cancelled` was set; running tasks have finished.
        """
        running: set[Future[None]] = set()
        try:
            for task in tasks:
                if cancelled is not None and cancelled.is_set():
                    raise OperationCancelledError("the move was cancelled for another one")
                running.add(self._drivers.submit(task))
                if len(running) >= self._queue_depth:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _finish(done)
        finally:
            wait(running)
        _finish(running)

    def close(self) -> None:
        """Finish the running tasks and end the threads."""
        self._movers.shutdown()
        self._drivers.shutdown()
        if self._on_unmap is not None:
            self._on_unmap(self._address, len(self._memory))


def split(runs: Sequence[ByteRun], total: int, count: int) -> list[list[ByteRun]]:
    """The runs' bytes in up to `count` shares of about equal size, in order."""
    size = -(-total // count // SPLIT_ALIGNMENT) * SPLIT_ALIGNMENT
    shares: list[list[ByteRun]] = [[]]
    free = size
    for run in runs:
        if run.nbytes <= free:
            shares[-1].append(run)
            free -= run.nbytes
            continue
        done = 0
        while done < run.nbytes:
            if free == 0:
                shares.append([])
                free = size
            nbytes = min(free, run.nbytes - done)
            shares[-1].append(ByteRun(run.offset + done, run.address + done, nbytes))
            done += nbytes
            free -= nbytes
    return shares


def _finish(futures: Iterable[Future[None]]) -> None:
    """Wait for all futures, then raise the error of one that failed."""
    futures = list(futures)
    wait(futures)
    for future in futures:
        future.result()
