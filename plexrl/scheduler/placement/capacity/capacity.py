"""What the node groups have room for: GPUs, memory and time, and the contention that is predicted.

It is derived from state and settings. Decisions that need no more than these take a `Capacity`.
"""

from dataclasses import dataclass, field

from plexrl.scheduler.placement.capacity.inventory import Inventory
from plexrl.scheduler.placement.contention.predictions import Predictions
from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.records import State


@dataclass(slots=True)
class Capacity:
    """The capacity of the groups, under the settings in force."""

    settings: Settings
    state: State
    inventory: Inventory = field(init=False)
    """The groups' GPUs, memory and time."""
    predictions: Predictions = field(init=False)
    """Contention of the members of a group."""

    def __post_init__(self) -> None:
        self.rebuild()

    def rebuild(self) -> None:
        """Derive all of it again: the settings have changed."""
        settings = self.settings
        self.inventory = Inventory(settings.config, settings.policy, self.state)
        self.predictions = Predictions(settings)
