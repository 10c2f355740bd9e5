"""What a deployment was asked to be."""

from dataclasses import dataclass
from typing import Final

from plexrl.ids import DeploymentId
from plexrl.wire.operations import CheckpointSchedule, OperationKind

_SAVES: Final = frozenset({OperationKind.SAVE_CHECKPOINT})
_STEPS_AND_SAVES: Final = _SAVES | {OperationKind.OPTIM_STEP}


@dataclass(slots=True, kw_only=True)
class RequestedSpec:
    """What the controller asked for. A new layout changes it, and scarce GPUs end `exclusive`."""

    kind: str
    workers: int
    state_bytes: int
    exclusive: bool
    """It shares its groups with no other deployment."""
    spec_json: str
    created_spec_json: str = ""
    """The specification that its controller creates it with; empty: `spec_json`."""
    node_type: str = ""
    """Required node type; empty: any."""
    preemptible: bool = False
    """It uses only the idle time of a group of others, as one of its `fillers`."""
    shares_if_scarce: bool = False
    """It is `exclusive` until GPUs are scarce (`admission.automatic_sharing`)."""
    shares_for: DeploymentId | None = None
    """The deployment that waited for GPUs when it began to share; None: it did not."""
    pace: str = ""
    """As in `DeploymentCreated`. What it takes tells nothing of deployments that compute."""
    steps_in_host: bool = False
    """As in `DeploymentCreated`."""
    checkpoints: CheckpointSchedule | None = None
    """As in `DeploymentCreated`."""

    @property
    def stored_kinds(self) -> frozenset[OperationKind]:
        """Operations for which the stored state may be enough (`dispatch.stored_runs`)."""
        return _STEPS_AND_SAVES if self.steps_in_host else _SAVES

    @property
    def shares(self) -> bool:
        return not self.exclusive

    @property
    def is_undecided(self) -> bool:
        """Whether it has groups of its own, and will share them if GPUs are scarce."""
        return self.exclusive and self.shares_if_scarce

    @property
    def may_share(self) -> bool:
        """Whether it shares, or will if GPUs are scarce: its demand matters."""
        return not self.exclusive or self.shares_if_scarce

    def change_layout(self, spec_json: str) -> None:
        """A rollout's GPUs are divided in another way."""
        self.created_spec_json = self.created_spec_json or self.spec_json
        self.spec_json = spec_json

    def resize(self, state_bytes: int) -> None:
        """Its state has another size."""
        self.state_bytes = state_bytes

    def suppose(self, *, exclusive: bool) -> None:
        """For a rehearsal, which sets it back: whether the deployment shares its groups."""
        self.exclusive = exclusive

    def begin_to_share(self, waiting: DeploymentId) -> None:
        """From now on it shares its groups; `waiting` waits for GPUs."""
        self.exclusive = False
        self.shares_for = waiting
