"""The cluster as the core's steps see it: state, settings, and the owners of what is derived from
both; and the context of these steps, which has their effects as well.

Functions take the owner that they need; those that need several take the `Cluster`.
"""

from dataclasses import InitVar, dataclass, field

from plexrl.scheduler.accounting.earlier_jobs import Unmeasured
from plexrl.scheduler.accounting.holdings import Holdings
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.waiting.queues import Queues
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.settings import Settings, Step
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import Deployment, State


@dataclass(frozen=True, slots=True)
class Cluster:
    """The owners. It has no state of its own."""

    settings: Settings
    state: State
    capacity: Capacity
    """What the groups have room for."""
    queues: Queues
    """Who waits for GPUs."""
    holdings: Holdings
    """What each tenant has."""
    unmeasured: Unmeasured
    """Deployments that the prior of their shape plans."""


def make_cluster(settings: Settings, state: State) -> Cluster:
    """The owners of what follows from the state under these settings."""
    _note_settings(state, settings.config)
    capacity = Capacity(settings, state)
    queues, holdings = Queues(capacity), Holdings(state)
    return Cluster(settings, state, capacity, queues, holdings, Unmeasured(state))


def reconfigure(cluster: Cluster, config: SchedulerConfig) -> None:
    """Use these settings, and derive again what depends on them."""
    cluster.settings.change(config)
    _note_settings(cluster.state, config)
    cluster.capacity.rebuild()
    cluster.queues.rebuild()


def hold(cluster: Cluster, deployment: Deployment, sign: int, now: float) -> None:
    """Add the deployment's GPUs to those that its tenant holds, or subtract them. A filler holds
    none."""
    cluster.holdings.hold(deployment, sign, now)
    if not deployment.spec.preemptible:
        cluster.queues.gpus_changed(cluster.state.job(deployment.job))


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
        self.cluster = make_cluster(self.settings, self.state)
        self.effects = Effects(self.state)
        self._step = Step(self.state, self.settings, self.effects, 0.0)

    def step(self, now: float) -> Step:
        """The step of the core at `now`: one for all that happens at one time."""
        step = self._step
        if step.now != now:
            step = self._step = Step(self.state, self.settings, self.effects, now)
        return step


def _note_settings(state: State, config: SchedulerConfig) -> None:
    """The settings that are looked up with every event."""
    state.history, state.ended_jobs = config.history, config.ended_jobs
    state.overdue_s = config.operation_overdue_s
