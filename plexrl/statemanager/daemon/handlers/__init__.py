"""What comes of each request: a handler for each type, grouped by concern.

A new request is a `Request` and a handler in the module of its concern, and a row in that module's
`ENTRIES`.
"""

from plexrl.statemanager.daemon.handlers.table import HANDLERS

__all__ = ["HANDLERS"]
