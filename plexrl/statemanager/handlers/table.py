"""Request type → handler."""

from collections.abc import Mapping

from plexrl.statemanager.handlers import (
    bases,
    checkpoints,
    fetching,
    greeting,
    host_memory,
    lending,
    moves,
    registration,
    relaying,
    reporting,
    sharing,
)
from plexrl.statemanager.handlers.caller import Entry
from plexrl.statemanager.protocol import Request

_ENTRIES = (
    *greeting.ENTRIES,
    *registration.ENTRIES,
    *lending.ENTRIES,
    *bases.ENTRIES,
    *host_memory.ENTRIES,
    *moves.ENTRIES,
    *sharing.ENTRIES,
    *relaying.ENTRIES,
    *fetching.ENTRIES,
    *reporting.ENTRIES,
    *checkpoints.ENTRIES,
)

HANDLERS: Mapping[type[Request], Entry] = {row.kind: row for row in _ENTRIES}
"""Every request there is. Only these are decoded."""
