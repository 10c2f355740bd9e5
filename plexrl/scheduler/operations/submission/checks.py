"""Checks of a submitted operation that do not depend on its deployment's state."""

from plexrl.errors import ConflictError, InvalidRequestError
from plexrl.scheduler.operations.operations import OWN_MARK
from plexrl.scheduler.state.messages.events import OperationSubmitted
from plexrl.scheduler.state.operation import Operation
from plexrl.scheduler.state.records import Deployment
from plexrl.wire.operations import PARAMS_BY_KIND, OperationKind

DEADLINE_S_MAX = 30 * 86_400
"""Maximum deadline, in seconds: a month."""


def check_source(
    event: OperationSubmitted, deployment: Deployment, source: Deployment | None
) -> None:
    """Refuse a reserved operation id, and parameters or a source that do not fit the kind of
    operation.

    Raises:
        InvalidRequestError: the id is reserved, the parameters are another kind's, a sync names no
            train deployment of its job, or another operation names a source.
    """
    if OWN_MARK in event.operation:
        raise InvalidRequestError(
            f"operation id {event.operation!r}: {OWN_MARK!r} is reserved for the scheduler"
        )
    if event.params is not None and type(event.params) is not PARAMS_BY_KIND.get(event.kind):
        raise InvalidRequestError(
            f"a {event.kind.value} has no {type(event.params).__name__}: send its own parameters"
        )
    if (event.kind == OperationKind.SYNC_WEIGHTS) != (source is not None):
        raise InvalidRequestError("sync_weights, and only it, names a source deployment")
    if event.in_flight and source is None:
        raise InvalidRequestError(f"a {event.kind.value} cannot be in_flight: only a sync can")
    if event.published and source is None:
        raise InvalidRequestError(f"a {event.kind.value} cannot be published: only a sync can")
    if source is not None and (source.job != deployment.job or source.spec.kind != "train"):
        raise InvalidRequestError(
            f"{event.source!r} is no train deployment of job {deployment.job!r}: weights are "
            "pulled from a train deployment of the same job"
        )


def check_same(known: Operation, event: OperationSubmitted) -> None:
    """Refuse an id that was used for another request.

    Raises:
        ConflictError: the id was used for another request.
    """
    same = (known.deployment, known.kind, known.params, known.source)
    asked = (event.deployment, event.kind, event.params, event.source)
    payloads = (known.payload_digest or known.payload, event.payload_digest or event.payload)
    if same != asked or payloads[0] != payloads[1]:
        raise ConflictError(
            f"operation id {event.operation!r} was used for another request: choose another"
        )


def check_deadline(deadline_s: float) -> None:
    """Refuse a deadline outside its range.

    Raises:
        InvalidRequestError: the deadline is not above 0, or above `DEADLINE_S_MAX`.
    """
    if not 0 < deadline_s <= DEADLINE_S_MAX:
        raise InvalidRequestError(
            f"deadline_s is {deadline_s:g}: give seconds above 0, {DEADLINE_S_MAX} at most"
        )
