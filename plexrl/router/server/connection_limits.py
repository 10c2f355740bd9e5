"""Limits on this process's connections, and what happens when file descriptors run out."""

import asyncio
import logging
import resource
import time
from typing import Any

from plexrl.process.children.startup import raise_descriptor_limit
from plexrl.router.server.config import RouterConfig
from plexrl.router.server.connections import (
    CONNECTIONS_MAX,
    Connections,
    connections_possible,
)

LOG = logging.getLogger(__name__)

QUIET_S = 60.0
"""Shortest time between two log messages about the same event."""
SHED_COUNT = 64
"""Connections to close if there is no descriptor for a new one."""


def make_connections(config: RouterConfig) -> Connections:
    """Connections bounded as configured and by the descriptor limit, which is raised to its
    maximum."""
    hard = raise_descriptor_limit()
    wanted = config.connections_max or CONNECTIONS_MAX
    possible = wanted if hard == resource.RLIM_INFINITY else connections_possible(hard)
    if config.connections_max is not None and possible < wanted:
        LOG.warning(
            "connections_max is %d, and the limit of %d descriptors allows %d: raise the limit "
            "(LimitNOFILE, ulimit -n)",
            wanted,
            hard,
            possible,
        )
    count = min(wanted, possible)
    of_address = config.address_connections_max or max(1, count // 2)
    return Connections(count, min(of_address, count))


class AcceptErrorHandler:
    """An event loop's exception handler that closes connections if a new one cannot be accepted.

    asyncio reports each of thousands of failed attempts in a row; only one is logged.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._shed_at = self._logged_at = -QUIET_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept()" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._shed_at < 0.5:
            return
        self._shed_at = now
        ended = self._connections.shed(SHED_COUNT)
        if now - self._logged_at >= QUIET_S:
            self._logged_at = now
            LOG.error(
                "no connection can be accepted (%s): %d of %d connections were closed; raise the "
                "limit on file descriptors, or lower connections_max",
                context.get("exception"),
                ended,
                self._connections.count + ended,
            )


class RateLimitedWarnings(logging.Filter):
    """Passes each warning once in `QUIET_S`, because clients can cause as many as they like."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record."""
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        text = str(record.msg)
        if now - self._passed_at.get(text, -QUIET_S) < QUIET_S:
            return False
        self._passed_at[text] = now
        return True
