"""Tenants: their keys, weights, quotas, budgets and priorities."""

from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    NotFoundError,
    QuotaExceededError,
)
from plexrl.ids import TenantId
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.accounting.usage import used_gpu_seconds
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages.events import (
    ApiKeyAdded,
    ApiKeyRevoked,
    TenantConfigured,
    TenantCreated,
)
from plexrl.scheduler.state.records import Job, State
from plexrl.scheduler.state.tenant import KeyOwner, Tenant
from plexrl.wire.operations import OperationKind

KEY_ID_CHARACTERS = 12
KEYS_MAX = 16
"""Valid keys of one tenant."""
REVOKED_MAX = 100
"""Revoked keys of one tenant that are stored."""
PAST_BUDGET = frozenset({OperationKind.SAVE_CHECKPOINT})
"""Operations that a tenant may submit after its GPU-seconds are used up: they save computed
results. They are billed like all others."""


def tenant_created(state: State, event: TenantCreated, now: float) -> None:
    """Add a tenant.

    Raises:
        ConflictError: a tenant with that name and other keys exists.
    """
    known = state.tenants.get(event.tenant)
    if known is not None and event.key_digest not in known.keys:
        raise ConflictError(f"tenant {event.tenant!r} exists already: choose another name")
    if known is None:
        state.tenants[event.tenant] = Tenant(
            tenant=event.tenant, is_operator=event.is_operator, keys={event.key_digest: now}
        )


def key_id(digest: str) -> str:
    """Id of an API key: the first characters of its digest."""
    return digest[:KEY_ID_CHARACTERS]


def api_key_added(state: State, event: ApiKeyAdded, now: float) -> None:
    """Add an API key to a tenant.

    Raises:
        NotFoundError: there is no such tenant.
        ConflictError: the tenant has too many keys, or the key is another tenant's or was revoked.
    """
    tenant = _tenant(state, event.tenant)
    if event.key_digest in tenant.keys:
        return
    if len(tenant.keys) >= KEYS_MAX:
        raise ConflictError(
            f"tenant {event.tenant!r} has {KEYS_MAX} API keys, which is the most: revoke one first"
        )
    for each in state.tenants.values():
        for digest in (*each.keys, *each.revoked):
            if key_id(digest) == key_id(event.key_digest):
                raise ConflictError(
                    f"API key {key_id(digest)} is in use or was revoked: make another key"
                )
    tenant.keys[event.key_digest] = now


def api_key_revoked(state: State, event: ApiKeyRevoked, now: float) -> None:
    """Revoke a tenant's API key; a key that was revoked before stays revoked.

    Raises:
        NotFoundError: the tenant has no such key.
        ConflictError: it is the last key of an operator.
    """
    del now
    tenant = _tenant(state, event.tenant)
    if any(key_id(digest) == event.key for digest in tenant.revoked):
        return
    digest = next((key for key in tenant.keys if key_id(key) == event.key), None)
    if digest is None:
        raise NotFoundError(
            f"tenant {event.tenant!r} has no API key {event.key!r}: list its keys for their ids"
        )
    if tenant.is_operator and len(tenant.keys) == 1:
        raise ConflictError(
            f"API key {event.key!r} is the operator's last: without it nobody could operate the "
            "cluster; rotate it first"
        )
    del tenant.keys[digest]
    tenant.revoked = [*tenant.revoked, digest][-REVOKED_MAX:]


def tenant_configured(state: State, event: TenantConfigured) -> None:
    """Set a tenant's weight, quotas and highest priority.

    Raises:
        NotFoundError: there is no such tenant.
    """
    tenant = _tenant(state, event.tenant)
    tenant.weight = event.weight
    tenant.jobs_max = event.jobs_max
    tenant.gpus_max = event.gpus_max
    tenant.gpu_seconds_max = event.gpu_seconds_max
    tenant.priority_max = event.priority_max
    tenant.live_jobs_max = event.live_jobs_max
    tenant.checkpoints_max = event.checkpoints_max
    tenant.checkpoint_bytes_max = event.checkpoint_bytes_max
    tenant.slo = event.slo
    tenant.model_roots = event.model_roots


def check_budget(
    holdings: Holdings, name: TenantId, now: float, kind: OperationKind | None = None
) -> None:
    """Refuse a new job, or an operation of a `kind` not in `PAST_BUDGET`, of a tenant without GPU-
    seconds left. What runs at present counts.

    Raises:
        QuotaExceededError: the tenant has used up its GPU-seconds.
    """
    tenant = holdings.state.tenants.get(name)
    if tenant is None or tenant.gpu_seconds_max is None or kind in PAST_BUDGET:
        return
    used = used_gpu_seconds(holdings, name, now)
    if used >= tenant.gpu_seconds_max:
        raise QuotaExceededError(
            f"tenant {name!r} has used {used:.0f} of its "
            f"{tenant.gpu_seconds_max:.0f} GPU-seconds: ask an operator for more; checkpoints can "
            "still be saved",
            used=used,
            quota=tenant.gpu_seconds_max,
        )


def check_priority(state: State, name: TenantId, priority: int) -> None:
    """Refuse a priority class above the tenant's highest; operators may use all classes.

    Raises:
        QuotaExceededError: the class is above the tenant's highest.
    """
    tenant = state.tenants.get(name)
    if tenant is None or tenant.is_operator or priority <= tenant.priority_max:
        return
    raise QuotaExceededError(
        f"priority {priority} is above the highest that tenant {name!r} may use, "
        f"{tenant.priority_max}: ask for that or less, or an operator for a higher priority_max",
        priority=priority,
        quota=tenant.priority_max,
    )


def check_live_jobs(holdings: Holdings, settings: Settings, name: TenantId) -> None:
    """Refuse a new job of a tenant with the maximum number of live jobs.

    Raises:
        QuotaExceededError: the tenant has that many.
    """
    tenant = holdings.state.tenants.get(name)
    bound = None if tenant is None else live_jobs_bound(settings, tenant)
    live = holdings.live_jobs.get(name, 0)
    if bound is not None and live >= bound:
        raise QuotaExceededError(
            f"tenant {name!r} has {live} jobs that have not ended, and {bound} are the most: "
            "finish or cancel some, or ask an operator for a larger live_jobs_max",
            used=live,
            quota=bound,
        )


def live_jobs_bound(settings: Settings, tenant: Tenant) -> int | None:
    """Maximum number of live jobs of a tenant; None: no limit."""
    if tenant.is_operator:
        return None
    if tenant.live_jobs_max is not None:
        return tenant.live_jobs_max
    return settings.config.tenant_live_jobs_max


def check_gpus(state: State, job: Job, workers: int) -> None:
    """Refuse a deployment that makes its job larger than its tenant's quota of GPUs.

    Raises:
        QuotaExceededError: the job would need more GPUs than the tenant may hold.
    """
    tenant = state.tenants.get(job.tenant)
    others = map(state.deployment, job.deployments)
    workers += sum(other.spec.workers for other in others if not other.spec.preemptible)
    if tenant is None or tenant.gpus_max is None or workers <= tenant.gpus_max:
        return
    raise QuotaExceededError(
        f"{workers} GPUs at once are more than tenant {job.tenant!r} may hold, {tenant.gpus_max}: "
        "ask for fewer workers, or an operator for a larger quota",
        workers=workers,
        quota=tenant.gpus_max,
    )


def authenticate(state: State, key_digest: str) -> KeyOwner:
    """The owner of the API key with this digest.

    Raises:
        AuthenticationError: no tenant has this key, and no job that has not ended.
    """
    for tenant in state.tenants.values():
        if key_digest in tenant.keys:
            return KeyOwner(tenant=tenant.tenant, is_operator=tenant.is_operator)
    for job in state.jobs.values():
        if key_digest in job.keys and not job.state.is_final:
            return KeyOwner(tenant=job.tenant, job=job.job)
    raise AuthenticationError("the API key is unknown or was revoked: check PLEXRL_API_KEY")


def _tenant(state: State, name: TenantId) -> Tenant:
    tenant = state.tenants.get(name)
    if tenant is None:
        raise NotFoundError(f"there is no tenant {name!r}: create it first")
    return tenant
