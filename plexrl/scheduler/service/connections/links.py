"""The scheduler's connections: routers, which run operations, and node agents, which run workers.

Commands are sent in the core's order. Commands that the core does not repeat (blobs to discard,
states to release) wait here until a receiver is connected.
"""

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any

from plexrl.errors import ConnectionLostError, NoAnswerError, PlexRLError
from plexrl.ids import NodeId, RouterId
from plexrl.wire.messages import (
    AbortOperation,
    Command,
    DiscardBlobs,
    LaunchWorkers,
    MigrateState,
    PrefetchState,
    ReleaseState,
    Run,
    StopWorkers,
)
from plexrl.wire.messages.reports import WorkersGone
from plexrl.wire.rpc import Peer

if TYPE_CHECKING:
    from plexrl.process.conditions import Condition
    from plexrl.wire.messages.reports import HostMemoryReported

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
    """All connected routers. The runs of a deployment go to one router, so they stay in order;
    deployments are spread over all routers. The core repeats runs that were sent to a router that
    left. A router that accepts nothing for `send_timeout_s` is disconnected, because all events
    wait meanwhile."""

    def __init__(self, send_timeout_s: float = ROUTER_SEND_TIMEOUT_S) -> None:
        self._send_timeout_s = send_timeout_s
        self._peers: dict[RouterId, Peer] = {}
        self._kept: deque[Command] = deque(maxlen=OUTBOX_MAX)

    def add(self, router: RouterId, peer: Peer) -> None:
        """Add a router's connection; its former connection is closed."""
        former = self._peers.pop(router, None)
        if former is not None:
            former.close()
        self._peers[router] = peer

    def remove(self, router: RouterId, peer: Peer) -> bool:
        """Remove an ended connection. False: a newer connection of the router has replaced it."""
        if self._peers.get(router) is not peer:
            return False
        del self._peers[router]
        return True

    async def send(self, command: Run | AbortOperation | DiscardBlobs) -> None:
        """Send a command. The core repeats runs and aborts; discards are kept until sent."""
        if isinstance(command, DiscardBlobs):
            self._kept.append(command)
            await self.flush()
            return
        method = "run" if isinstance(command, Run) else "abort"
        await self._notify(method, command, zlib.crc32(command.deployment.encode()))

    async def flush(self) -> None:
        """Send the commands that were kept because no router was connected."""
        while self._kept and await self._notify("discard", self._kept[0], 0):
            self._kept.popleft()

    async def forget_callers(self) -> None:
        """Return once all routers have dropped their cached API keys. A router that does not answer
        is disconnected, which also drops its cache."""
        async with asyncio.TaskGroup() as tasks:
            for peer in self._peers.values():
                tasks.create_task(self._forget_callers(peer))

    async def tell_workers_gone(self, command: StopWorkers) -> None:
        """Tell all routers that a deployment's workers have ended, up to an incarnation. A router
        that is not connected asks for the live ones when it connects."""
        gone = WorkersGone(deployment=command.deployment, incarnation=command.incarnation)
        async with asyncio.TaskGroup() as tasks:
            for peer in list(self._peers.values()):
                tasks.create_task(self._notify_one(peer, peer.tell(gone)))

    async def _forget_callers(self, peer: Peer) -> None:
        try:
            await peer.call("forget_callers", {}, timeout_s=self._send_timeout_s)
        except ConnectionLostError:
            return
        except PlexRLError as error:
            LOG.error("a router did not drop its API keys (%s); disconnected", error)
            peer.abort()

    async def _notify(self, method: str, command: Command, place: int) -> bool:
        """Send to the first router that accepts, starting at position `place` modulo their
        number."""
        peers = [self._peers[router] for router in sorted(self._peers)]
        first = place % len(peers) if peers else 0
        params = {"command": command}
        for peer in (*peers[first:], *peers[:first]):
            if await self._notify_one(peer, peer.notify(method, params)):
                return True
        return False

    async def _notify_one(self, peer: Peer, sending: Coroutine[Any, Any, None]) -> bool:
        """Whether a router has accepted the message that is being sent."""
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await sending
        except TimeoutError:
            LOG.error("a router accepted no commands for %g s; disconnected", self._send_timeout_s)
            peer.abort()
            return False
        except ConnectionLostError:
            # Its reader detects the same loss and reports the router lost.
            return False
        return True


class AgentLink:
    """One node agent's connection and its queue of commands, sent one at a time."""

    def __init__(self, node: NodeId, peer: Peer, kept: Iterable[Queued]) -> None:
        self.node = node
        self.peer = peer
        # Not shared with a former link, which may still be about to remove a sent call.
        self._outbox: deque[Queued] = deque(kept, maxlen=OUTBOX_MAX)
        self._filled = asyncio.Event()
        if self._outbox:
            self._filled.set()

    def send(self, method: str, params: dict[str, Any]) -> None:
        """Queue a call."""
        self._outbox.append((method, params))
        self._filled.set()

    def releases(self) -> list[Queued]:
        """The queued calls that the core does not repeat when the node joins."""
        return [queued for queued in self._outbox if queued[0] == RELEASE]

    async def run(self) -> None:
        """Send the queued calls until the connection ends; retry failed ones."""
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
        self.host_memory: dict[NodeId, HostMemoryReported] = {}
        """How far each connected node's host tier is ready; absent: wholly, or nothing is said."""
        self.conditions: dict[NodeId, tuple[Condition, ...]] = {}
        """What is wrong on each connected node now."""

    def add(self, node: NodeId, peer: Peer) -> AgentLink:
        """Add an agent's connection; the caller runs the link's `run` while the connection lasts.

        Launches and stops queued for the former connection are dropped, because the core repeats
        them when a node joins; releases are kept.
        """
        former = self._links.get(node)
        if former is not None:
            self.remove(former)
            former.peer.close()
        link = AgentLink(node, peer, self._kept.pop(node, ()))
        self._links[node] = link
        return link

    def remove(self, link: AgentLink) -> bool:
        """Remove an ended connection. False: a newer connection of the node has replaced it."""
        if self._links.get(link.node) is not link:
            return False
        del self._links[link.node]
        self.host_memory.pop(link.node, None)
        self.conditions.pop(link.node, None)
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
        """Order a node to fetch its ranks' part of a version, outside its command queue: a copy may
        take minutes.

        Returns (error message, error code), both empty on success; None if the node is not
        connected (the core repeats the order when the node joins).
        """
        link = self._links.get(node)
        if link is None:
            return None
        params = {"command": command}
        try:
            await link.peer.call("migrate_state", params, timeout_s=MIGRATION_TIMEOUT_S)
        except ConnectionLostError:
            return None
        except PlexRLError as error:
            return error.message, error.code
        return "", ""

    def send(self, command: LaunchWorkers | StopWorkers | ReleaseState | PrefetchState) -> None:
        """Send a command to the agents of all nodes it names."""
        match command:
            case LaunchWorkers():
                method, nodes = "launch", tuple(sorted({rank.node for rank in command.ranks}))
            case StopWorkers():
                method, nodes = "stop", command.nodes
            case ReleaseState():
                method, nodes = RELEASE, command.nodes
            case PrefetchState():
                method, nodes = "prefetch_state", command.nodes
        params = {"command": command}
        for node in nodes:
            link = self._links.get(node)
            if link is not None:
                link.send(method, params)
            elif method == RELEASE:
                self._keep(node, (method, params))

    def _keep(self, node: NodeId, queued: Queued) -> None:
        self._kept.setdefault(node, deque(maxlen=OUTBOX_MAX)).append(queued)
