"""The router's connection to the rollout service, made when it is needed."""

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from plexrl.errors import ConnectionLostError, NotFoundError, UnavailableError
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import connect
from plexrl.wire.rpc import Peer

START_S_MAX = 30.0
"""How long a request waits while the service starts."""
START_POLL_S = 0.1
WAITING_MAX = 256
"""Most requests that wait so."""


class RolloutLink:
    """Calls the rollout service."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        """`address` is empty if the cluster has no rollout service."""
        self._address = address
        self._credentials = credentials
        self._peer: Peer | None = None
        self._running: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()
        self._starting_until = -math.inf
        """Until when the service may be starting, by the event loop's clock."""
        self._waiting = 0

    async def call(self, method: str, params: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Call the service and return its reply, a view of the type that the method is for.

        Raises:
            NotFoundError: the cluster has no rollout service.
            UnavailableError: it is restarting; the call may or may not have had an effect.
            PlexRLError: the error that the service raised.
        """
        if not self._address:
            raise NotFoundError(
                "this cluster has no rollout service: start the routers with its address, `rollout`"
            )
        clock = asyncio.get_running_loop().time
        deadline = clock() + START_S_MAX
        while True:
            try:
                reply = await self._call(method, params, timeout_s)
                self._starting_until = -math.inf
                return reply
            except UnavailableError as error:
                if error.details.get("is_starting"):
                    self._starting_until = clock() + START_S_MAX
                # That the first rollout of a cluster starts the service is no news for a client.
                # A creation may meet it while nothing listens, through any router.
                is_starting = method == "create" or clock() < self._starting_until
                is_starting = is_starting and clock() < deadline
                if not is_starting or self._waiting >= WAITING_MAX:
                    raise
            self._waiting += 1
            try:
                await asyncio.sleep(START_POLL_S)
            finally:
                self._waiting -= 1

    async def _call(self, method: str, params: Mapping[str, Any], timeout_s: float) -> Any:
        try:
            peer = await self._connected()
            return await peer.call(method, params, timeout_s=timeout_s)
        except (ConnectionLostError, OSError) as error:
            raise UnavailableError(
                "the rollout service is restarting: the same request can be sent again",
                retry_after_s=0.5,
            ) from error

    async def _connected(self) -> Peer:
        async with self._connecting:
            if self._peer is None or self._running is None or self._running.done():
                address = parse_address(self._address)
                link = await connect(address, self._credentials, role=Role.ROLLOUT)
                self._peer = Peer(link.reader, link.writer, {})
                self._running = asyncio.create_task(self._peer.run())
            return self._peer

    async def close(self) -> None:
        """Close the connection."""
        if self._peer is not None and self._running is not None:
            self._peer.close()
            await asyncio.gather(self._running, return_exceptions=True)
