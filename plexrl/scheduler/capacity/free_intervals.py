"""A group's free time on the ring: sorted disjoint windows, bisected and never scanned.

The windows are flat arrays, made anew from the residents' footprints whenever one comes or goes:
a footprint of a hundred cycles is a hundred windows, which numpy cuts out in one pass, and a
release gives back exactly what a reservation took, because nothing is taken apart and merged.
"""

from typing import TYPE_CHECKING

import numpy as np

from plexrl.scheduler.state.demand import Footprint, slots_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


class FreeIntervals:
    """Windows in which no resident is busy: [start, stop), a window that wraps is two."""

    def __init__(self, horizon_slots: int, busy: int = 0) -> None:
        """`busy`: the slots in which any resident is, one bit each (`Footprint.busy`)."""
        self.horizon_slots = horizon_slots
        slots = slots_of(busy, horizon_slots)
        edges = np.flatnonzero(np.diff(slots, prepend=True, append=True))
        self.starts: NDArray[np.intp] = edges[0::2]
        self.stops: NDArray[np.intp] = edges[1::2]

    def fits(self, footprint: Footprint) -> bool:
        """Whether every segment of every cycle lies inside one window."""
        intervals = footprint.intervals()
        starts, stops = intervals[:, 0], intervals[:, 1]
        over = stops > self.horizon_slots
        if over.any():
            # What passes the ring's end goes on at its start.
            starts = np.append(starts, 0)
            stops = np.append(
                np.minimum(stops, self.horizon_slots), (stops - self.horizon_slots).max()
            )
        busy = stops > starts
        starts, stops = starts[busy], stops[busy]
        if not len(self.starts):
            return not len(starts)
        at = np.searchsorted(self.starts, starts, side="right") - 1
        return bool(((at >= 0) & (stops <= self.stops[np.maximum(at, 0)])).all())
