"""What may be said to the scheduler: the parameters of every call, checked before anything is done.

A router's call says whose objects it may touch: `tenant` names the tenant, and null together with
`as_operator: true` is every tenant's. Neither has a default, so a forgotten field is no privilege.
"""

import json
import math
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from plexrl.errors import InvalidRequestError, from_wire
from plexrl.ids import BlobRef, DeploymentId, JobId, OperationId, RouterId, TenantId
from plexrl.scheduler.state.events import OperationFailed

Plain = dict[str, Any]
Scope = TenantId | None
"""The tenant whose objects a call may touch; None: every tenant's."""
CallT = TypeVar("CallT")
Ask = tuple[type[Any], Callable[[Any, Any], Awaitable[Plain]]]
"""The type of a call's parameters, and what answers it, given scope and parameters."""
Report = tuple[type[Any], Callable[[Any], Awaitable[Plain]]]
"""The type of a report, and what takes it in."""

CONTROLLER_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A call without parameters of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterHello:
    """A router's first call."""

    router: RouterId


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticate:
    """Whose key is this?"""

    key_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlessPayloads:
    """Which of these does no operation need?"""

    blobs: tuple[BlobRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTenant:
    """Operators come from the configuration only, so this makes none."""

    name: TenantId
    key_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTenant:
    """A call about a tenant."""

    name: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class AddKey:
    """One more API key of a tenant."""

    name: TenantId
    key_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeKey:
    """A tenant's API key, by its id, is to be valid no longer."""

    name: TenantId
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitJob:
    """A job of the tenant that the call names."""

    job: JobId
    name: str
    controller_timeout_s: float
    reattach_timeout_s: float
    priority: int = 0
    gang: int = 0
    expected_s: float = 0.0
    controller: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureTenant:
    """A tenant's weight, quotas and highest priority; what is absent stays as it is, null takes a
    quota away."""

    name: TenantId
    weight: float | msgspec.UnsetType = msgspec.UNSET
    jobs_max: int | msgspec.UnsetType | None = msgspec.UNSET
    gpus_max: int | msgspec.UnsetType | None = msgspec.UNSET
    gpu_seconds_max: float | msgspec.UnsetType | None = msgspec.UNSET
    live_jobs_max: int | msgspec.UnsetType | None = msgspec.UNSET
    checkpoints_max: int | msgspec.UnsetType | None = msgspec.UNSET
    checkpoint_bytes_max: int | msgspec.UnsetType | None = msgspec.UNSET
    priority_max: int | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOwner:
    """The tenant of a job, or the one of that name."""

    job: JobId | None = None
    tenant: TenantId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneJob:
    """A call about a job."""

    job: JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDeployment:
    """A call about a deployment."""

    deployment: DeploymentId


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOperation:
    """Answer when the operation is final, at the latest after `timeout_s`."""

    operation: OperationId
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOperations:
    """Finished operations behind index `after`, at most `limit`."""

    job: JobId | None = None
    """Absent: of all jobs."""
    deployment: DeploymentId | None = None
    kind: str | None = None
    after: int = 0
    limit: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLog:
    """The last `lines` lines of the logs of a job's workers."""

    job: JobId
    deployment: str | None = None
    """Its id or its name within the job; absent: of all."""
    lines: int = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCheckpoints:
    """A job's checkpoints, those under way too."""

    job: JobId


def take_scope(params: Plain) -> tuple[Scope, Plain]:
    """The scope that a router's call names, and its other parameters.

    Raises:
        InvalidRequestError: it names none, or two.
    """
    rest = dict(params)
    if "tenant" not in rest:
        raise InvalidRequestError("the call does not say for which tenant it is made")
    tenant, as_operator = rest.pop("tenant"), rest.pop("as_operator", False)
    if tenant is None and as_operator is True:
        return None, rest
    if isinstance(tenant, str) and as_operator is False:
        return TenantId(tenant), rest
    raise InvalidRequestError("a call is made for a tenant, or for none with as_operator: true")


def take_controller(kind: type[Any], params: Plain) -> tuple[str, Plain]:
    """The token of the controller that a call names, if it does, and the other parameters; a call
    whose `kind` has a field for it keeps it.

    Raises:
        InvalidRequestError: it is no text, or longer than `CONTROLLER_MAX`.
    """
    controller = params.get("controller", "")
    if not isinstance(controller, str) or len(controller) > CONTROLLER_MAX:
        raise InvalidRequestError(
            f"a controller's token is a text of {CONTROLLER_MAX} characters at most"
        )
    if "controller" in _field_names(cast("Hashable", kind)):
        return controller, params
    return controller, {name: value for name, value in params.items() if name != "controller"}


def subject(call: object) -> dict[str, Any]:
    """The job, deployment and operation that a call names."""
    named = {name: getattr(call, name, None) for name in ("job", "deployment", "operation")}
    return {name: value for name, value in named.items() if value is not None}


def parse(kind: type[CallT], params: Plain) -> CallT:
    """`params` as a `kind`; every field is known, of its type, and finite.

    Raises:
        InvalidRequestError: they are not.
    """
    known = _field_names(cast("Hashable", kind))
    strange = sorted(str(name) for name in params.keys() - set(known))
    if strange:
        raise InvalidRequestError(f"unknown parameters: {', '.join(strange)}")
    try:
        call = msgspec.convert(params, kind)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"malformed parameters: {error}") from error
    for name in known:
        value = getattr(call, name)
        if isinstance(value, float) and not math.isfinite(value):
            # JSON has no such number, so the journal could not be read again.
            raise InvalidRequestError(f"{name} is {value}: give a finite number")
    return call


@cache
def _field_names(kind: Hashable) -> tuple[str, ...]:
    """Of the fields of a dataclass, or of an event."""
    told = msgspec.inspect.type_info(kind)
    assert isinstance(told, msgspec.inspect.DataclassType | msgspec.inspect.StructType)
    return tuple(field.name for field in told.fields)


def with_readable_error(event: OperationFailed) -> OperationFailed:
    """`event` with its error as JSON that every view can show.

    Raises:
        InvalidRequestError: it is no JSON object.
    """
    try:
        # Unlike msgspec's, this reader takes NaN, which may stand in an error's details.
        told = json.loads(event.error_json)
        if not isinstance(told, dict):
            raise TypeError(f"it is of type {type(told).__name__}")
        plain = msgspec.json.encode(from_wire(told).to_wire()).decode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"error_json is no JSON object: {error}") from error
    return msgspec.structs.replace(event, error_json=plain)
