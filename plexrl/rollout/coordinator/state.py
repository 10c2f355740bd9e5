"""The whole state of a coordinator, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.rollout.instances.expected_instance import ExpectedInstance
from plexrl.rollout.policies.scale_down import HeldScaleDown
from plexrl.rollout.policies.tail_batching.rounds import HeldPrompts
from plexrl.rollout.staleness.manager import HeldEntries, StalenessSettings
from plexrl.rollout.trajectories.record import InstanceId
from plexrl.rollout.trajectories.server import HeldTrajectories


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorState:
    """Its size is bounded by what is in flight."""

    bound: StalenessSettings
    """Settings of the coordinator that this is the state of."""
    newest_version: int
    is_trainer_free: bool
    trajectories: HeldTrajectories
    entries: HeldEntries
    instances: dict[InstanceId, ExpectedInstance]
    measured: list[tuple[float, int, float]]
    """KV cache, trajectories and seconds of the latest measured steps."""
    prompts: HeldPrompts = field(default_factory=HeldPrompts)
    scale_down: HeldScaleDown = field(default_factory=HeldScaleDown)

    def plain(self) -> dict[str, object]:
        """Mappings (their order counts), lists, text, numbers and None."""
        plain: dict[str, object] = msgspec.to_builtins(self, str_keys=True)
        return plain

    @classmethod
    def decode(cls, bound: StalenessSettings, state: Mapping[str, object]) -> "CoordinatorState":
        """The state from the return value of `plain`. Raises InvalidRequestError: it is no state,
        or not of `bound`."""
        try:
            found = msgspec.convert(state, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidRequestError(
                f"this is no state of a rollout coordinator: {error}; replay its events instead"
            ) from error
        if found.bound != bound:
            raise InvalidRequestError(
                f"the state is of a coordinator with {found.bound} and cannot go on with "
                f"{bound}: keep the staleness settings of a rollout"
            )
        return found
