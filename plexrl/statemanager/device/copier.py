"""Copies between host addresses, over several threads where that is faster."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from plexrl.statemanager.device.mapping import move

CHUNK_BYTES = 4 << 20
"""What a thread takes at a time. Where this was measured, 1 to 16 MiB differed by less
than one run from the next."""

Copy = tuple[int, int, int]
"""Target, source, bytes."""


class Copier:
    """A few threads that help whoever copies. The caller always copies too, so callers that are
    many do not wait for each other."""

    def __init__(self, threads: int) -> None:
        """`threads` is how many work on one copy at most, the caller included."""
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(max(1, self._helpers), "plexrl-copy")

    def copy(self, copies: Iterable[Copy]) -> None:
        """Carry out all copies, which must not overlap; returns when they are done."""
        chunks = list(_chunks(copies))
        # A list's iterator gives each item to one thread only.
        left = iter(chunks)
        helpers = min(self._helpers, len(chunks) - 1)
        if helpers < 1 or sum(nbytes for _, _, nbytes in chunks) < 2 * CHUNK_BYTES:
            _work(left)
            return
        helping = [self._pool.submit(_work, left) for _ in range(helpers)]
        _work(left)
        for future in helping:
            # One that has not begun yet has nothing left to do.
            if not future.cancel():
                future.result()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def _work(left: Iterator[Copy]) -> None:
    for target, source, nbytes in left:
        move(target, source, nbytes)


def _chunks(copies: Iterable[Copy]) -> Iterator[Copy]:
    for target, source, nbytes in copies:
        for start in range(0, nbytes, CHUNK_BYTES):
            yield target + start, source + start, min(CHUNK_BYTES, nbytes - start)
