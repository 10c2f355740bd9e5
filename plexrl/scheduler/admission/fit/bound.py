"""What room there is for deployments of one size: free GPUs, and groups that take members."""

from collections.abc import Sequence

NOTHING = -1
"""Bytes of state that not even the smallest deployment makes do with."""


class FitBound:
    """A question's answer errs on one side only: where it is no, every search would end without a
    place; where it is yes, one may."""

    __slots__ = ("_load_max", "_loads", "_states", "free_state_bytes")

    def __init__(
        self,
        *,
        free_state_bytes: int,
        loads: Sequence[float] = (),
        states: Sequence[int] = (),
        load_max: float = 0.0,
    ) -> None:
        self.free_state_bytes = free_state_bytes
        """The largest state for which free GPUs suffice; `NOTHING` where they do for none."""
        self._loads = loads
        """Of groups that take members, ascending."""
        self._states = states
        """The largest state that one of the groups up to this load has room for, ascending."""
        self._load_max = load_max

    @property
    def is_nothing(self) -> bool:
        """There is room for nobody."""
        return self.free_state_bytes == NOTHING and not self._loads

    def holds(self, duty: float, state_bytes: int) -> bool:
        """Whether there may be room for one of that duty with so large a state."""
        if state_bytes <= self.free_state_bytes:
            return True
        loads, low, high = self._loads, 0, len(self._loads)
        while low < high:
            middle = (low + high) // 2
            # Compared as `placement.can_take` does it.
            if loads[middle] + duty <= self._load_max:
                low = middle + 1
            else:
                high = middle
        return low > 0 and self._states[low - 1] >= state_bytes
