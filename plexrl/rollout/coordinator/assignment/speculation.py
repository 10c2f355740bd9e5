"""The state that each instance will have when its commands have taken effect (StaleFlow §5.2).

A snapshot is used only if it shows that state, `P` in the paper, for every instance: otherwise it
was taken before a command took effect. Table 1 says how commands change `P`. Two cases are added:

- A trajectory completes before its `Interrupt` or `Abort` arrives. The instance counts it as
  completed, so `P` counts it again, unless the instance was told to pull after that.
- A command is not answered yet. The snapshot is refused, whatever it shows.
"""

from collections.abc import Iterable, Sequence

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.expected_instance import ExpectedInstance
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.trajectories.record import InstanceId, TrajectoryId


class SpeculativeState:
    """Expected version and number of trajectories of each instance."""

    def __init__(self) -> None:
        self.instances: dict[InstanceId, ExpectedInstance] = {}

    def joined(
        self,
        instance: InstanceId,
        version: int,
        kv_budget: float,
        gpus: int,
        *,
        is_with_trainer: bool = False,
    ) -> None:
        """A new instance without work. Raises InvalidRequestError: it can run nothing."""
        if not kv_budget > 0 or gpus < 1:
            raise InvalidRequestError(
                f"instance {instance} has a KV cache of {kv_budget} and {gpus} GPUs: it can run "
                "nothing"
            )
        self.instances[instance] = ExpectedInstance(
            version=version, kv_budget=kv_budget, gpus=gpus, is_with_trainer=is_with_trainer
        )

    def lost(self, instance: InstanceId) -> None:
        """The instance ended."""
        del self.instances[instance]

    def pull_issued(self, instance: InstanceId, version: int) -> None:
        """All its trajectories have been interrupted before."""
        expected = self.instances[instance]
        expected.version = version
        expected.trajectories = 0
        expected.pulls += 1
        expected.pulls_unanswered += 1

    def pulled(self, instance: InstanceId, version: int) -> None:
        """The instance got this version, which may be newer than that of the command.

        Raises InvalidRequestError: it was not told to pull, or got an older version.
        """
        expected = self.instances[instance]
        if not expected.pulls_unanswered:
            raise InvalidRequestError(f"instance {instance} was not told to pull: send no `Pulled`")
        if version < expected.version:
            raise InvalidRequestError(
                f"instance {instance} pulled version {version} and was told to pull "
                f"{expected.version}: pull the newest version"
            )
        expected.pulls_unanswered -= 1
        expected.version = version

    def switch_issued(self, instance: InstanceId) -> None:
        """A `SwitchTp` was issued; there is none before it that is not answered."""
        self.instances[instance].is_switching = True

    def switched(self, instance: InstanceId) -> None:
        """A `SwitchTp` is answered. Raises InvalidRequestError: there is none."""
        expected = self.instances[instance]
        if not expected.is_switching:
            raise InvalidRequestError(
                f"instance {instance} has no unanswered SwitchTp: send one `TpSwitched` each"
            )
        expected.is_switching = False

    def added(self, instance: InstanceId, count: int = 1) -> None:
        """Trajectories are routed there; -1: one of them will not come, or has failed there."""
        self.instances[instance].trajectories += count

    def stop_issued(self, instance: InstanceId, trajectories: Sequence[TrajectoryId]) -> None:
        """An `Interrupt` or `Abort` was issued."""
        expected = self.instances[instance]
        expected.trajectories -= len(trajectories)
        expected.stops.append(dict.fromkeys(trajectories, expected.pulls))

    def stopped(self, instance: InstanceId) -> tuple[TrajectoryId, ...]:
        """The oldest unanswered `Interrupt` or `Abort` is answered: those of its trajectories
        that have not ended. Changes nothing; `answered` does.

        Raises InvalidRequestError: there is no such command.
        """
        expected = self.instances[instance]
        if not expected.stops:
            raise InvalidRequestError(
                f"instance {instance} has no unanswered Interrupt or Abort: send one `Stopped` each"
            )
        return tuple(expected.stops[0])

    def answered(self, instance: InstanceId) -> None:
        """Forgets the oldest unanswered `Interrupt` or `Abort` with its trajectories."""
        self.instances[instance].stops.pop(0)

    def completed(self, instance: InstanceId, trajectory: TrajectoryId) -> None:
        """A trajectory completed there: it is counted again if it was to leave."""
        expected = self.instances[instance]
        if self._ended(expected, trajectory) == expected.pulls:
            expected.trajectories += 1

    def failed(self, instance: InstanceId, trajectory: TrajectoryId) -> None:
        """A trajectory failed there, and the instance does not count it any more."""
        expected = self.instances[instance]
        if self._ended(expected, trajectory) is None:
            expected.trajectories -= 1

    def _ended(self, expected: ExpectedInstance, trajectory: TrajectoryId) -> int | None:
        """Takes the trajectory out of the command that was to stop it; returns `pulls` then."""
        for stop in expected.stops:
            if trajectory in stop:
                return stop.pop(trajectory)
        return None

    def matches(self, snapshots: Iterable[InstanceSnapshot]) -> bool:
        """True if every command is answered and the snapshot shows every instance as it is
        expected (Eq. 1)."""
        found = {snapshot.instance: snapshot for snapshot in snapshots}
        if found.keys() != self.instances.keys():
            return False
        for instance, expected in self.instances.items():
            shown = found[instance]
            count = len(shown.running) + len(shown.waiting) + shown.completed
            if expected.stops or expected.pulls_unanswered:
                return False
            if (shown.version, count) != (expected.version, expected.trajectories):
                return False
        return True
