"""The StateManager: a daemon per node, the only authority over where model state lies."""

from plexrl.statemanager.arena import Arena
from plexrl.statemanager.client import LoadReport, MoveReport, StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.keys import StateKey, StatePart, StateSlice

__all__ = [
    "Arena",
    "LoadReport",
    "MoveReport",
    "StateKey",
    "StateManagerClient",
    "StateManagerConfig",
    "StatePart",
    "StateSlice",
]
