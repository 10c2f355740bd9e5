"""How many connections this process can have, and what it does when descriptors run out anyway."""

import asyncio
import logging
import resource
import time
from typing import Any

from plexrl.router.config import RouterConfig
from plexrl.router.http.server.connections import (
    CONNECTIONS_MAX,
    Connections,
    connections_possible,
)

LOG = logging.getLogger(__name__)

QUIET_S = 60.0
"""Between two lines in the log about the same."""
SHED = 64
"""Connections that are ended when there is no descriptor for a new one."""


def make_connections(config: RouterConfig) -> Connections:
    """Bounded as configured, and by the limit on descriptors, which is raised as far as it goes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
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


class AcceptFailures:
    """An event loop's exception handler: makes room where a connection could not be accepted.

    asyncio reports each of the thousands of attempts that it makes in a row. One is logged.
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
        ended = self._connections.shed(SHED)
        if now - self._logged_at >= QUIET_S:
            self._logged_at = now
            LOG.error(
                "no connection can be accepted (%s): %d of %d connections were ended; raise the "
                "limit on descriptors, or lower connections_max",
                context.get("exception"),
                ended,
                self._connections.count + ended,
            )


class SparseWarnings(logging.Filter):
    """Lets a warning pass once in `QUIET_S`: strangers cause them, as often as they like."""

    def __init__(self) -> None:
        super().__init__()
        self._passed_at: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        if record.levelno != logging.WARNING:
            return True
        now = time.monotonic()
        text = str(record.msg)
        if now - self._passed_at.get(text, -QUIET_S) < QUIET_S:
            return False
        self._passed_at[text] = now
        return True
