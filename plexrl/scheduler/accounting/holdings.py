"""What each tenant has at present: GPUs, deployments on groups, live jobs."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.state.records import Deployment, HeldTime, State

HALF_LIFE_S = 7 * 86_400.0
"""As in Slurm's fair share: long compared with jobs, so that one job still counts when the next one
is admitted."""

_DECAY_S = HALF_LIFE_S / math.log(2.0)


@dataclass(slots=True)
class Holdings:
    """Counts of what tenants hold, and the jobs without a controller. Derived from the state."""

    state: State
    live_jobs: dict[TenantId, int] = field(default_factory=dict)
    """Number of live jobs of each tenant that has some."""
    detached: dict[JobId, None] = field(default_factory=dict)
    """Live jobs without a controller that are not set aside."""
    _held: dict[TenantId, tuple[int, dict[JobId, int]]] = field(default_factory=dict)
    _placed: dict[TenantId, dict[DeploymentId, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for job in self.state.jobs.values():
            if not job.state.is_final:
                self.count_live_job(job.tenant, +1)
                if not job.attached and not job.is_set_aside:
                    self.detached[job.job] = None
        for deployment in self.state.deployments.values():
            if deployment.placement.group is not None:
                tenant = self.state.job(deployment.job).tenant
                self._note_placed(tenant, deployment, +1)
                if deployment.has_gpus:
                    self._count_held(tenant, deployment, +1)

    def hold(self, deployment: Deployment, sign: int, now: float) -> None:
        """Add the deployment's GPUs to those that its tenant holds, or subtract them. A
        filler holds none."""
        tenant = self.state.job(deployment.job).tenant
        self._note_placed(tenant, deployment, sign)
        if deployment.spec.preemptible:
            return
        held = self.state.held.get(tenant)
        if held is None:
            held = self.state.held[tenant] = HeldTime(at=now)
        settle(held, self.of(tenant)[0], now)
        if sign > 0:
            held.waited_at = now
        self._count_held(tenant, deployment, sign)

    def of(self, tenant: TenantId) -> tuple[int, int]:
        """(GPUs, jobs with GPUs) that a tenant holds."""
        gpus, jobs = self._held.get(tenant, (0, {}))
        return gpus, len(jobs)

    def holders(self) -> Iterable[TenantId]:
        """Tenants that hold GPUs."""
        return self._held

    def placed(self, tenant: TenantId) -> Iterable[DeploymentId]:
        """The tenant's deployments that are on groups, fillers included."""
        return self._placed.get(tenant, ())

    def count_live_job(self, tenant: TenantId, sign: int) -> None:
        """Add a live job to the tenant's count, or subtract one."""
        count = self.live_jobs.get(tenant, 0) + sign
        if count:
            self.live_jobs[tenant] = count
        else:
            self.live_jobs.pop(tenant, None)

    def _note_placed(self, tenant: TenantId, deployment: Deployment, sign: int) -> None:
        placed = self._placed.setdefault(tenant, {})
        if sign > 0:
            placed[deployment.deployment] = None
        else:
            del placed[deployment.deployment]
            if not placed:
                del self._placed[tenant]

    def _count_held(self, tenant: TenantId, deployment: Deployment, sign: int) -> None:
        gpus, jobs = self._held.setdefault(tenant, (0, {}))
        count = jobs.get(deployment.job, 0) + sign
        if count:
            jobs[deployment.job] = count
        else:
            jobs.pop(deployment.job, None)
        if jobs:
            self._held[tenant] = gpus + sign * deployment.spec.workers, jobs
        else:
            del self._held[tenant]


def held_until(held: HeldTime, gpus: int, now: float) -> float:
    """The decayed GPU-seconds at `now`, of which `gpus` GPUs were held since `held.at`."""
    passed_s = max(0.0, now - held.at)
    decay = math.exp(-passed_s / _DECAY_S)
    return held.gpu_seconds * decay - gpus * _DECAY_S * math.expm1(-passed_s / _DECAY_S)


def settle(held: HeldTime, gpus: int, now: float) -> None:
    """Add the GPU-seconds of `gpus` GPUs held since the last call."""
    held.gpu_seconds = held_until(held, gpus, now)
    held.at = now
