"""Runs the service: from the replayed journal to the end of the last connection."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from plexrl.errors import AuthenticationError, ConflictError, UnavailableError
from plexrl.ids import NodeId, RouterId, TenantId
from plexrl.scheduler.rules.config import SchedulerConfig, core_settings
from plexrl.scheduler.service.connections.connection import Connection
from plexrl.scheduler.service.connections.node_leases import NodeLeases
from plexrl.scheduler.service.holding_server import HoldingServer
from plexrl.scheduler.service.listeners import Listeners
from plexrl.scheduler.service.shell import Shell
from plexrl.scheduler.state.messages import events as ev
from plexrl.wire.links.credentials import LOCAL
from plexrl.wire.links.dial import Link
from plexrl.wire.messages.reports import Heartbeat
from plexrl.wire.rpc import Peer

LOG = logging.getLogger(__name__)

OPERATOR = TenantId("operator")
HELD_CHECK_S = 0.2
"""Interval for checking whether the journal accepts the first events."""


class Service:
    """Serves routers and agents."""

    def __init__(
        self,
        config: SchedulerConfig,
        shell: Shell,
        listeners: Listeners | None = None,
        lead_confirmed_at: Callable[[], float] | None = None,
    ) -> None:
        """`lead_confirmed_at`: when the journal confirmed last that this scheduler leads, by the
        event loop's clock; None: there is no other scheduler."""
        self._config = config
        self.shell = shell
        self.listeners = listeners or Listeners(config)
        self._lead_confirmed_at = lead_confirmed_at or asyncio.get_running_loop().time
        self._former_lease_s = max(config.node_lease_s, shell.core.settings.config.node_lease_s)
        self._leases = NodeLeases(config.node_lease_s, config.lease_s)
        self._connections: dict[Connection, Peer] = {}
        """Connections of processes on other machines."""
        self._core = shell.core
        self._background: set[asyncio.Task[None]] = set()
        self._graces: dict[NodeId, asyncio.Task[None]] = {}

    async def run(
        self, ready: Callable[[], None], stop: asyncio.Event, holding: HoldingServer | None = None
    ) -> None:
        """Serve until `stop`; `ready` is called once the socket listens.

        The service also starts if the journal does not accept the first events: queries work, and
        requests are refused with a retry. Until then `holding` serves the socket.

        Raises:
            LeaseLostError: another scheduler leads; nothing was cleaned up.
        """
        runner = asyncio.create_task(self.shell.run())
        stopping = asyncio.create_task(stop.wait())
        beginning = asyncio.create_task(self._begin())
        try:
            await self._begun_or_held(beginning, runner, stopping, holding)
            if stopping.done():
                return
            if holding is not None:
                await holding.close()
            await self.listen()
            self._expect_nodes()
            self.keep(self._end_silent_links())
            ready()
            await asyncio.wait({runner, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                beginning.result()
            if runner.done():
                # A lost lease, after which no peer may receive anything, or a bug.
                runner.result()
            await self.end()
        finally:
            beginning.cancel()
            stopping.cancel()
            runner.cancel()
            await asyncio.gather(runner, stopping, beginning, return_exceptions=True)

    async def listen(self) -> None:
        """Accept connections. Raises `ConflictError`: an address is taken."""
        await self.listeners.open(self._connected)

    async def end(self) -> None:
        """Accept no more, and end all connections and what runs in the background."""
        self.listeners.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def _begun_or_held(
        self,
        beginning: asyncio.Task[None],
        runner: asyncio.Task[None],
        stopping: asyncio.Task[Any],
        holding: HoldingServer | None,
    ) -> None:
        """Return when the first events are accepted, or when they wait and the operator exists
        already."""
        while True:
            awaited: set[asyncio.Task[Any]] = {beginning, runner, stopping}
            await asyncio.wait(
                awaited,
                timeout=HELD_CHECK_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if runner.done():
                runner.result()
            if beginning.done():
                beginning.result()
                return
            if stopping.done():
                return
            held = self.shell.outage.error
            if held is None:
                continue
            if OPERATOR in self._core.tenants():
                return
            if holding is not None:
                await holding.hold(held)

    async def _begin(self) -> None:
        await self.shell.report(ev.SchedulerStarted(settings=core_settings(self._config)))
        known = set(self._core.tenants())
        created = [(OPERATOR, self._config.operator_key_digest, True)] + [
            (TenantId(name), digest, False) for name, digest in self._config.tenants
        ]
        for tenant, digest, is_operator in created:
            if tenant not in known:
                await self.shell.report(
                    ev.TenantCreated(tenant=tenant, key_digest=digest, is_operator=is_operator)
                )
            elif tenant == OPERATOR:
                await self._accept_operator_key(digest)

    async def _accept_operator_key(self, digest: str) -> None:
        """Accept the configuration's key as the operator's, unless it was revoked."""
        try:
            self._core.authenticate(digest, self.shell.clock.now())
            return
        except AuthenticationError:
            LOG.info("the configuration names a new operator key")
        try:
            await self.shell.request(ev.ApiKeyAdded(tenant=OPERATOR, key_digest=digest))
        except ConflictError as error:
            LOG.warning(
                "the operator's key of the configuration is not valid (%s): remove operator.key "
                "from the data directory and start again, which makes a new key",
                error,
            )

    def _expect_nodes(self) -> None:
        """Give nodes known before the restart the usual grace period to reconnect, and all leases
        that the former scheduler may have granted the time to run out."""
        now = asyncio.get_running_loop().time()
        for node, machine in self._core.node_machines().items():
            if self._config.tls is not None:
                self._leases.take_over(node, machine, now, self._former_lease_s)
            self.node_disconnected(node)

    async def _connected(self, link: Link) -> None:
        connection = Connection(self, self.shell, link.peer)
        peer = Peer(link.reader, link.writer, connection.handlers())
        if link.peer != LOCAL:
            self._connections[connection] = peer
        task = asyncio.current_task()
        assert task is not None
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            await peer.run()
        finally:
            self._connections.pop(connection, None)
            connection.ended(peer)

    async def _end_silent_links(self) -> None:
        """End the connections of other machines whose processes send no heartbeats."""
        interval_s = heartbeat_s(self._config)
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        while True:
            await asyncio.sleep(interval_s)
            now = loop.time()
            # If this process was suspended, heartbeats wait to be read.
            late_s = max(0.0, now - checked_at - 2 * interval_s)
            checked_at = now
            for connection, peer in list(self._connections.items()):
                connection.heard_at = excuse(connection.heard_at, late_s, now)
                if now - connection.heard_at > silence_s(self._config):
                    LOG.warning("%s is silent; disconnected", connection.identity)
                    peer.abort()

    def heartbeat(self, node: NodeId | None, crl_number: int | None) -> Heartbeat:
        """The answer to `hello` or a heartbeat of another machine's process; `node`: an agent's.
        `crl_number`: of its list of revoked certificates; None: it wants none."""
        answer: Heartbeat = {
            "heartbeat_s": heartbeat_s(self._config),
            "silence_s": silence_s(self._config),
        }
        if node is not None:
            now = asyncio.get_running_loop().time()
            answer["lease_s"] = self._leases.grant(node, now, self._lead_confirmed_at())
        if crl_number is not None and (revoked := self.listeners.revoked).number > crl_number:
            answer["crl"] = revoked.pem
        return answer

    def check_machine(self, node: NodeId, machine: str) -> None:
        """Raises `UnavailableError` if another machine still has the node's lease."""
        wait_s = self._leases.wait_s(node, machine, asyncio.get_running_loop().time())
        if wait_s > 0.0:
            raise UnavailableError(
                f"node {node!r} has a lease on another machine for {wait_s:.0f} s more: wait, or "
                "give each machine a node name of its own",
                retry_after_s=wait_s,
            )

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background, no longer than the service lives."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def node_connected(self, node: NodeId) -> None:
        """A node's agent has connected: end its grace period."""
        grace = self._graces.pop(node, None)
        if grace is not None:
            grace.cancel()

    def node_disconnected(self, node: NodeId) -> None:
        """A node's agent has disconnected: the node is lost unless it reconnects in time, and not
        before its lease has run out."""
        self.node_connected(node)
        self._graces[node] = self.keep(self._lose_after_grace(node))

    def router_disconnected(self, router: RouterId) -> None:
        """The last connection of a router has ended."""
        self.keep(self.shell.report(ev.RouterLost(router=router)))

    async def _lose_after_grace(self, node: NodeId) -> None:
        left_s = self._leases.left_s(node, asyncio.get_running_loop().time())
        await asyncio.sleep(max(self._config.node_grace_s, left_s))
        if self.shell.agents.is_connected(node):
            # It connected while `_expect_nodes` ran.
            return
        await self.shell.report(ev.NodeLost(node=node))


def heartbeat_s(config: SchedulerConfig) -> float:
    """Interval between two heartbeats of another machine's process: several within a lease."""
    return config.node_lease_s / 6


def silence_s(config: SchedulerConfig) -> float:
    """Silence after which a connection is ended; half of the lease is left to connect again."""
    return config.node_lease_s / 2


def excuse(heard_at: float, late_s: float, now: float) -> float:
    """When a connection counts as heard last, although this process was suspended for `late_s`. No
    later than `now`: else one that falls silent would be noticed so much later."""
    return min(now, heard_at + late_s)
