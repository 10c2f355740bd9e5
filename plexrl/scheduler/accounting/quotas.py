"""The quotas of tenants: concurrent jobs and GPUs. The owner of the rule."""

from typing import TYPE_CHECKING

from plexrl.wire.messages.cluster_views import TenantLimits

if TYPE_CHECKING:
    from plexrl.ids import TenantId
    from plexrl.scheduler.accounting.holdings import Holdings
    from plexrl.scheduler.state.records import Job, State
    from plexrl.scheduler.state.tenant import Tenant


def over_quota(holdings: "Holdings", job: "Job", gpus: int) -> str | None:
    """Why a quota of the tenant does not allow `job` to get `gpus` more; None if it does."""
    tenant = holdings.state.tenants.get(job.tenant)
    if tenant is None or (tenant.jobs_max is None and tenant.gpus_max is None):
        return None
    held_gpus, held_jobs = holdings.of(job.tenant)
    has_gpus = any(holdings.state.deployment(name).has_gpus for name in job.deployments)
    if tenant.jobs_max is not None and not has_gpus and held_jobs >= tenant.jobs_max:
        return f"tenant {job.tenant!r} runs {held_jobs} jobs, its quota is {tenant.jobs_max}"
    if not allows_gpus(holdings.state, job.tenant, held_gpus + gpus):
        return (
            f"tenant {job.tenant!r} holds {held_gpus} GPUs, its quota is {tenant.gpus_max}; this "
            f"asks for {gpus}"
        )
    return None


def allows_gpus(state: "State", name: "TenantId", gpus: int) -> bool:
    """Whether the tenant may hold this many GPUs in all."""
    tenant = state.tenants.get(name)
    return tenant is None or tenant.gpus_max is None or gpus <= tenant.gpus_max


def limits_of(tenant: "Tenant") -> TenantLimits:
    """The tenant's limits by name; None: no limit."""
    return {
        "weight": tenant.weight,
        "jobs_max": tenant.jobs_max,
        "gpus_max": tenant.gpus_max,
        "gpu_seconds_max": tenant.gpu_seconds_max,
        "live_jobs_max": tenant.live_jobs_max,
        "checkpoints_max": tenant.checkpoints_max,
        "checkpoint_bytes_max": tenant.checkpoint_bytes_max,
        "priority_max": tenant.priority_max,
        "slo": tenant.slo,
        "model_roots": tenant.model_roots,
    }
