"""The scheduler's life: from the journal's replay to the end of its last connection."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from plexrl.cluster.process import remove_socket
from plexrl.errors import PlexRLError
from plexrl.ids import NodeId, RouterId, TenantId
from plexrl.scheduler import events as ev
from plexrl.scheduler.config import SchedulerConfig
from plexrl.scheduler.connection import Connection
from plexrl.scheduler.core import SchedulerCore
from plexrl.scheduler.journal import SqliteJournal
from plexrl.scheduler.shell import Clock, Shell
from plexrl.wire.rpc import Peer

LOG = logging.getLogger(__name__)

OPERATOR = TenantId("operator")


def restore(config: SchedulerConfig) -> tuple[SchedulerCore, SqliteJournal, Clock]:
    """A core with everything the journal holds.

    Raises:
        StorageError: the journal cannot be read.
    """
    journal = SqliteJournal(Path(config.journal), config.journal_bytes_max)
    core = SchedulerCore(config)
    last_at = 0.0
    refused = 0
    for event, at in journal.read():
        last_at = at
        try:
            core.handle(event, at)
        except PlexRLError:
            refused += 1
    LOG.info("journal replayed up to %.3f, %d events refused as before", last_at, refused)
    return core, journal, Clock(last_at)


class Service:
    """Serves routers and agents over one Unix socket."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        core, self._journal, clock = restore(config)
        self.shell = Shell(core, self._journal, clock)
        self._core = core
        self._background: set[asyncio.Task[None]] = set()
        self._graces: dict[NodeId, asyncio.Task[None]] = {}

    async def run(self, ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Serve until `stop`; `ready` is called once the socket listens."""
        runner = asyncio.create_task(self.shell.run())
        try:
            await self._begin()
            remove_socket(self._config.listen)
            server = await asyncio.start_unix_server(
                self._connected, self._config.listen, backlog=1024
            )
            self._expect_nodes()
            ready()
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait({runner, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            server.close()
            for task in list(self._background):
                task.cancel()
            await asyncio.gather(*self._background, return_exceptions=True)
            remove_socket(self._config.listen)
            if runner.done():
                # The shell ends by itself only through a bug of ours: let it be seen.
                runner.result()
        finally:
            runner.cancel()
            await asyncio.gather(runner, return_exceptions=True)
            self._journal.close()

    async def _begin(self) -> None:
        await self.shell.report(ev.SchedulerStarted())
        known = set(self._core.tenants())
        created = [(OPERATOR, self._config.operator_key_digest, True)] + [
            (TenantId(name), digest, False) for name, digest in self._config.tenants
        ]
        for tenant, digest, is_operator in created:
            if tenant not in known:
                await self.shell.request(
                    ev.TenantCreated(tenant=tenant, key_digest=digest, is_operator=is_operator)
                )

    def _expect_nodes(self) -> None:
        """Nodes of before the restart have the usual grace to come back."""
        for view in self._core.list_nodes():
            self.node_went(NodeId(view["node"]))

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self, self.shell)
        peer = Peer(reader, writer, connection.handlers())
        task = asyncio.current_task()
        assert task is not None
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            await peer.run()
        finally:
            connection.ended(peer)

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` in the background, no longer than the service lives."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def node_came(self, node: NodeId) -> None:
        """A node's agent said hello: its grace is over, and the next one begins anew."""
        grace = self._graces.pop(node, None)
        if grace is not None:
            grace.cancel()

    def node_went(self, node: NodeId) -> None:
        """A node's agent is not connected: the node is lost unless it is back in time."""
        self.node_came(node)
        self._graces[node] = self.keep(self._lose_after_grace(node))

    def router_went(self, router: RouterId) -> None:
        """The last connection of a router ended."""
        self.keep(self.shell.report(ev.RouterLost(router=router)))

    async def _lose_after_grace(self, node: NodeId) -> None:
        await asyncio.sleep(self._config.node_grace_s)
        if self.shell.agents.is_connected(node):
            # It came while the nodes of before a restart were being counted.
            return
        await self.shell.report(ev.NodeLost(node=node))
