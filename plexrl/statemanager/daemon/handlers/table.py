"""Request type → handler."""

from collections.abc import Mapping

from plexrl.statemanager.daemon.handlers import (
    bases,
    checkpoints,
    fetching,
    greeting,
    host_memory,
    lending,
    moves,
    registration,
    reporting,
    sharing,
)
from plexrl.statemanager.daemon.handlers.caller import Entry
from plexrl.statemanager.protocol.messages import Request

_ENTRIES = (
    *greeting.ENTRIES,
    *registration.ENTRIES,
    *lending.ENTRIES,
    *bases.ENTRIES,
    *host_memory.ENTRIES,
    *moves.ENTRIES,
    *sharing.ENTRIES,
    *fetching.ENTRIES,
    *reporting.ENTRIES,
    *checkpoints.ENTRIES,
)

HANDLERS: Mapping[type[Request], Entry] = {row.kind: row for row in _ENTRIES}
"""Every request there is. Only these are decoded."""
