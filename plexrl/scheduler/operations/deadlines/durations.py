"""How long what runs on a deployment's workers is expected to take, from what was measured alone.

Decisions assume a second for a kind that the deployment has not run yet (`OPERATION_S`). Nothing is
told by that number: such a run is of unknown length, and is not late.
"""

from typing import TYPE_CHECKING, Final

from plexrl.scheduler.rules.switch_cost import load_s, offload_s, round_trip_s
from plexrl.scheduler.state.machines.residency_states import Residency
from plexrl.wire.operations import OperationKind

if TYPE_CHECKING:
    from plexrl.scheduler.state.operation import Operation
    from plexrl.scheduler.state.records import Deployment, State

_OFFLOADED: Final = Residency.OFFLOADED
_LOAD: Final = OperationKind.LOAD
_OFFLOAD: Final = OperationKind.OFFLOAD
_SNAPSHOT: Final = OperationKind.SNAPSHOT
_OPTIM_STEP: Final = OperationKind.OPTIM_STEP


def run_s(state: "State", deployment: "Deployment", operation: "Operation") -> float | None:
    """Expected seconds of what runs on the workers of `deployment`; None: unknown.

    A move that was not measured is predicted from its bytes, but the first load builds the model.
    """
    kind = operation.kind
    if kind is _LOAD:
        return load_s(state, deployment) if operation.seq else None
    if kind is _OFFLOAD:
        return offload_s(state, deployment)
    known_s = deployment.demand.estimates.known_s(kind, operation.tokens)
    if kind is _SNAPSHOT and known_s is None:
        # The same copy as in an offload.
        return offload_s(state, deployment)
    return _stored_step_s(state, deployment, known_s) if is_stored(deployment, kind) else known_s


def slowest_s(deployment: "Deployment", operation: "Operation") -> float | None:
    """The slowest run of this kind, forgotten slowly; None: there was none."""
    estimates = deployment.demand.estimates
    if is_stored(deployment, operation.kind):
        return estimates.slowest_stored_step or None
    return estimates.slowest_by_kind.get(operation.kind)


def is_stored(deployment: "Deployment", kind: OperationKind) -> bool:
    """Whether an operation of this kind that runs now is a step of the stored state, which takes
    another time than one under the lock."""
    return kind is _OPTIM_STEP and deployment.wpg.residency is _OFFLOADED


def _stored_step_s(
    state: "State", deployment: "Deployment", under_lock_s: float | None
) -> float | None:
    """A step of the stored state computes as one under the lock does, on the CPU, and reads and
    writes the whole state besides."""
    measured_s = deployment.demand.estimates.stored_step_seconds
    if measured_s is not None or under_lock_s is None:
        return measured_s
    return under_lock_s + round_trip_s(state, deployment)
