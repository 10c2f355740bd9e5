"""Tenants: their keys, weights, quotas, budgets and priorities."""

from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    QuotaExceededError,
)
from plexrl.ids import TenantId
from plexrl.scheduler.context import Context
from plexrl.scheduler.events import TenantConfigured, TenantCreated
from plexrl.scheduler.state import Job, State, Tenant

WEIGHT_MAX = 1e6
PRIORITY_MAX = 100


def tenant_created(state: State, event: TenantCreated) -> None:
    """Know a tenant from now on.

    Raises:
        ConflictError: the name is another key's.
    """
    known = state.tenants.get(event.tenant)
    if known is not None and known.key_digest != event.key_digest:
        raise ConflictError(f"tenant {event.tenant!r} exists already: choose another name")
    if known is None:
        state.tenants[event.tenant] = Tenant(
            tenant=event.tenant, key_digest=event.key_digest, is_operator=event.is_operator
        )


def tenant_configured(state: State, event: TenantConfigured) -> None:
    """Set a tenant's weight, quotas and highest priority.

    Raises:
        NotFoundError: there is no such tenant.
        InvalidRequestError: a number makes no sense; nothing changed.
    """
    tenant = state.tenants.get(event.tenant)
    if tenant is None:
        raise NotFoundError(f"there is no tenant {event.tenant!r}: create it first")
    if not 0 < event.weight <= WEIGHT_MAX:
        raise InvalidRequestError(
            f"tenant {event.tenant!r}: the weight is above 0 and at most {WEIGHT_MAX:.0f}"
        )
    if not -PRIORITY_MAX <= event.priority_max <= PRIORITY_MAX:
        raise InvalidRequestError(
            f"tenant {event.tenant!r}: priority_max is between -{PRIORITY_MAX} and {PRIORITY_MAX}"
        )
    tenant.weight = event.weight
    tenant.jobs_max = event.jobs_max
    tenant.gpus_max = event.gpus_max
    tenant.gpu_seconds_max = event.gpu_seconds_max
    tenant.priority_max = event.priority_max


def check_budget(state: State, name: TenantId) -> None:
    """Refuse new work of a tenant that has used up its GPU-seconds.

    Raises:
        QuotaExceededError: it has.
    """
    tenant = state.tenants.get(name)
    if tenant is None or tenant.gpu_seconds_max is None:
        return
    if tenant.gpu_seconds >= tenant.gpu_seconds_max:
        raise QuotaExceededError(
            f"tenant {name!r} has used {tenant.gpu_seconds:.0f} of its "
            f"{tenant.gpu_seconds_max:.0f} GPU-seconds: ask an operator for more",
            used=tenant.gpu_seconds,
            quota=tenant.gpu_seconds_max,
        )


def check_priority(state: State, name: TenantId, priority: int) -> None:
    """Refuse a priority class that the tenant may not put its jobs in; an operator's may be any.

    Raises:
        InvalidRequestError: there is no such class.
        QuotaExceededError: it is above the tenant's highest.
    """
    if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
        raise InvalidRequestError(f"priority is between -{PRIORITY_MAX} and {PRIORITY_MAX}")
    tenant = state.tenants.get(name)
    if tenant is None or tenant.is_operator or priority <= tenant.priority_max:
        return
    raise QuotaExceededError(
        f"priority {priority} is above the highest that tenant {name!r} may use, "
        f"{tenant.priority_max}: ask for that or less, or an operator for a higher priority_max",
        priority=priority,
        quota=tenant.priority_max,
    )


def check_gpus(context: Context, job: Job, workers: int) -> None:
    """Refuse a deployment of that size which its tenant's quota could never hold, by itself or with
    the rest of its gang.

    Raises:
        QuotaExceededError: it asks for more GPUs than the tenant may hold at all.
    """
    tenant = context.state.tenants.get(job.tenant)
    if job.gang:
        workers += sum(context.deployment(name).workers for name in job.deployments)
    if tenant is None or tenant.gpus_max is None or workers <= tenant.gpus_max:
        return
    raise QuotaExceededError(
        f"{workers} GPUs at once are more than tenant {job.tenant!r} may hold, {tenant.gpus_max}: "
        "ask for fewer workers, or an operator for a larger quota",
        workers=workers,
        quota=tenant.gpus_max,
    )


def authenticate(state: State, key_digest: str) -> tuple[TenantId, bool]:
    """(tenant, is operator) of an API key's digest.

    Raises:
        AuthenticationError: nobody has this key.
    """
    for tenant in state.tenants.values():
        if tenant.key_digest == key_digest:
            return tenant.tenant, tenant.is_operator
    raise AuthenticationError("the API key is unknown: check PLEXRL_API_KEY")
