"""The instances of a rollout that are free until its next round begins.

They hold no trajectory, get none, and pull no weights. So the scheduler can give their GPUs to
others. If another instance is lost, the round needs all of them again.
"""

from collections.abc import Mapping, Sequence

from plexrl.errors import InvariantError
from plexrl.rollout.instances.cost_model import CostModel
from plexrl.rollout.instances.expected_instance import ExpectedInstance
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.policies.scale_down import (
    HeldScaleDown,
    RoundInstance,
    ScaleDown,
    ScaleDownSettings,
    UnfinishedSample,
)
from plexrl.rollout.policies.tail_batching.rounds import Rounds
from plexrl.rollout.trajectories.record import (
    GENERATED,
    InstanceId,
    TrajectoryId,
    TrajectoryState,
)
from plexrl.rollout.trajectories.server import TrajectoryServer


class FreedInstances:
    """Frees half of the instances of a round, at most once."""

    def __init__(
        self, settings: ScaleDownSettings | None, held: HeldScaleDown | None = None
    ) -> None:
        """Without `settings` no instance is freed. `held` is the state of an earlier one, of which
        this becomes the owner."""
        self.held = HeldScaleDown() if held is None else held
        self._scale_down = None if settings is None else ScaleDown(settings, self.held)

    def change(self, settings: ScaleDownSettings | None) -> None:
        """Another policy."""
        if settings is None:
            self.held.freed = []
        self._scale_down = None if settings is None else ScaleDown(settings, self.held)

    def begin_round(self) -> None:
        """All instances take part again."""
        if self._scale_down is not None:
            self._scale_down.begin_round()

    def lost(self, instance: InstanceId) -> None:
        """An instance has ended."""
        freed = self.held.freed
        self.held.freed = (
            [other for other in freed if other != instance] if instance in freed else []
        )

    def others(self, snapshots: Sequence[InstanceSnapshot]) -> list[InstanceSnapshot]:
        """The instances that take part in the round."""
        return [snapshot for snapshot in snapshots if snapshot.instance not in self.held.freed]

    def free(
        self,
        server: TrajectoryServer,
        rounds: Rounds,
        snapshots: Sequence[InstanceSnapshot],
        expected: Mapping[InstanceId, ExpectedInstance],
        model: CostModel,
    ) -> dict[InstanceId, list[TrajectoryId]] | None:
        """Frees instances, if it is time to decide: what each one has to return. None: it is not.

        Every command is answered, and `snapshots` are of all instances.
        """
        core = self._scale_down
        progress = None if core is None or self.held.is_scaled_down else rounds.progress(server)
        if core is None or progress is None or not core.is_due(*progress):
            return None
        tokens: dict[TrajectoryId, int] = {}
        for snapshot in snapshots:
            tokens |= zip(snapshot.running, snapshot.running_tokens, strict=True)
            tokens |= zip(snapshot.waiting, snapshot.waiting_tokens, strict=True)
        unfinished = [
            UnfinishedSample(
                instance=record.instance,
                prompt_tokens=record.prompt_tokens,
                response_tokens=tokens.get(record.id, record.length) - record.prompt_tokens,
            )
            for group in server.groups
            for record in server.members(group)
            if record.state not in GENERATED
        ]
        instances = [
            RoundInstance(
                instance=snapshot.instance,
                gpus=expected[snapshot.instance].gpus,
                kv_tokens=expected[snapshot.instance].kv_budget / model.k5,
                is_with_trainer=expected[snapshot.instance].is_with_trainer,
            )
            for snapshot in snapshots
            if snapshot.serves
        ]
        freed = core.decide(*progress, instances, unfinished, server.lengths.recent)
        return {instance: _routed(server, instance) for instance in freed}

    def check_invariants(
        self, server: TrajectoryServer, expected: Mapping[InstanceId, ExpectedInstance]
    ) -> None:
        """Raises InvariantError: an instance that is free has, or gets, a trajectory."""
        for each in self.held.freed:
            if each not in expected or expected[each].coming or _routed(server, each):
                raise InvariantError(f"instance {each} is not free", law="freed instances")


def _routed(server: TrajectoryServer, instance: InstanceId) -> list[TrajectoryId]:
    """The trajectories that an instance has and is not told to stop."""
    held = server.on_instance(instance)
    return [trajectory.id for trajectory in held if trajectory.state is TrajectoryState.ROUTED]
