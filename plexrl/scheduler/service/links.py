"""The scheduler's connections: routers, which run operations, and node agents, which run workers.

Commands leave in the order the core gave them. What a receiver must not miss and the core will not
say again (blobs to discard, states to release) waits here until one is connected.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Iterable
from typing import Any

from plexrl.errors import ConnectionLostError, NoAnswerError, PlexRLError
from plexrl.ids import NodeId, RouterId
from plexrl.scheduler.state.commands import (
    CODEC,
    AbortOperation,
    Command,
    DiscardBlobs,
    LaunchWorkers,
    MigrateState,
    PrefetchState,
    ReleaseState,
    RunOperation,
    StopWorkers,
)
from plexrl.wire.rpc import Peer

LOG = logging.getLogger(__name__)

AGENT_CALL_TIMEOUT_S = 60.0
MIGRATION_TIMEOUT_S = 3600.0
ROUTER_SEND_TIMEOUT_S = 5.0
RETRY_S = 0.5
OUTBOX_MAX = 100_000
RELEASE = "release_state"

Queued = tuple[str, dict[str, Any]]
"""A method and its parameters."""


class RouterLinks:
    """All connected routers. A deployment's runs all go to one of them, so that they stay in order,
    and the deployments are spread over all; a run that was sent to one that left is the core's to
    repeat. One that takes nothing for `send_timeout_s` seconds is cut off, because all events wait
    meanwhile."""

    def __init__(self, send_timeout_s: float = ROUTER_SEND_TIMEOUT_S) -> None:
        self._send_timeout_s = send_timeout_s
        self._peers: dict[RouterId, Peer] = {}
        self._kept: deque[Command] = deque(maxlen=OUTBOX_MAX)

    def add(self, router: RouterId, peer: Peer) -> None:
        """A router connected; a former connection of the same one is closed."""
        former = self._peers.pop(router, None)
        if former is not None:
            former.close()
        self._peers[router] = peer

    def remove(self, router: RouterId, peer: Peer) -> bool:
        """A connection ended; false where a newer one of the same router has replaced it."""
        if self._peers.get(router) is not peer:
            return False
        del self._peers[router]
        return True

    async def send(self, command: RunOperation | AbortOperation | DiscardBlobs) -> None:
        """Pass a command on. Runs and aborts are the core's to repeat; discards are kept."""
        if isinstance(command, DiscardBlobs):
            self._kept.append(command)
            await self.flush()
            return
        method = "run" if isinstance(command, RunOperation) else "abort"
        await self._notify(method, command, zlib.crc32(command.deployment.encode()))

    async def flush(self) -> None:
        """Pass on what was kept for want of a router."""
        while self._kept and await self._notify("discard", self._kept[0], 0):
            self._kept.popleft()

    async def forget_callers(self) -> None:
        """Return once no router takes an API key for known by what it asked before. A router that
        does not answer is cut off, which makes it forget as well."""
        async with asyncio.TaskGroup() as tasks:
            for peer in self._peers.values():
                tasks.create_task(self._forget_callers(peer))

    async def _forget_callers(self, peer: Peer) -> None:
        try:
            await peer.call("forget_callers", {}, timeout_s=self._send_timeout_s)
        except ConnectionLostError:
            return
        except PlexRLError as error:
            LOG.error("a router did not forget API keys (%s); cut off", error)
            peer.abort()

    async def _notify(self, method: str, command: Command, place: int) -> bool:
        """Send to the first that takes it, beginning at a place among all."""
        peers = [self._peers[router] for router in sorted(self._peers)]
        first = place % len(peers) if peers else 0
        for peer in (*peers[first:], *peers[:first]):
            try:
                async with asyncio.timeout(self._send_timeout_s):
                    await peer.notify(method, {"command": CODEC.to_plain(command)})
            except TimeoutError:
                LOG.error("a router takes no commands for %g s; cut off", self._send_timeout_s)
                peer.abort()
                continue
            except ConnectionLostError:
                # Its reader meets the same loss and reports the router gone.
                continue
            return True
        return False


class AgentLink:
    """One node agent's connection and the commands on their way to it, one at a time."""

    def __init__(self, node: NodeId, peer: Peer, kept: Iterable[Queued]) -> None:
        self.node = node
        self.peer = peer
        # Each link's own: a former link may still be between a call and taking it off.
        self._outbox: deque[Queued] = deque(kept, maxlen=OUTBOX_MAX)
        self._filled = asyncio.Event()
        if self._outbox:
            self._filled.set()

    def send(self, method: str, params: dict[str, Any]) -> None:
        """Queue a call."""
        self._outbox.append((method, params))
        self._filled.set()

    def releases(self) -> list[Queued]:
        """The queued calls that the core will not say again when the node joins."""
        return [queued for queued in self._outbox if queued[0] == RELEASE]

    async def run(self) -> None:
        """Make the queued calls until the connection ends; a failed one is tried again."""
        while True:
            await self._filled.wait()
            while self._outbox:
                method, params = self._outbox[0]
                try:
                    await self.peer.call(method, params, timeout_s=AGENT_CALL_TIMEOUT_S)
                except ConnectionLostError:
                    return
                except NoAnswerError as error:
                    LOG.warning("%s on node %s: %s; trying again", method, self.node, error)
                    await asyncio.sleep(RETRY_S)
                    continue
                except PlexRLError as error:
                    LOG.error("node %s refused %s: %s", self.node, method, error)
                self._outbox.popleft()
            self._filled.clear()


class AgentLinks:
    """All node agents, connected or expected."""

    def __init__(self) -> None:
        self._links: dict[NodeId, AgentLink] = {}
        self._kept: dict[NodeId, deque[Queued]] = {}

    def add(self, node: NodeId, peer: Peer) -> AgentLink:
        """An agent connected; the link's `run` must be running while the connection lasts.

        Launches and stops that were on their way to its former connection are dropped, because the
        core says them again when a node joins; releases are kept.
        """
        former = self._links.get(node)
        if former is not None:
            self.remove(former)
            former.peer.close()
        link = AgentLink(node, peer, self._kept.pop(node, ()))
        self._links[node] = link
        return link

    def remove(self, link: AgentLink) -> bool:
        """A connection ended; false where a newer one of the same node has replaced it."""
        if self._links.get(link.node) is not link:
            return False
        del self._links[link.node]
        for queued in link.releases():
            self._keep(link.node, queued)
        return True

    def connected(self) -> list[AgentLink]:
        """Every connected agent."""
        return list(self._links.values())

    def is_connected(self, node: NodeId) -> bool:
        """Whether the node's agent is connected."""
        return node in self._links

    async def migrate(self, command: MigrateState, node: NodeId) -> tuple[str, str] | None:
        """Have a node fetch a version, beside whatever else it is told: a copy may take minutes.

        Returns why it failed and that error's code, both empty where it did not; None where the
        node is not there to ask (the core asks again when it joins).
        """
        link = self._links.get(node)
        if link is None:
            return None
        params = {"command": CODEC.to_plain(command)}
        try:
            await link.peer.call("migrate_state", params, timeout_s=MIGRATION_TIMEOUT_S)
        except ConnectionLostError:
            return None
        except PlexRLError as error:
            return error.message, error.code
        return "", ""

    def send(self, command: LaunchWorkers | StopWorkers | ReleaseState | PrefetchState) -> None:
        """Pass a command to the agent of every node it speaks of."""
        match command:
            case LaunchWorkers():
                method, nodes = "launch", tuple(sorted({rank.node for rank in command.ranks}))
            case StopWorkers():
                method, nodes = "stop", command.nodes
            case ReleaseState():
                method, nodes = RELEASE, command.nodes
            case PrefetchState():
                method, nodes = "prefetch_state", command.nodes
        params = {"command": CODEC.to_plain(command)}
        for node in nodes:
            link = self._links.get(node)
            if link is not None:
                link.send(method, params)
            elif method == RELEASE:
                self._keep(node, (method, params))

    def _keep(self, node: NodeId, queued: Queued) -> None:
        self._kept.setdefault(node, deque(maxlen=OUTBOX_MAX)).append(queued)
