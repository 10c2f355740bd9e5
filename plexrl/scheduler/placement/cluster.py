"""The cluster as the core's steps see it: state, settings, and the indexes derived from both; and
the context of these steps, which has their effects as well."""

from dataclasses import InitVar, dataclass, field

from plexrl.ids import DeploymentId
from plexrl.scheduler.accounting.earlier_jobs import Unmeasured
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.placement.capacity.inventory import Inventory
from plexrl.scheduler.placement.contention.contention import Contention, Resident
from plexrl.scheduler.placement.waiting.waiting import Waiting
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.settings import Settings, Step
from plexrl.scheduler.state.machines.wpg_states import WpgState
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import Deployment, Job, State


@dataclass(slots=True)
class Cluster:
    """State, settings and indexes."""

    settings: Settings
    state: State
    holdings: Holdings = field(init=False)
    """What each tenant has."""
    inventory: Inventory = field(init=False)
    """The groups' GPUs and time. Derived from the state, as all below."""
    waiting: Waiting = field(default_factory=Waiting)
    """Deployments without GPUs."""
    fillers: dict[DeploymentId, None] = field(default_factory=dict)
    """Preemptible deployments without a group."""
    relocating: dict[DeploymentId, None] = field(default_factory=dict)
    """Deployments whose move waits for an operation boundary."""
    unmeasured: Unmeasured = field(default_factory=Unmeasured)
    """Deployments that the prior of their shape plans."""
    contentions: dict[tuple[Resident, ...], Contention] = field(default_factory=dict)
    """Cache of predictions under these settings: a waiting deployment tries a group many times."""

    def __post_init__(self) -> None:
        self.holdings = Holdings(self.state)
        self.reconfigure(self.settings.config)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Use these settings, and derive the indexes again."""
        self.settings.change(config)
        self.state.history, self.state.ended_jobs = config.history, config.ended_jobs
        self.state.overdue_s = config.operation_overdue_s
        self.inventory = Inventory(config, self.settings.policy, self.state)
        self.waiting.clear()
        self.fillers.clear()
        self.relocating.clear()
        self.contentions.clear()
        self.unmeasured.clear()
        for deployment in self.state.deployments.values():
            self.unmeasured.add(deployment)
            if deployment.wpg.moves.planned is not None:
                self.relocating[deployment.deployment] = None
            is_set_aside = self.state.job(deployment.job).is_set_aside
            if deployment.wpg.state == WpgState.WAITING and not is_set_aside:
                self.wait(deployment)

    def wait(self, deployment: Deployment) -> None:
        """Put the deployment into the queues for GPUs, after all others."""
        job = self.state.job(deployment.job)
        if deployment.spec.preemptible:
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

    def demand_changed(self, deployment: Deployment) -> None:
        """A waiting deployment has another trace."""
        self.waiting.change_demand(deployment, self.inventory.duty_when_placed(deployment))

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
        self.holdings.hold(deployment, sign, now)
        if not deployment.spec.preemptible:
            for name in self.state.job(deployment.job).deployments:
                if name in self.waiting:
                    self.waiting.mark_partial(name)

    def relocating_in_order(self) -> list[Deployment]:
        """The deployments whose move waits, oldest first."""
        return sorted(map(self.state.deployment, self.relocating), key=lambda each: each.serial)


@dataclass(slots=True)
class Context:
    """The cluster, and the effects of the event that is handled."""

    config: InitVar[SchedulerConfig]
    state: State = field(default_factory=State)
    settings: Settings = field(init=False)
    cluster: Cluster = field(init=False)
    effects: Effects = field(init=False)
    _step: Step = field(init=False)

    def __post_init__(self, config: SchedulerConfig) -> None:
        self.settings = Settings(config)
        self.cluster = Cluster(self.settings, self.state)
        self.effects = Effects(self.state)
        self._step = Step(self.state, self.settings, self.effects, 0.0)

    def step(self, now: float) -> Step:
        """The step of the core at `now`: one for all that happens at one time."""
        step = self._step
        if step.now != now:
            step = self._step = Step(self.state, self.settings, self.effects, now)
        return step
