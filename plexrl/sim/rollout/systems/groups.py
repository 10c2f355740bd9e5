"""Groups in flight: which trajectories of a prompt have ended."""

from collections.abc import Sequence

from plexrl.sim.rollout.engine.trajectory import SimulatedTrajectory
from plexrl.sim.rollout.workload import Prompts


class PromptGroups:
    """Takes prompts in order and collects their trajectories."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self.started = 0
        """Number of prompts taken so far."""
        self._members: dict[int, list[SimulatedTrajectory]] = {}
        self._left: dict[int, int] = {}

    def take(self, count: int) -> list[SimulatedTrajectory]:
        """The trajectories of the next `count` prompts."""
        taken = []
        for prompt in range(self.started, self.started + count):
            members = self._prompts.group(prompt)
            self._members[prompt] = members
            self._left[prompt] = len(members)
            taken += members
        self.started += count
        return taken

    def finished(
        self, trajectories: Sequence[SimulatedTrajectory]
    ) -> list[list[SimulatedTrajectory]]:
        """Groups of which these were the last trajectories."""
        whole = []
        for trajectory in trajectories:
            self._left[trajectory.group] -= 1
            if not self._left[trajectory.group]:
                del self._left[trajectory.group]
                whole.append(self._members.pop(trajectory.group))
        return whole
