"""The cluster as the core's steps see it: state, settings, and the indexes derived from both."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from plexrl.ids import DeploymentId, JobId, TenantId
from plexrl.scheduler.admission.fair_shares import settle
from plexrl.scheduler.admission.queues.waiting import Waiting
from plexrl.scheduler.context.config import SchedulerConfig
from plexrl.scheduler.context.settings import Settings
from plexrl.scheduler.placement.capacity.inventory import Inventory
from plexrl.scheduler.placement.contention.contention import Contention, Resident
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, HeldTime, Job, State

if TYPE_CHECKING:
    from plexrl.scheduler.admission.admission_pass import AdmissionPass


@dataclass(slots=True)
class Cluster:
    """State, settings and indexes."""

    settings: Settings
    state: State
    inventory: Inventory = field(init=False)
    """The groups' GPUs and time. Derived from the state, as all below."""
    waiting: Waiting = field(default_factory=Waiting)
    """Deployments without GPUs."""
    admission: "AdmissionPass | None" = None
    """The admission pass that was interrupted; at most one."""
    fillers: dict[DeploymentId, None] = field(default_factory=dict)
    """Preemptible deployments without a group."""
    relocating: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose move waits for an operation boundary."""
    contentions: dict[tuple[Resident, ...], Contention] = field(default_factory=dict)
    """Cache of predictions under these settings: a waiting deployment tries a group many times."""
    live_jobs: dict[TenantId, int] = field(default_factory=dict)
    """Number of live jobs of each tenant that has some."""
    detached: dict[JobId, None] = field(default_factory=dict)
    """Live jobs without a controller that are not set aside."""
    _held: dict[TenantId, tuple[int, dict[JobId, int]]] = field(default_factory=dict)
    _placed: dict[TenantId, dict[DeploymentId, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ended = [job for job in self.state.jobs.values() if job.state.is_final]
        if len(ended) > len(self.state.ended):
            # An old snapshot has no order.
            ended.sort(key=lambda job: (job.ended_at or 0.0, job.job))
            self.state.ended = {job.job: None for job in ended}
        for tenant in self.state.tenants.values():
            if tenant.key_digest:
                # An old snapshot has one key.
                tenant.keys, tenant.key_digest = {tenant.key_digest: 0.0}, ""
        for job in self.state.jobs.values():
            if not job.state.is_final:
                self.count_live_job(job.tenant, +1)
                if not job.attached and not job.is_set_aside:
                    self.detached[job.job] = None
        for deployment in self.state.deployments.values():
            _name_incarnation(deployment)
        _number(self.state)
        # An old snapshot has none.
        tokens = (group.token for group in self.state.groups.values())
        self.state.tokens_made = max(self.state.tokens_made, *tokens, 0)
        self.reconfigure(self.settings.config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use these settings, and derive the indexes again."""
        self.settings.change(config)
        self.state.history, self.state.ended_jobs = config.history, config.ended_jobs
        self.state.overdue_s = config.operation_overdue_s
        self.inventory = Inventory(config, self.settings.policy, self.state)
        self.waiting.clear()
        # The timer of an interrupted pass begins a new one over all deployments.
        self.admission = None
        self.fillers.clear()
        self.relocating.clear()
        self._held.clear()
        self._placed.clear()
        self.contentions.clear()
        for deployment in self.state.deployments.values():
            if deployment.ranks and not deployment.nodes:
                # An old snapshot has none.
                deployment.nodes = tuple(sorted({rank.node for rank in deployment.ranks}))
            if deployment.moves.planned is not None:
                self.relocating[deployment.deployment] = None
            if deployment.state == WpgState.WAITING:
                if not self.state.job(deployment.job).is_set_aside:
                    self.wait(deployment)
            elif deployment.group is not None:
                tenant = self.state.job(deployment.job).tenant
                self._note_placed(tenant, deployment, +1)
                if deployment.has_gpus:
                    self._count_held(tenant, deployment, +1)

    def wait(self, deployment: Deployment) -> None:
        """Put the deployment into the queues for GPUs, after all others."""
        job = self.state.job(deployment.job)
        if deployment.preemptible:
            if not job.is_set_aside:
                self.fillers[deployment.deployment] = None
            return
        self.waiting.enter(deployment, job)
        if self._is_placed(job):
            self.waiting.mark_partial(deployment.deployment)
        elif not job.gang:
            self._line_up([deployment], job)
            # The job has lost its last GPUs: its other deployments are in queues again.
            for name in job.deployments:
                if name in self.waiting.of_partial_jobs:
                    self._line_up([self.state.deployment(name)], job)
        elif len(job.deployments) >= job.gang:
            gang = [self.state.deployment(name) for name in job.deployments if name in self.waiting]
            self._line_up(gang, job)

    def stop_waiting(self, name: DeploymentId) -> None:
        """Take the deployment out of all queues for GPUs, if it is in one."""
        self.waiting.remove(name)
        self.state.reservations.pop(name, None)
        self.fillers.pop(name, None)

    def _line_up(self, deployments: list[Deployment], job: Job) -> None:
        duty = self.inventory.duty_when_placed(deployments[0])
        self.waiting.enqueue_unit(deployments, job, duty)

    def _is_placed(self, job: Job) -> bool:
        return any(self.state.deployments[name].has_gpus for name in job.deployments)

    def hold(self, deployment: Deployment, sign: int, now: float) -> None:
        """Add the deployment's GPUs to those that its tenant holds, or subtract them. A
        filler holds none."""
        tenant = self.state.job(deployment.job).tenant
        self._note_placed(tenant, deployment, sign)
        if deployment.preemptible:
            return
        held = self.state.held.get(tenant)
        if held is None:
            held = self.state.held[tenant] = HeldTime(at=now)
        settle(held, self.holdings(tenant)[0], now)
        if sign > 0:
            held.waited_at = now
        self._count_held(tenant, deployment, sign)

    def placed(self, tenant: TenantId) -> Iterable[DeploymentId]:
        """The tenant's deployments that are on groups, fillers included."""
        return self._placed.get(tenant, ())

    def _note_placed(self, tenant: TenantId, deployment: Deployment, sign: int) -> None:
        placed = self._placed.setdefault(tenant, {})
        if sign > 0:
            placed[deployment.deployment] = None
        else:
            del placed[deployment.deployment]
            if not placed:
                del self._placed[tenant]

    def relocating_in_order(self) -> list[Deployment]:
        """The deployments whose move waits, oldest first."""
        return sorted(map(self.state.deployment, self.relocating), key=lambda each: each.serial)

    def active_tenants(self) -> list[TenantId]:
        """Tenants that wait for GPUs or hold some."""
        return list(dict.fromkeys((*self.waiting.by_tenant, *self._held)))

    def _count_held(self, tenant: TenantId, deployment: Deployment, sign: int) -> None:
        gpus, jobs = self._held.setdefault(tenant, (0, {}))
        count = jobs.get(deployment.job, 0) + sign
        if count:
            jobs[deployment.job] = count
        else:
            jobs.pop(deployment.job, None)
        if jobs:
            self._held[tenant] = gpus + sign * deployment.workers, jobs
        else:
            del self._held[tenant]
        for name in self.state.job(deployment.job).deployments:
            if name in self.waiting:
                self.waiting.mark_partial(name)

    def count_live_job(self, tenant: TenantId, sign: int) -> None:
        """Add a live job to the tenant's count, or subtract one."""
        count = self.live_jobs.get(tenant, 0) + sign
        if count:
            self.live_jobs[tenant] = count
        else:
            self.live_jobs.pop(tenant, None)

    def holdings(self, tenant: TenantId) -> tuple[int, int]:
        """(GPUs, jobs with GPUs) that a tenant holds."""
        gpus, jobs = self._held.get(tenant, (0, {}))
        return gpus, len(jobs)


def _number(state: State) -> None:
    """Number the jobs and deployments of an old snapshot, which has no numbers: it has them in the
    order of their creation."""
    for serial, job in enumerate(state.jobs.values(), start=1):
        job.serial = job.serial or serial
    for serial, deployment in enumerate(state.deployments.values(), start=1):
        deployment.serial = deployment.serial or serial
    state.jobs_made = max(state.jobs_made, len(state.jobs))
    state.deployments_made = max(state.deployments_made, len(state.deployments))


def _name_incarnation(deployment: Deployment) -> None:
    """Add the workers' incarnation to the runs of an old snapshot, which has none."""
    incarnation = deployment.processes.incarnation
    for name, command in deployment.running.items():
        if not command.incarnation:
            deployment.running[name] = replace(command, incarnation=incarnation)
    moving = deployment.moving
    if moving is not None and not moving.incarnation:
        deployment.moving = replace(moving, incarnation=incarnation)
