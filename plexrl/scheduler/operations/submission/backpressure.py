"""Back-pressure: limits of unfinished operations, for each deployment and each tenant.

Above a limit a submission is refused, with a time after which to retry, estimated from the rate at
which operations ended lately. Accepted operations are never dropped.
"""

import math

from plexrl.errors import OverloadedError
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.deployment.work import InFlight
from plexrl.scheduler.state.messages.events import OperationSubmitted
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment, State

RETRY_AFTER_S = 1.0
"""Used before an operation has ended: there is no rate yet."""
RETRY_AFTER_S_MIN = 0.05
RETRY_AFTER_S_MAX = 60.0
"""Upper bound, because the rate may change."""


def check_room(
    situation: Situation,
    event: OperationSubmitted,
    deployment: Deployment,
    source: Deployment | None,
) -> None:
    """Refuse a submission above a limit.

    Raises:
        OverloadedError: a limit is reached; `details` name it and the time to retry.
    """
    state = situation.state
    config = situation.settings.config
    for each in (deployment, source):
        if each is not None and len(each.work.queue) >= config.pending_operations_max:
            raise _refusal(
                f"{each.deployment!r} has {len(each.work.queue)} operations waiting, its bound",
                "pending_operations_max",
                each.work.in_flight,
                0,
            )
    tenant = state.jobs[deployment.job].tenant
    in_flight = state.in_flight.get(tenant)
    if in_flight is None:
        in_flight = InFlight()
    if event.payload_bytes:
        _check_bytes(
            repr(deployment.deployment),
            "deployment_payload_bytes_max",
            deployment.work.in_flight,
            event.payload_bytes,
            config.deployment_payload_bytes_max,
        )
    if in_flight.operations >= config.tenant_operations_max:
        raise _refusal(
            f"tenant {tenant!r} has {in_flight.operations} operations that are not finished, its "
            "bound",
            "tenant_operations_max",
            in_flight,
            0,
        )
    if event.payload_bytes:
        _check_bytes(
            f"tenant {tenant!r}",
            "tenant_payload_bytes_max",
            in_flight,
            event.payload_bytes,
            config.tenant_payload_bytes_max,
        )


def taken_in(state: State, deployment: Deployment, operation: Operation) -> None:
    """Count an accepted operation."""
    operation.is_counted = True
    deployment.work.in_flight.add(operation.payload_bytes)
    _of_tenant(state, deployment).add(operation.payload_bytes)


def ended(state: State, deployment: Deployment, operation: Operation, now: float) -> None:
    """Remove an ended operation from the counts."""
    operation.is_counted = False
    deployment.work.in_flight.remove(operation, now)
    _of_tenant(state, deployment).remove(operation, now)


def retry_after_s(in_flight: InFlight, missing_bytes: int) -> float:
    """Estimated seconds until an operation, or so many bytes, have ended."""
    if in_flight.gap_s is None:
        return RETRY_AFTER_S
    ends = 1
    if missing_bytes > 0 and in_flight.bytes_each >= 1:
        ends = max(1, math.ceil(missing_bytes / in_flight.bytes_each))
    return min(max(ends * in_flight.gap_s, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)


def _of_tenant(state: State, deployment: Deployment) -> InFlight:
    tenant = state.jobs[deployment.job].tenant
    found = state.in_flight.get(tenant)
    if found is None:
        found = state.in_flight[tenant] = InFlight()
    return found


def _check_bytes(
    whose: str, bound: str, in_flight: InFlight, payload_bytes: int, bytes_max: int
) -> None:
    # A payload above the limit is accepted if it is the only one.
    if not in_flight.payload_bytes:
        return
    over = in_flight.payload_bytes + payload_bytes - bytes_max
    if over > 0:
        raise _refusal(
            f"{whose} has operations with {in_flight.payload_bytes} bytes of payload that are not "
            f"finished, and {payload_bytes} more are over its bound of {bytes_max}",
            bound,
            in_flight,
            over,
        )


def _refusal(what: str, bound: str, in_flight: InFlight, missing_bytes: int) -> OverloadedError:
    return OverloadedError(
        f"{what}: wait for some to finish",
        bound=bound,
        retry_after_s=round(retry_after_s(in_flight, missing_bytes), 3),
    )
