"""Request handlers, grouped by concern; `HANDLERS` maps each request type to its handler.

A new request needs a `Request` class, a handler in the module of its concern, and a row in that
module's `ENTRIES`.
"""

from plexrl.statemanager.daemon.handlers.table import HANDLERS

__all__ = ["HANDLERS"]
