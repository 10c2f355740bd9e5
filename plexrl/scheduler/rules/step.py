"""One step of the core: what its functions read, and where they put what they cause.

A step is made where the core begins to handle an event, or the steps that follow one, and is thrown
away after it. Functions that decide or change something take the step and what they work on.
Functions that only read, also for queries, take a `Situation`: a step is one, and so is a cluster.
"""

from typing import Protocol

from plexrl.scheduler.rules.settings import Settings
from plexrl.scheduler.state.messages.effects import Effects
from plexrl.scheduler.state.records import State


class Situation(Protocol):
    """What decisions read."""

    state: State
    settings: Settings


class Step:
    """One step of the core, at `now` (seconds)."""

    __slots__ = ("effects", "now", "settings", "state")

    def __init__(self, state: State, settings: Settings, effects: Effects, now: float) -> None:
        self.state = state
        self.settings = settings
        self.effects = effects
        self.now = now
