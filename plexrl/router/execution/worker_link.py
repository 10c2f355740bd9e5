"""Connections to workers, with repeated requests after a lost connection.

A worker that cannot be reached may be alive: its machine may be slow, or the network may be cut.
So a request is repeated until the worker answers, or until the scheduler says that the worker is
gone.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from plexrl.errors import (
    AuthenticationError,
    ConnectionLostError,
    PermissionDeniedError,
    PlexRLError,
    WrongWorkerError,
    from_wire,
)
from plexrl.wire.framing import Buffer, Header
from plexrl.wire.links.address import Address, UnixAddress, parse_address
from plexrl.wire.links.credentials import Credentials
from plexrl.wire.links.frame_socket import FrameSocket
from plexrl.wire.messages import RunName, WorkerName

LOG = logging.getLogger(__name__)

RECONNECT_S_MIN = 0.1
RECONNECT_S_MAX = 2.0
"""Pause before the first repetition of a request, doubled with each further one, and its bound."""
RETRIED = (ConnectionLostError, AuthenticationError, PermissionDeniedError, OSError)
"""Errors after which a request is repeated. Certificates may be about to be replaced."""
Answer = tuple[Header, bytearray]


class WorkerGoneError(Exception):
    """The worker has ended and will not reply. The scheduler said so, or another worker has its
    address."""


class WorkerLink:
    """The connection to one worker, shared by many runs."""

    def __init__(
        self, worker: WorkerName, address: str, credentials: Credentials | None = None
    ) -> None:
        self.worker = worker
        self._address = _parse(address)
        self._credentials = credentials
        self._socket: FrameSocket | None = None
        self._staged = ""
        """Name of the payload that this connection has sent ahead of its run; empty: none."""
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[RunName, asyncio.Future[Answer]] = {}
        # Held for a whole frame, so that frames do not mix and keep the order of the calls.
        self._sending = asyncio.Lock()
        self._gone = asyncio.Event()
        self.unreachable_since: float | None = None
        """Since when requests wait for a connection, in seconds since the epoch; None: none do."""

    async def run(
        self, name: RunName, header: Header, payload: Sequence[Buffer], payload_name: str = ""
    ) -> Answer:
        """Request a run until the worker replies; return its final reply. The payload is not sent
        again if it was staged under `payload_name`.

        Raises:
            WorkerGoneError: the worker has ended and will not reply.
        """
        pause_s = RECONNECT_S_MIN
        while not self._gone.is_set():
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._waiting[name] = future
            try:
                await self.send(header, payload, payload_name)
                return await future
            except WrongWorkerError as error:
                raise WorkerGoneError(error.message) from error
            except RETRIED as error:
                LOG.info("%s: %s; repeating the request", self._address, error)
                if self._socket is None:
                    self.unreachable_since = self.unreachable_since or time.time()
                    await self._pause(pause_s)
                    pause_s = min(2 * pause_s, RECONNECT_S_MAX)
            finally:
                # A repeated request for the same run may have replaced the future.
                if self._waiting.get(name) is future:
                    del self._waiting[name]
        raise WorkerGoneError(f"{self.worker} has ended")

    async def stage(self, payload_name: str, payload: Sequence[Buffer]) -> None:
        """Send a payload ahead of its run, if the worker is connected. Raises as `send`."""
        async with self._sending:
            if self._socket is not None:
                self._staged = ""
                await self._send({"request": "stage", "payload": payload_name}, payload)
                self._staged = payload_name

    async def discard_staged(self, payload_name: str) -> None:
        """Let the worker forget a staged payload, if it still has it. Raises as `send`."""
        async with self._sending:
            if self._socket is not None and self._staged == payload_name:
                self._staged = ""
                await self._send({"request": "stage", "payload": ""}, ())

    async def send(
        self, header: Header, payload: Sequence[Buffer] = (), payload_name: str = ""
    ) -> None:
        """Send one frame; a payload that was staged under `payload_name` is only named.

        Raises:
            PlexRLError, OSError: it was not sent, or not as a whole.
        """
        async with self._sending:
            if self._gone.is_set():
                raise ConnectionLostError(f"{self.worker} has ended")
            if self._socket is None:
                connecting = FrameSocket.connect(self._address, self._credentials)
                self._socket = connection = await connecting
                self.unreachable_since = None
                self._staged = ""
                self._reading = asyncio.create_task(self._read(connection))
                # A done callback also runs if the task is cancelled before its first step.
                self._reading.add_done_callback(lambda _: connection.close())
            if payload:
                if self._staged and self._staged == payload_name:
                    header, payload = {**header, "staged": payload_name}, ()
                # The worker forgets a staged payload when another comes.
                self._staged = ""
            await self._send(header, payload)

    async def _send(self, header: Header, payload: Sequence[Buffer]) -> None:
        assert self._socket is not None, "the caller has checked it"
        try:
            await self._socket.send({**header, "worker": self.worker}, payload)
        except BaseException:
            # Part of a frame may have been sent, also if the run was cancelled.
            self._disconnect()
            raise

    def worker_gone(self) -> None:
        """The scheduler says that the worker has ended: its runs raise `WorkerGoneError`."""
        self._gone.set()
        self.unreachable_since = None
        self._disconnect()
        self._wake(ConnectionLostError(f"{self.worker} has ended"))

    async def close(self) -> None:
        """End the connection."""
        reading = self._reading
        self._disconnect()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the worker is known to be gone."""
        try:
            async with asyncio.timeout(seconds):
                await self._gone.wait()
        except TimeoutError:
            return

    def _disconnect(self) -> None:
        """End the connection; the reading task wakes all waiting runs and closes the socket."""
        self._socket = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self, connection: FrameSocket) -> None:
        lost: PlexRLError = ConnectionLostError("the connection was closed")
        try:
            while True:
                header, payload = await connection.receive()
                if header.get("reply") == "refused":
                    # The worker refuses all requests of a link for another worker.
                    raise from_wire(header["error"])
                future = self._waiting.get((header.get("operation", ""), header.get("token", -1)))
                if future is not None and not future.done():
                    future.set_result((header, payload))
        except PlexRLError as error:
            lost = error
        finally:
            if self._socket is connection:
                self._socket = self._reading = None
            self._wake(lost)

    def _wake(self, error: PlexRLError) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
                # Marks the error as retrieved: a cancelled run does not read it.
                future.exception()


def _parse(address: str) -> Address:
    # A journal of an earlier version has paths. Their workers have ended, as the scheduler will
    # say.
    return UnixAddress(address) if address.startswith("/") else parse_address(address)
