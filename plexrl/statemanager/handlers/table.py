"""Request type → handler."""

from collections.abc import Mapping
from types import MappingProxyType

from plexrl.statemanager.handlers import (
    checkpoints,
    lending,
    moves,
    registration,
    reporting,
    sharing,
)
from plexrl.statemanager.handlers.caller import AnyHandler
from plexrl.statemanager.protocol import Request

HANDLERS: Mapping[type[Request], AnyHandler] = MappingProxyType(
    dict(
        (
            *registration.ENTRIES,
            *lending.ENTRIES,
            *moves.ENTRIES,
            *sharing.ENTRIES,
            *reporting.ENTRIES,
            *checkpoints.ENTRIES,
        )
    )
)
"""Every request there is. Only these are decoded."""
