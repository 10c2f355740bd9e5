"""The command that a worker receives for one operation."""

from typing import Any

import msgspec

from plexrl.wire.operations import OperationKind, params_from_json

RunName = tuple[str, int]
"""Operation id and fencing token: names one run of an operation."""


class RunCommand(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's `RunOperation`, as the router forwards it. Fields that a worker does not need
    are left out."""

    operation: str
    kind: OperationKind
    token: int
    """Fencing token of the group lock that admits this run."""
    seq: int
    """Version of the state after this operation."""
    replay: bool = False
    """The operation completed before and is repeated to rebuild lost state."""
    params_json: str = "{}"
    sources: tuple[str, ...] = ()
    """`sync_weights`: addresses of the StateManagers that hold the published version."""
    source: str | None = None
    """`sync_weights`: deployment whose version is pulled."""
    source_seq: int = 0
    """`sync_weights`: version to pull."""
    keep_seq: int = 0
    """`offload`, `snapshot`: last complete version, kept until the new one is complete."""
    next_use_s: float | None = None
    """`offload`: expected time until the state is needed again, in seconds; absent: unknown."""
    previous_seq: int = 0
    """An earlier complete version that is kept while there is space for it; 0: none."""
    successor: str | None = None
    """`offload`: deployment that is loaded next on these devices, at version `successor_seq`;
    absent: unknown."""
    successor_seq: int = 0
    trainer_step: int = 0
    """Optimizer steps in the weights: in the pulled ones for `sync_weights`, else in those that the
    worker has."""

    @property
    def name(self) -> RunName:
        """The run that this command starts."""
        return self.operation, self.token

    def params(self) -> Any:
        """The operation's parameters, an instance of `PARAMS_BY_KIND[kind]`."""
        return params_from_json(self.kind, self.params_json)
