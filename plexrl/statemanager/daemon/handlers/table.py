"""The handler of each request type."""

from collections.abc import Mapping

from plexrl.statemanager.daemon.handlers import (
    checkpoints,
    device_memory,
    host_memory,
    moves,
    registration,
    reporting,
    sharing,
)
from plexrl.statemanager.daemon.handlers.caller import RequestEntry
from plexrl.statemanager.protocol.messages import Request

_ENTRIES = (
    *registration.ENTRIES,
    *device_memory.ENTRIES,
    *host_memory.ENTRIES,
    *moves.ENTRIES,
    *sharing.ENTRIES,
    *reporting.ENTRIES,
    *checkpoints.ENTRIES,
)

HANDLERS: Mapping[type[Request], RequestEntry] = {row.kind: row for row in _ENTRIES}
"""All requests. The daemon decodes no other message."""
