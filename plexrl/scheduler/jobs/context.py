"""All that a step of the core can see."""

from dataclasses import InitVar, dataclass, field

from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.settings import Settings
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

    def __post_init__(self, config: SchedulerConfig) -> None:
        self.settings = Settings(config)
        self.cluster = Cluster(self.settings, self.state)
        self.effects = Effects(self.state)
