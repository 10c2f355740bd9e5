"""All that a step of the core can see."""

from dataclasses import InitVar, dataclass, field

from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.rules.step import Step
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import State


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
