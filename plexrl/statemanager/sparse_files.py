"""Which parts of a sparse file have memory or disk behind them."""

import os

from plexrl.statemanager.free_ranges import Piece


def touched(fd: int, number: int, nbytes: int) -> list[Piece]:
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
