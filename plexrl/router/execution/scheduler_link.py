"""The router's connection to the scheduler, with automatic reconnection."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from plexrl.errors import (
    ConnectionLostError,
    PlexRLError,
    StorageError,
    UnavailableError,
)
from plexrl.ids import RouterId
from plexrl.wire.links.credentials import Credentials
from plexrl.wire.links.standing_link import RECONNECT_S, StandingLink
from plexrl.wire.messages.reports import RouterJoined, RouterReport
from plexrl.wire.rpc import Handler, Peer
from plexrl.wire.scheduler_methods import Method

ViewT = TypeVar("ViewT")

LOG = logging.getLogger(__name__)

CALL_TIMEOUT_S = 30.0
REPORTS_MAX = 256
"""Most reports that are sent without an acknowledgement."""


class SchedulerLink:
    """Calls the scheduler, and queues reports until the scheduler acknowledges them."""

    def __init__(
        self,
        addresses: Sequence[str],
        router: str,
        handlers: Mapping[str, Handler],
        on_lost: Callable[[], None] | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`on_lost` is called whenever a connection ends."""
        self._link = StandingLink(
            addresses,
            credentials,
            handlers,
            hello=self._hello,
            session=self._begin,
            on_end=self._end,
        )
        self._router = router
        self._on_lost = on_lost
        self._peer: Peer | None = None
        self._reports: deque[RouterReport] = deque()
        self._has_reports = asyncio.Event()
        self.connected = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether a scheduler is connected now; `connected` stays set after the first one."""
        return self._peer is not None

    async def call(
        self,
        method: Method[ViewT],
        params: Mapping[str, object],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> ViewT:
        """Call the scheduler and return its reply, which is not validated.

        Raises:
            UnavailableError: no scheduler is connected; the call may or may not have had an effect.
            PlexRLError: the error that the scheduler raised.
        """
        peer = self._peer
        try:
            if peer is None:
                raise ConnectionLostError("not connected")
            answer: Any = await peer.call(str(method), params, timeout_s=timeout_s)
            view: ViewT = answer
            return view
        except ConnectionLostError as error:
            raise UnavailableError(
                "the scheduler is restarting: the same request can be sent again",
                retry_after_s=0.5,
            ) from error

    def report(self, report: RouterReport) -> None:
        """Queue a report to the scheduler; it is repeated until the scheduler acknowledges it."""
        self._reports.append(report)
        self._has_reports.set()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        while True:
            try:
                await self._link.run()
            except PlexRLError as error:
                LOG.error("the scheduler refuses this router: %s", error)
            except Exception:
                # A bug in one handler must not end the connection for good.
                LOG.exception("the scheduler's connection failed; connecting again")
            await asyncio.sleep(RECONNECT_S)

    async def _hello(self) -> RouterJoined:
        return RouterJoined(router=RouterId(self._router))

    def _begin(self, peer: Peer) -> Awaitable[None]:
        self._peer = peer
        self.connected.set()
        return self._send_reports(peer)

    def _end(self) -> None:
        self._peer = None
        if self._on_lost is not None:
            self._on_lost()

    async def _send_reports(self, peer: Peer) -> None:
        count_max = REPORTS_MAX
        while True:
            await self._has_reports.wait()
            while self._reports:
                # Sent together, they share a commit of the journal.
                sent = [self._reports[at] for at in range(min(len(self._reports), count_max))]
                errors = await asyncio.gather(*(_sent(peer, report) for report in sent))
                if any(isinstance(error, ConnectionLostError) for error in errors):
                    return
                for _ in sent:
                    self._reports.popleft()
                # The scheduler stops, has lost its lease, does not reply or cannot write its
                # journal: repeat these reports to it, or to the next scheduler.
                again = [
                    (report, error)
                    for report, error in zip(sent, errors, strict=True)
                    if isinstance(error, UnavailableError | StorageError)
                ]
                # A scheduler that holds keeps reports that it did not answer; the same ones many
                # times would fill its memory.
                count_max = 1 if again else REPORTS_MAX
                if again:
                    LOG.info("the scheduler accepts no reports now (%s)", again[0][1])
                    self._reports.extendleft(report for report, _ in reversed(again))
                    await asyncio.sleep(RECONNECT_S)
            self._has_reports.clear()


async def _sent(peer: Peer, report: RouterReport) -> PlexRLError | None:
    """Send a report; return the error with which it was answered."""
    try:
        await peer.ask(report, timeout_s=CALL_TIMEOUT_S)
    except (ConnectionLostError, UnavailableError, StorageError) as error:
        return error
    except PlexRLError as error:
        LOG.error("the scheduler refused %s: %s", report, error)
        return error
    return None
