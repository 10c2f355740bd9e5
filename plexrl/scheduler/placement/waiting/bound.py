"""An upper bound on what fits for deployments of one size: free GPUs, and groups with capacity."""

from collections.abc import Sequence

NO_FIT = -1
"""A number of bytes that is too small for every deployment."""


class FitBound:
    """May report a false positive, never a false negative: on "no" every search would fail."""

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
        """The largest state for which free GPUs suffice; `NO_FIT` if they suffice for none."""
        self._loads = loads
        """Loads of the groups that accept members, ascending."""
        self._states = states
        """The largest state that fits a group with this load or less, ascending."""
        self._load_max = load_max

    @property
    def is_empty(self) -> bool:
        """Whether nothing fits."""
        return self.free_state_bytes == NO_FIT and not self._loads

    def may_fit(self, duty: float, state_bytes: int) -> bool:
        """Whether a deployment with this duty and state may fit."""
        if state_bytes <= self.free_state_bytes:
            return True
        loads, low, high = self._loads, 0, len(self._loads)
        while low < high:
            middle = (low + high) // 2
            # The same comparison as `placement.can_take`.
            if loads[middle] + duty <= self._load_max:
                low = middle + 1
            else:
                high = middle
        return low > 0 and self._states[low - 1] >= state_bytes
