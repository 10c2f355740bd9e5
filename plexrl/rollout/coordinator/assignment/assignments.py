"""Which trajectories the instances have, and which are on their way to them.

The order of commands that depend on each other is kept in two ways: an instance runs its commands
in the order of issue, and a trajectory that is still on its way back from another instance is
routed when it has arrived. What is routed after it to the same instance waits for it, since an
engine serves first what comes first.

Invariant: the first of those on their way to an instance is still on its way back from another.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from plexrl.errors import InvalidRequestError, InvariantError
from plexrl.rollout.coordinator.assignment.speculation import SpeculativeState
from plexrl.rollout.coordinator.messages import Abort, Interrupt, RolloutCommand, Route, Stopped
from plexrl.rollout.instances.expected_instance import ExpectedInstance
from plexrl.rollout.trajectories.record import (
    InstanceId,
    Trajectory,
    TrajectoryId,
    TrajectoryState,
)
from plexrl.rollout.trajectories.server import TrajectoryServer


class Assignments:
    """Gives trajectories to instances and takes them back."""

    def __init__(
        self,
        trajectories: TrajectoryServer,
        instances: dict[InstanceId, ExpectedInstance] | None = None,
    ) -> None:
        """`instances` is the state of an earlier one, of which this becomes the owner; what they
        have is in `trajectories`."""
        self.expected = SpeculativeState()
        if instances is not None:
            self.expected.instances = instances
        self._trajectories = trajectories
        self._target: dict[TrajectoryId, InstanceId] = {
            each: instance for instance, at in self.expected.instances.items() for each in at.coming
        }
        """The instance of each trajectory that is routed and not sent: of `coming` of all."""

    @property
    def instances(self) -> dict[InstanceId, ExpectedInstance]:
        """The instances that have joined."""
        return self.expected.instances

    def add(self, trajectory: TrajectoryId, instance: InstanceId) -> None:
        """Appends to what is on its way to the instance; `release` sends it."""
        self.expected.added(instance)
        self.instances[instance].coming.append(trajectory)
        self._target[trajectory] = instance

    def release(self) -> list[RolloutCommand]:
        """Sends what is on its way to an instance, in the order of routing, up to the first one
        that is still on its way back from another."""
        commands: list[RolloutCommand] = []
        for instance, expected in self.instances.items() if self._target else ():
            sent: list[Trajectory] = []
            for each in expected.coming:
                record = self._held(each)
                if record.state is not TrajectoryState.WAITING:
                    break
                self._trajectories.route(record, instance, expected.version)
                del self._target[each]
                sent.append(record)
            del expected.coming[: len(sent)]
            commands += _routes(instance, sent)
        return commands

    def interrupt(self, returned: Mapping[InstanceId, list[TrajectoryId]]) -> list[RolloutCommand]:
        """The instances are to return these trajectories."""
        commands: list[RolloutCommand] = []
        for instance, ids in returned.items():
            for id_ in ids:
                self._trajectories.interrupt(self._held(id_))
            if ids:
                self.expected.stop_issued(instance, ids)
                commands.append(Interrupt(instance=instance, trajectories=tuple(ids)))
        return commands

    def to_drain(self) -> dict[InstanceId, list[TrajectoryId]]:
        """The trajectories that draining instances have and were not told to return."""
        found = {
            name: [
                each.id
                for each in self._trajectories.on_instance(name)
                if each.state is TrajectoryState.ROUTED
            ]
            for name, expected in self.instances.items()
            if expected.is_draining
        }
        return {name: ids for name, ids in found.items() if ids}

    def abort(self, records: Iterable[Trajectory]) -> list[RolloutCommand]:
        """Stop these trajectories; their tokens are not wanted any more."""
        stops: dict[InstanceId, list[TrajectoryId]] = {}
        for record in records:
            self._cancel(record.id)
            # An instance that is to return it discards it just as well.
            is_leaving = record.state is TrajectoryState.INTERRUPTING
            is_held = self._trajectories.abort(record)
            if is_held and not is_leaving and record.instance is not None:
                stops.setdefault(record.instance, []).append(record.id)
        for instance, ids in stops.items():
            self.expected.stop_issued(instance, ids)
        return [Abort(instance=name, trajectories=tuple(ids)) for name, ids in stops.items()]

    def generated(self, instance: InstanceId, trajectory: TrajectoryId) -> None:
        """A trajectory is complete, and so goes to no other instance."""
        self.expected.completed(instance, trajectory)
        self._cancel(trajectory)

    def stopped(self, event: Stopped) -> None:
        """An instance of those that have joined has carried out an `Interrupt` or an `Abort`.

        Raises:
            InvalidRequestError: it returned others than it was told to stop.
        """
        left = self.expected.stopped(event.instance)
        segments = {trajectory.trajectory: trajectory.segments for trajectory in event.trajectories}
        if segments.keys() != set(left):
            raise InvalidRequestError(
                f"instance {event.instance} stopped trajectories {sorted(segments)} and was to "
                f"stop {sorted(left)}: return each one that it has not reported as ended"
            )
        records = [self._held(each) for each in left]
        for record in records:
            if record.state is TrajectoryState.INTERRUPTING:
                record.check_segments(segments[record.id])
        for record in records:
            if record.state is TrajectoryState.ABORTING:
                self._trajectories.discarded(record)
            else:
                self._trajectories.take_back(record, segments[record.id])
        self.expected.answered(event.instance)

    def lost(self, instance: InstanceId) -> None:
        """An instance of those that have joined has ended; what it had is to be routed anew."""
        for trajectory in self.instances[instance].coming:
            del self._target[trajectory]
        for record in self._trajectories.on_instance(instance):
            if record.state is TrajectoryState.ABORTING:
                self._trajectories.discarded(record)
            else:
                self._trajectories.take_back(record, ())
        self.expected.lost(instance)

    def _cancel(self, trajectory: TrajectoryId) -> None:
        target = self._target.pop(trajectory, None)
        if target is not None:
            self.instances[target].coming.remove(trajectory)
            self.expected.added(target, -1)

    def _held(self, trajectory: TrajectoryId) -> Trajectory:
        record = self._trajectories.get(trajectory)
        assert record is not None, "what is assigned is held"
        return record

    def check_invariants(self) -> None:
        """Raises InvariantError: the invariant of this module does not hold."""
        coming = {e: name for name, at in self.instances.items() for e in at.coming}
        if coming != self._target:
            raise InvariantError(f"{self._target} are to be routed", law="one target each")
        for name, expected in self.instances.items():
            for each in expected.coming[:1]:
                if self._held(each).state is not TrajectoryState.INTERRUPTING:
                    raise InvariantError(f"trajectory {each} is not sent to {name}", law="sent")


def _routes(instance: InstanceId, sent: Iterable[Trajectory]) -> list[RolloutCommand]:
    """One that has failed has a `Route` of its own: all of a `Route` may fail with it."""
    parts = groupby(sent, lambda route: route.id if route.failures else None)
    return [
        Route(instance=instance, trajectories=tuple(each.id for each in part)) for _, part in parts
    ]
