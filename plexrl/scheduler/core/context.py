"""What one `handle` call works with: the state, the commands it has decided on, and its to-do."""

import heapq
from dataclasses import dataclass, field

from plexrl.ids import BlobRef, DeploymentId, GroupId, JobId, OperationId, TenantId
from plexrl.scheduler.admission.fair_shares import settle
from plexrl.scheduler.admission.queues.waiting import Waiting
from plexrl.scheduler.capacity.inventory import Inventory
from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.dispatch.ordering import Ordering, make_ordering
from plexrl.scheduler.jobs.profiler import ProfilerConfig
from plexrl.scheduler.placement.contention import Contention, Resident
from plexrl.scheduler.placement.policies import PlacementPolicy, make_policy
from plexrl.scheduler.state.commands import Command, DiscardBlobs, SetTimer
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.records import Deployment, Group, HeldTime, Job, State
from plexrl.scheduler.state.timers import Subject, Timer, TimerKind

TIMERS_MIN = 1024
"""Fewer are not worth a look."""


@dataclass(slots=True)
class Context:
    """Shared by the core's modules; `commands` and `discards` are emptied by each `handle`."""

    config: SchedulerConfig
    state: State = field(default_factory=State)
    commands: list[Command] = field(default_factory=list)
    discards: list[BlobRef] = field(default_factory=list)
    dirty: dict[GroupId, None] = field(default_factory=dict)
    """Groups whose next step must be decided again, in the order they were touched; those among
    them that are no more are passed over."""
    place_waiting: bool = False
    timers: list[Timer] = field(default_factory=list)
    """Heap of (time, what to look at again); an entry may have become pointless."""
    timer_at: float | None = None
    """Of the last `SetTimer` that has not come due."""
    wakes_sooner: bool = False
    """Something was to be looked at before that."""
    policy: PlacementPolicy = field(init=False)
    ordering: Ordering = field(init=False)
    anticipates: bool = field(init=False)
    history: int = field(init=False)
    """Of the configuration, as `ended_jobs` is: every event asks for both."""
    ended_jobs: int = field(init=False)
    profiler: ProfilerConfig = field(init=False)
    inventory: Inventory = field(init=False)
    """Derived from the state; so is `waiting`."""
    waiting: Waiting = field(default_factory=Waiting)
    """Deployments without GPUs."""
    cycles_over: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose cycle ended in the event at hand."""
    newcomers: list[DeploymentId] = field(default_factory=list)
    """Created by the event at hand."""
    relocating: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose move waits for an operation boundary."""
    contentions: dict[tuple[Resident, ...], Contention] = field(default_factory=dict)
    """Predicted already under these settings, for whoever waits is tried on a group many times."""
    live_jobs: dict[TenantId, int] = field(default_factory=dict)
    """Jobs that have not ended, of tenants that have some; derived from the state."""
    detached: dict[JobId, None] = field(default_factory=dict)
    """Live jobs that have no controller and are not set aside; derived from the state."""
    _held: dict[TenantId, tuple[int, dict[JobId, int]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ended = [job for job in self.state.jobs.values() if job.state.is_final]
        if len(ended) > len(self.state.ended):
            # Of a snapshot from before their order was kept.
            ended.sort(key=lambda job: (job.ended_at or 0.0, job.job))
            self.state.ended = {job.job: None for job in ended}
        for tenant in self.state.tenants.values():
            if tenant.key_digest:
                # Of a snapshot from before a tenant could have several keys.
                tenant.keys, tenant.key_digest = {tenant.key_digest: 0.0}, ""
        for job in self.state.jobs.values():
            if not job.state.is_final:
                self.count_live_job(job.tenant, +1)
                if not job.attached and not job.is_set_aside:
                    self.detached[job.job] = None
        # Of a snapshot from before it was kept, it is lower.
        tokens = (group.token for group in self.state.groups.values())
        self.state.tokens_made = max(self.state.tokens_made, *tokens, 0)
        self.reconfigure(self.config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Go on under these settings; make anew what follows from them and the state."""
        self.config = config
        self.history, self.ended_jobs = config.history, config.ended_jobs
        self.policy = make_policy(config.policy)
        self.ordering = make_ordering(config.ordering)
        wanted = config.anticipation
        self.anticipates = self.ordering.anticipates if wanted is None else wanted
        self.inventory = Inventory(config, self.policy, self.state)
        self.waiting.clear()
        self.relocating.clear()
        self._held.clear()
        self.contentions.clear()
        self.profiler = ProfilerConfig(
            cycles=config.profile_cycles, drift_tolerance=config.drift_tolerance
        )
        for deployment in self.state.deployments.values():
            if deployment.ranks and not deployment.nodes:
                # Of a snapshot from before they were kept.
                deployment.nodes = tuple(sorted({rank.node for rank in deployment.ranks}))
            if deployment.moves.planned is not None:
                self.relocating[deployment.deployment] = None
            if deployment.state == WpgState.WAITING:
                if not self.job(deployment.job).is_set_aside:
                    self.wait(deployment)
            elif deployment.group is not None:
                self._count_held(self.job(deployment.job).tenant, deployment, +1)

    def wait(self, deployment: Deployment) -> None:
        """The deployment waits for GPUs, behind all that do."""
        job = self.job(deployment.job)
        self.waiting.enter(deployment, job)
        if self._is_placed(job):
            self.waiting.mark_partial(deployment.deployment)
        elif not job.gang:
            self._line_up([deployment], job)
            # Those of a job that has lost its last GPUs stand in queues again.
            for name in job.deployments:
                if name in self.waiting.of_partial_jobs:
                    self._line_up([self.deployment(name)], job)
        elif len(job.deployments) >= job.gang:
            gang = [self.deployment(name) for name in job.deployments if name in self.waiting]
            self._line_up(gang, job)

    def _line_up(self, deployments: list[Deployment], job: Job) -> None:
        duty = self.inventory.duty_when_placed(deployments[0])
        self.waiting.enqueue_unit(deployments, job, duty)

    def _is_placed(self, job: Job) -> bool:
        return any(self.state.deployments[name].group is not None for name in job.deployments)

    def hold(self, deployment: Deployment, sign: int, now: float) -> None:
        """Count (or, negative, discount) the deployment's GPUs among those its tenant holds."""
        tenant = self.job(deployment.job).tenant
        held = self.state.held.get(tenant)
        if held is None:
            held = self.state.held[tenant] = HeldTime(at=now)
        settle(held, self.holdings(tenant)[0], now)
        if sign > 0:
            held.waited_at = now
        self._count_held(tenant, deployment, sign)

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
        for name in self.job(deployment.job).deployments:
            if name in self.waiting:
                self.waiting.mark_partial(name)

    def count_live_job(self, tenant: TenantId, sign: int) -> None:
        """Count (or, negative, discount) a job of the tenant among those that have not ended."""
        count = self.live_jobs.get(tenant, 0) + sign
        if count:
            self.live_jobs[tenant] = count
        else:
            self.live_jobs.pop(tenant, None)

    def holdings(self, tenant: TenantId) -> tuple[int, int]:
        """(GPUs, jobs with GPUs) that a tenant holds."""
        gpus, jobs = self._held.get(tenant, (0, {}))
        return gpus, len(jobs)

    def emit(self, command: Command) -> None:
        """Add a command to this call's answer."""
        self.commands.append(command)

    def touch(self, group: GroupId | None) -> None:
        """Have the group's next step decided before this call returns."""
        if group is not None:
            self.dirty[group] = None

    def wake(self, at: float, what: Subject) -> None:
        """Look at `what` again at `at`."""
        heapq.heappush(self.timers, (at, what))
        if self.timer_at is not None and at < self.timer_at:
            self.wakes_sooner = True
        if len(self.timers) > 2 * self.state.timers_swept + TIMERS_MIN:
            self._sweep_timers()

    def _sweep_timers(self) -> None:
        """Throw away timers of what has ended: most deadlines and silences never come."""
        # What is sorted is a heap, and the same one in every process.
        self.timers = sorted({timer for timer in self.timers if self._has_purpose(timer[1])})
        self.state.timers_swept = len(self.timers)

    def _has_purpose(self, what: Subject) -> bool:
        kind, name = what
        if kind is TimerKind.JOB:
            job = self.state.jobs.get(JobId(name))
            return job is not None and not job.state.is_final
        if kind is TimerKind.DEADLINE:
            operation = self.state.operations.get(OperationId(name))
            return operation is not None and not operation.state.is_final
        return kind is not TimerKind.GROUP or GroupId(name) in self.state.groups

    def due(self, now: float) -> list[Subject]:
        """What was to be looked at by `now`, without repetitions, oldest first."""
        found: dict[Subject, None] = {}
        while self.timers and self.timers[0][0] <= now:
            found[heapq.heappop(self.timers)[1]] = None
        if self.timer_at is not None and self.timer_at <= now:
            self.timer_at = None
        return list(found)

    def discard(self, blob: BlobRef | None) -> None:
        """Give a blob up at the end of this call."""
        if blob is not None:
            self.discards.append(blob)

    def add_own_commands(self, commands: list[Command]) -> None:
        """Complete this call's commands: what is given up, and the wake-up where an earlier one is
        needed."""
        self.wakes_sooner = False
        if self.discards:
            commands.append(DiscardBlobs(blobs=tuple(self.discards)))
            self.discards = []
        timers = self.timers
        if timers:
            at, timer_at = timers[0][0], self.timer_at
            if timer_at is None or at < timer_at:
                self.timer_at = at
                commands.append(SetTimer(at=at))

    def job(self, job: JobId) -> Job:
        return self.state.jobs[job]

    def deployment(self, deployment: DeploymentId) -> Deployment:
        return self.state.deployments[deployment]

    def group_of(self, deployment: Deployment) -> Group | None:
        """The group a deployment is placed on; absent while it waits for GPUs or has ended."""
        return None if deployment.group is None else self.state.groups[deployment.group]
