"""Tenants: their keys, weights, quotas, budgets and priorities."""

from plexrl.access import AccessRole, KeyScope, roles_of
from plexrl.errors import (
    AuthenticationError,
    ConflictError,
    InvalidRequestError,
    NotFoundError,
    QuotaExceededError,
)
from plexrl.ids import TenantId
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.accounting.usage import used_gpu_seconds
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages.events import (
    ApiKeyAdded,
    ApiKeyGranted,
    ApiKeyRevoked,
    TenantConfigured,
    TenantCreated,
)
from plexrl.scheduler.state.records import Job, State
from plexrl.scheduler.state.tenant import ApiKey, KeyOwner, Tenant
from plexrl.wire.operations import OperationKind

KEY_ID_CHARACTERS = 12
KEYS_MAX = 200
"""Keys of one tenant."""
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
        role = AccessRole.ADMIN if event.is_admin else _plain_role(event.is_operator)
        state.tenants[event.tenant] = Tenant(
            tenant=event.tenant,
            is_operator=event.is_operator,
            keys={event.key_digest: ApiKey(created_at=now, role=role)},
        )


def key_id(digest: str) -> str:
    """Id of an API key: the first characters of its digest."""
    return digest[:KEY_ID_CHARACTERS]


def api_key_added(state: State, event: ApiKeyAdded, now: float) -> None:
    """Add an API key to a tenant: an operator's, or a member's. Raises as `api_key_granted`."""
    tenant = _tenant(state, event.tenant)
    key = ApiKey(created_at=now, role=_plain_role(tenant.is_operator))
    _add_key(state, tenant, event.key_digest, key)


def api_key_granted(state: State, event: ApiKeyGranted, now: float) -> None:
    """Add an API key with a role of its own to a tenant, and drop the tenant's expired ones.

    Raises:
        NotFoundError: there is no such tenant.
        InvalidRequestError: the tenant has no keys of that role, or the key is expired.
        ConflictError: the tenant has too many keys, or the key is another tenant's or was revoked.
    """
    tenant = _tenant(state, event.tenant)
    roles = roles_of(is_operator=tenant.is_operator)
    if event.role not in roles:
        raise InvalidRequestError(
            f"a key of tenant {event.tenant!r} has the role {' or '.join(roles)}, not {event.role}"
        )
    key = ApiKey(
        created_at=now,
        role=event.role,
        user=event.user,
        name=event.name,
        scope=event.scope,
        expires_at=event.expires_at,
    )
    if key.has_expired(now):
        raise InvalidRequestError("the key would have expired already: give a later time")
    _add_key(state, tenant, event.key_digest, key)


def _add_key(state: State, tenant: Tenant, digest: str, key: ApiKey) -> None:
    if digest in tenant.keys:
        return
    valid = {each: old for each, old in tenant.keys.items() if not old.has_expired(key.created_at)}
    if len(valid) >= KEYS_MAX:
        raise ConflictError(
            f"tenant {tenant.tenant!r} has {KEYS_MAX} API keys, which is the most: revoke one first"
        )
    for other in state.tenants.values():
        for known in (*other.keys, *other.revoked):
            if key_id(known) == key_id(digest):
                raise ConflictError(
                    f"API key {key_id(digest)} is in use or was revoked: make another key"
                )
    tenant.keys = {**valid, digest: key}


def _plain_role(is_operator: bool) -> AccessRole:
    """The role of a key that names none, as all keys of earlier versions."""
    return AccessRole.OPERATOR if is_operator else AccessRole.MEMBER


def api_key_revoked(state: State, event: ApiKeyRevoked, now: float) -> None:
    """Revoke a tenant's API key; a key that was revoked before stays revoked.

    Raises:
        NotFoundError: the tenant has no such key.
        ConflictError: it is the last key of an operator that may do everything for ever.
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
    if tenant.is_operator and not any(
        key.role is AccessRole.OPERATOR and key.scope is KeyScope.ALL and not key.expires_at
        for other, key in tenant.keys.items()
        if other != digest
    ):
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


def authenticate(state: State, key_digest: str, now: float) -> KeyOwner:
    """The owner of the API key with this digest. A lookup by digest takes no time that depends on
    how much of the key is right.

    Raises:
        AuthenticationError: no tenant has this key, and no job that has not ended.
    """
    for tenant in state.tenants.values():
        key = tenant.keys.get(key_digest)
        if key is not None and not key.has_expired(now):
            return KeyOwner(
                tenant=tenant.tenant,
                role=key.role,
                user=key.user,
                scope=key.scope,
                expires_at=key.expires_at,
            )
    for job in state.jobs.values():
        if key_digest in job.keys and not job.state.is_final:
            return KeyOwner(tenant=job.tenant, role=AccessRole.JOB, user=job.user, job=job.job)
    raise AuthenticationError(
        "the API key is unknown, was revoked or has expired: check PLEXRL_API_KEY"
    )


def _tenant(state: State, name: TenantId) -> Tenant:
    tenant = state.tenants.get(name)
    if tenant is None:
        raise NotFoundError(f"there is no tenant {name!r}: create it first")
    return tenant
