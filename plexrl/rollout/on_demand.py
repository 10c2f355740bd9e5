"""Serves the rollout service's socket until a cluster has its first rollout.

Most clusters have none, so the service is started when it is needed.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from plexrl.errors import NotFoundError, UnavailableError
from plexrl.rollout.service.config import FOLDER, SUFFIX
from plexrl.wire.links.address import UnixAddress
from plexrl.wire.links.credentials import Role
from plexrl.wire.links.dial import Link, serve
from plexrl.wire.messages.rollout_views import Rollouts
from plexrl.wire.rpc import Handler, Peer

LOOK_S = 1.0
"""Interval of looks whether the socket is there."""
START_S = 1.0
"""How long the service takes to start, for clients that try again."""


def has_rollouts(data_dir: Path) -> bool:
    """Whether a cluster has stored rollouts."""
    return any(data_dir.glob(f"{FOLDER}/*/*{SUFFIX}"))


async def first_rollout(address: UnixAddress) -> None:
    """Serve at `address` as a rollout service without rollouts; return, and stop serving, once a
    client wants to create one. The client is told to try again. If the socket is removed, listen
    again.

    Raises:
        OSError: the address cannot be listened on.
    """
    wanted = asyncio.Event()
    peers: set[Peer] = set()

    async def create(peer: Peer, _: Mapping[str, Any]) -> Rollouts:
        peer.close_after_answers()
        wanted.set()
        raise UnavailableError(
            "the rollout service is starting: retry", retry_after_s=START_S, is_starting=True
        )

    async def listing(*_: Any) -> Rollouts:
        return {"rollouts": []}

    async def missing(_: Peer, params: Mapping[str, Any]) -> Rollouts:
        raise NotFoundError(
            f"job {params['job']!r} has no asynchronous rollout {params['name']!r}: create it"
        )

    handlers: dict[str, Handler] = {"create": create, "list": listing} | dict.fromkeys(
        ("status", "exchange", "batch", "profile"), missing
    )

    async def on_link(link: Link) -> None:
        peer = Peer(link.reader, link.writer, handlers)
        peers.add(peer)
        try:
            await peer.run()
        finally:
            peers.discard(peer)

    while not wanted.is_set():
        server = await serve(address, None, on_link, roles=(Role.ROUTER,))
        try:
            await _wanted_or_gone(wanted, Path(address.path))
        finally:
            server.close()
            # A router that asked for something else must find the service by a new connection.
            for each in [*peers]:
                each.close()


async def _wanted_or_gone(wanted: asyncio.Event, path: Path) -> None:
    while not wanted.is_set() and await asyncio.to_thread(path.exists):
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await wanted.wait()
