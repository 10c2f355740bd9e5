"""Context of a `handle` call: the state, indexes, the commands so far, and the pending steps."""

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
"""Fewer timers are never swept."""


@dataclass(slots=True)
class Context:
    """Shared by the core's modules; `commands` and `discards` are emptied by each `handle`."""

    config: SchedulerConfig
    state: State = field(default_factory=State)
    commands: list[Command] = field(default_factory=list)
    discards: list[BlobRef] = field(default_factory=list)
    dirty: dict[GroupId, None] = field(default_factory=dict)
    """Groups whose next step must be decided, in the order in which they were touched. Groups that
    were removed since are skipped."""
    timers: list[Timer] = field(default_factory=list)
    """Heap of (time, subject); an entry may have become pointless."""
    timer_at: float | None = None
    """Time of the last `SetTimer` that is not due yet."""
    wakes_sooner: bool = False
    """A timer earlier than `timer_at` was added."""
    policy: PlacementPolicy = field(init=False)
    ordering: Ordering = field(init=False)
    anticipates: bool = field(init=False)
    history: int = field(init=False)
    """Copied from the configuration, like `ended_jobs`, because every event reads both."""
    ended_jobs: int = field(init=False)
    profiler: ProfilerConfig = field(init=False)
    inventory: Inventory = field(init=False)
    """Derived from the state, as `waiting`."""
    waiting: Waiting = field(default_factory=Waiting)
    """Deployments without GPUs."""
    cycles_over: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose cycle ended in this event."""
    relocating: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose move waits for an operation boundary."""
    contentions: dict[tuple[Resident, ...], Contention] = field(default_factory=dict)
    """Cache of predictions under these settings: a waiting deployment tries a group many times."""
    live_jobs: dict[TenantId, int] = field(default_factory=dict)
    """Number of live jobs of each tenant that has some; derived from the state."""
    detached: dict[JobId, None] = field(default_factory=dict)
    """Live jobs without a controller that are not set aside; derived from the state."""
    _held: dict[TenantId, tuple[int, dict[JobId, int]]] = field(default_factory=dict)

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
        # An old snapshot has none.
        tokens = (group.token for group in self.state.groups.values())
        self.state.tokens_made = max(self.state.tokens_made, *tokens, 0)
        self.reconfigure(self.config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use these settings, and derive the indexes again."""
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
                # An old snapshot has none.
                deployment.nodes = tuple(sorted({rank.node for rank in deployment.ranks}))
            if deployment.moves.planned is not None:
                self.relocating[deployment.deployment] = None
            if deployment.state == WpgState.WAITING:
                if not self.job(deployment.job).is_set_aside:
                    self.wait(deployment)
            elif deployment.group is not None:
                self._count_held(self.job(deployment.job).tenant, deployment, +1)

    def wait(self, deployment: Deployment) -> None:
        """Put the deployment into the queues for GPUs, after all others."""
        job = self.job(deployment.job)
        self.waiting.enter(deployment, job)
        if self._is_placed(job):
            self.waiting.mark_partial(deployment.deployment)
        elif not job.gang:
            self._line_up([deployment], job)
            # The job has lost its last GPUs: its other deployments are in queues again.
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
        """Add the deployment's GPUs to those that its tenant holds, or subtract them."""
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

    def emit(self, command: Command) -> None:
        """Add a command to the result of this call."""
        self.commands.append(command)

    def touch(self, group: GroupId | None) -> None:
        """Decide the group's next step before this call returns."""
        if group is not None:
            self.dirty[group] = None

    def wake(self, at: float, what: Subject) -> None:
        """Set a timer for `what`."""
        heapq.heappush(self.timers, (at, what))
        if self.timer_at is not None and at < self.timer_at:
            self.wakes_sooner = True
        if len(self.timers) > 2 * self.state.timers_swept + TIMERS_MIN:
            self._sweep_timers()

    def _sweep_timers(self) -> None:
        """Remove pointless timers: most deadlines and controller timeouts are never reached."""
        # A sorted list is a heap, and is the same in every process.
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
        """Take the due subjects, without repetition, oldest first."""
        found: dict[Subject, None] = {}
        while self.timers and self.timers[0][0] <= now:
            found[heapq.heappop(self.timers)[1]] = None
        if self.timer_at is not None and self.timer_at <= now:
            self.timer_at = None
        return list(found)

    def discard(self, blob: BlobRef | None) -> None:
        """Delete a blob at the end of this call."""
        if blob is not None:
            self.discards.append(blob)

    def add_own_commands(self, commands: list[Command]) -> None:
        """Add the commands for deleted blobs, and for a timer earlier than the pending one."""
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
        """The group of a deployment; None while it waits for GPUs, and after its end."""
        return None if deployment.group is None else self.state.groups[deployment.group]
