"""How long generated trajectories have waited for their rewards. Pure."""

from collections.abc import Mapping
from typing import Final

from plexrl.rollout.trajectories.record import TrajectoryId

KEPT_MIN: Final = 64
"""Fewer times are never swept."""


class RewardWaits:
    """When each generation ended, as far as this process has seen it."""

    def __init__(self, now: float) -> None:
        self._began_at = now
        self._ended_at: dict[TrajectoryId, float] = {}

    def generated(
        self, trajectory: TrajectoryId, unrewarded: Mapping[TrajectoryId, int], now: float
    ) -> None:
        """A trajectory was generated; `unrewarded` are those without a reward. Constant time,
        averaged."""
        self._ended_at.pop(trajectory, None)
        self._ended_at[trajectory] = now
        if len(self._ended_at) > 2 * len(unrewarded) + KEPT_MIN:
            self._ended_at = {each: at for each, at in self._ended_at.items() if each in unrewarded}

    def oldest(
        self, unrewarded: Mapping[TrajectoryId, int], now: float
    ) -> tuple[TrajectoryId, float] | None:
        """The trajectory that has waited longest, and for how long at least; None: none waits."""
        # Those of former processes have no time, and came first.
        found = min(
            unrewarded, key=lambda trajectory: self._ended_at.get(trajectory, 0.0), default=None
        )
        if found is None:
            return None
        return found, now - self._ended_at.get(found, self._began_at)
