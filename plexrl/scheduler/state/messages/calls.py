"""Parameters of the scheduler's calls, checked before anything else happens.

A router's call names the tenant whose objects it may use (`tenant`); null together with
`as_operator: true` allows all tenants' objects. Neither has a default, so a forgotten field
gives no privilege.
"""

import math
from collections.abc import Awaitable, Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from plexrl.access import AccessRole, KeyScope
from plexrl.errors import InvalidRequestError, from_wire
from plexrl.ids import BlobRef, DeploymentId, JobId, OperationId, TenantId
from plexrl.scheduler.state.demand.job_quote import JobQuote
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.messages.events import (
    DeploymentCreated,
    OperationFailed,
    OperationFinished,
)
from plexrl.scheduler.state.operation import error_view
from plexrl.wire.messages.run_views import ForkView
from plexrl.wire.scheduler_methods import Method

Parameters = dict[str, object]
"""Parameters of a call as they came, before their types are checked."""
Answer = Mapping[str, object]
"""A view."""
AnswerT = TypeVar("AnswerT", bound=Answer)
Scope = TenantId | None
"""The tenant whose objects a call may use; None: all tenants."""
CallT = TypeVar("CallT")
Ask = tuple[type[Any], Callable[[Any, Any], Awaitable[Answer]]]
"""Type of a call's parameters, and its handler, which takes scope and parameters."""
Report = tuple[type[Any], Callable[[Any], Awaitable[Answer]]]
"""Type of a report, and its handler."""


def on_request(
    method: Method[AnswerT], kind: type[CallT], answer: Callable[[Scope, CallT], Awaitable[AnswerT]]
) -> tuple[str, Ask]:
    """An entry of the table of requests, whose handler gives the method's answer."""
    return method, (kind, answer)


def on_query(
    method: Method[AnswerT], kind: type[CallT], answer: Callable[[CallT], Awaitable[AnswerT]]
) -> tuple[str, Report]:
    """As `on_request`, for a call that a router makes for itself."""
    return method, (kind, answer)


CONTROLLER_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A call without parameters of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Authenticate:
    """Find the tenant of an API key."""

    key_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedlessPayloads:
    """Find the payloads among these that no operation needs."""

    blobs: tuple[BlobRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateTenant:
    """Make a tenant. It is no operator: only the configuration names operators."""

    name: TenantId
    key_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTenant:
    """A call about a tenant."""

    name: TenantId


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedTenant(OneTenant):
    """A call about a tenant that an admin of the tenant may make as well."""

    by_admin: bool = False
    """An admin of the tenant that the call is for makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddKey(ManagedTenant):
    """One more API key of a tenant."""

    key_digest: str
    role: AccessRole | None = None
    """None: an operator's, or a member's."""
    user: str = ""
    key_name: str = ""
    """What the key is for."""
    scope: KeyScope = KeyScope.ALL
    valid_s: float = 0.0
    """Seconds until it expires; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokeKey(ManagedTenant):
    """Revoke a tenant's API key, which is named by its id."""

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
    slo: float | None = None
    controller: str = ""
    user: str = ""
    """Who submits it."""
    quote: JobQuote | None = None
    fork: ForkView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigureTenant:
    """Set a tenant's weight, quotas and highest priority. An absent field leaves its value; null
    removes a quota."""

    name: TenantId
    weight: float | msgspec.UnsetType = msgspec.UNSET
    jobs_max: int | msgspec.UnsetType | None = msgspec.UNSET
    gpus_max: int | msgspec.UnsetType | None = msgspec.UNSET
    gpu_seconds_max: float | msgspec.UnsetType | None = msgspec.UNSET
    live_jobs_max: int | msgspec.UnsetType | None = msgspec.UNSET
    checkpoints_max: int | msgspec.UnsetType | None = msgspec.UNSET
    checkpoint_bytes_max: int | msgspec.UnsetType | None = msgspec.UNSET
    priority_max: int | msgspec.UnsetType = msgspec.UNSET
    slo: float | msgspec.UnsetType | None = msgspec.UNSET
    model_roots: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOwner:
    """The owner of checkpoints: the tenant of a job, or a tenant by name."""

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
    """Wait until the operation is final, `timeout_s` at most."""

    operation: OperationId
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ListOperations:
    """Finished operations after index `after`, `limit` at most."""

    job: JobId | None = None
    """None: all jobs."""
    deployment: DeploymentId | None = None
    kind: str | None = None
    after: int = 0
    limit: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLanes:
    """Lanes of the groups in the window of `seconds` that ends `until_s` seconds ago."""

    seconds: float
    until_s: float = 0.0
    first: int = 0
    """Index of the first group with a lane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadQueue:
    """One page of a list of waiting deployments, from index `first`."""

    which: str
    first: int = 0
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRow:
    """A job as a row of a trace describes it."""

    gpus: int
    rollout_gpus: int = 0
    node_type: str = ""
    state_bytes: int = 1
    trace: DemandTrace | None = None
    """None: it always works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPlan:
    """The plan of the cluster with one more job, which is described by `row`, by the job that it is
    `like`, or by its `deployments`."""

    name: str
    steps: int = 0
    """Cycles of the job; 0: as `expected_s` says."""
    expected_s: float = 0.0
    priority: int = 0
    slo: float | None = None
    row: AskedRow | None = None
    like: JobId | None = None
    deployments: tuple[DeploymentCreated, ...] = ()


def take_scope(params: Parameters) -> tuple[Scope, Parameters]:
    """The scope that a router's call names, and its other parameters.

    Raises:
        InvalidRequestError: the call names no scope, or two.
    """
    rest = dict(params)
    if "tenant" not in rest:
        raise InvalidRequestError(
            "the call names no tenant: give tenant, or null with as_operator: true"
        )
    tenant, as_operator = rest.pop("tenant"), rest.pop("as_operator", False)
    if tenant is None and as_operator is True:
        return None, rest
    if isinstance(tenant, str) and as_operator is False:
        return TenantId(tenant), rest
    raise InvalidRequestError("give either a tenant, or null with as_operator: true")


def take_controller(kind: type[Any], params: Parameters) -> tuple[str, Parameters]:
    """The controller's token, empty if there is none, and the other parameters. The token stays
    among these if `kind` has a field for it.

    Raises:
        InvalidRequestError: the token is no text, or longer than `CONTROLLER_MAX`.
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


def parse(kind: type[CallT], params: Parameters) -> CallT:
    """`params` as a `kind`.

    Raises:
        InvalidRequestError: a field is unknown, has another type, or is not finite.
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
            # JSON has no such number: the journal could not be read back.
            raise InvalidRequestError(f"{name} is {value}: give a finite number")
    return call


@cache
def _field_names(kind: Hashable) -> tuple[str, ...]:
    """Field names of a dataclass or event."""
    found = msgspec.inspect.type_info(kind)
    assert isinstance(found, msgspec.inspect.DataclassType | msgspec.inspect.StructType)
    return tuple(field.name for field in found.fields)


ReportT = TypeVar("ReportT", OperationFinished, OperationFailed)


def with_plain_error(event: ReportT) -> ReportT:
    """`event` with its error as the journal gives it back.

    Raises:
        InvalidRequestError: JSON does not carry the error.
    """
    if event.error is None:
        return event
    try:
        return msgspec.structs.replace(event, error=error_view(from_wire(event.error)))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"JSON does not carry the error of a report: {error}") from error
