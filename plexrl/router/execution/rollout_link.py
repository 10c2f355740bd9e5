"""The router's connection to the rollout service, made when it is needed."""

import asyncio
from typing import Any

from plexrl.errors import ConnectionLostError, NotFoundError, UnavailableError
from plexrl.wire.links.address import parse_address
from plexrl.wire.links.credentials import Credentials, Role
from plexrl.wire.links.dial import connect
from plexrl.wire.rpc import Peer

START_S_MAX = 10.0
"""How long a request waits for a service that is being started for it."""
START_POLL_S = 0.1
Plain = dict[str, Any]


class RolloutLink:
    """Calls the rollout service."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        """`address` is empty if the cluster has no rollout service."""
        self._address = address
        self._credentials = credentials
        self._peer: Peer | None = None
        self._running: asyncio.Task[None] | None = None
        self._connecting = asyncio.Lock()

    async def call(self, method: str, params: Plain, *, timeout_s: float) -> Plain:
        """Call the service and return its reply.

        Raises:
            NotFoundError: the cluster has no rollout service.
            UnavailableError: it is restarting; the call may or may not have had an effect.
            PlexRLError: the error that the service raised.
        """
        if not self._address:
            raise NotFoundError(
                "this cluster has no rollout service: start the routers with its address, `rollout`"
            )
        try:
            return await self._call(method, params, timeout_s)
        except UnavailableError as error:
            if not error.details.get("is_starting"):
                raise
        # The first rollout of a cluster starts the service, which is no news for its controller.
        deadline = asyncio.get_running_loop().time() + START_S_MAX
        while True:
            await asyncio.sleep(START_POLL_S)
            try:
                return await self._call(method, params, timeout_s)
            except UnavailableError:
                if asyncio.get_running_loop().time() > deadline:
                    raise

    async def _call(self, method: str, params: Plain, timeout_s: float) -> Plain:
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
