"""The agent's connection to the scheduler, and its queue of reports."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from plexrl.errors import ConnectionLostError, PlexRLError, StorageError, UnavailableError
from plexrl.wire.links.credentials import Credentials
from plexrl.wire.links.standing_link import RECONNECT_S, StandingLink
from plexrl.wire.messages.reports import AgentReport, NodeJoined, WorkerReady, WorkerWanted
from plexrl.wire.rpc import Handler, Peer, read_message
from plexrl.worker.interface.config import AgentConfig
from plexrl.worker.process.node_lease import NodeLease, clock

LOG = logging.getLogger(__name__)


class SchedulerConnection:
    """Stays connected; repeats each report until the scheduler acknowledges it."""

    def __init__(
        self,
        config: AgentConfig,
        handlers: Mapping[str, Handler],
        *,
        describe_node: Callable[[], Awaitable[NodeJoined]],
        session: Callable[[], Awaitable[None]],
        unwanted: Callable[[str, int], None],
        lease: NodeLease,
    ) -> None:
        """`describe_node` makes the first message. `session` is called when it is answered;
        what it returns runs until the connection ends. `unwanted` is called for a worker
        (deployment, rank) that became ready and that nobody needs."""
        credentials = None if config.tls is None else Credentials(config.tls)
        self._link = StandingLink(
            config.scheduler,
            credentials,
            handlers,
            hello=describe_node,
            session=self._begin,
            on_heartbeat=lambda sent_at, answer: lease.extend(sent_at, answer.get("lease_s")),
            clock=clock,
        )
        self._session = session
        self._unwanted = unwanted
        self._reports: deque[AgentReport] = deque()
        self._has_reports = asyncio.Event()

    async def run(self) -> None:
        """Stay connected until cancelled. Raises as `StandingLink.run`."""
        await self._link.run()

    def report(self, report: AgentReport) -> None:
        """Queue a report."""
        self._reports.append(report)
        self._has_reports.set()

    def _begin(self, peer: Peer) -> Awaitable[None]:
        return self._serve(peer, self._session())

    async def _serve(self, peer: Peer, session: Awaitable[None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send_reports(peer))
            tasks.create_task(_run(session))

    async def _send_reports(self, peer: Peer) -> None:
        while True:
            await self._has_reports.wait()
            while self._reports:
                report = self._reports[0]
                try:
                    answer = await peer.ask(report)
                except ConnectionLostError:
                    return
                except (UnavailableError, StorageError) as error:
                    # The scheduler is slow or stopping, or its journal is unavailable: retry.
                    LOG.info("the scheduler does not accept reports now (%s); retrying", error)
                    await asyncio.sleep(RECONNECT_S)
                    continue
                except PlexRLError as error:
                    LOG.error("the scheduler refused %s: %s", report, error)
                else:
                    if isinstance(report, WorkerReady) and not _is_wanted(answer):
                        self._unwanted(report.deployment, report.rank)
                self._reports.popleft()
            self._has_reports.clear()


def _is_wanted(answer: Mapping[str, Any]) -> bool:
    return read_message(answer, WorkerWanted)["wanted"]


async def _run(work: Awaitable[None]) -> None:
    await work
