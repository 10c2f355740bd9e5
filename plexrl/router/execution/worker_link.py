"""Connections to workers, with repeated requests after a lost connection."""

import asyncio
import logging
from collections.abc import Sequence

from plexrl.errors import ConnectionLostError, PlexRLError
from plexrl.wire.framing import Buffer, Header
from plexrl.wire.links.frame_socket import FrameSocket

LOG = logging.getLogger(__name__)

RECONNECT_S = 0.1
RunName = tuple[str, int]
"""Operation and fencing token."""
Answer = tuple[Header, bytearray]


class WorkerGoneError(Exception):
    """The worker's socket file is gone: the worker is dead, and its node's agent reports that."""


class WorkerLink:
    """The connection to one worker, shared by many runs.

    A broken connection does not end a run, because the worker may be alive. The request is repeated
    on the next connection, as long as the worker's socket file exists.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: FrameSocket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[RunName, asyncio.Future[Answer]] = {}
        # Held for a whole frame, so that frames do not mix and keep the order of the calls.
        self._sending = asyncio.Lock()

    async def run(self, name: RunName, header: Header, payload: Sequence[Buffer]) -> Answer:
        """Request a run until the worker replies; return its final reply.

        Raises:
            WorkerGoneError: the worker has ended and will not reply.
        """
        while True:
            future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
            self._waiting[name] = future
            try:
                await self.send(header, payload)
                return await future
            except FileNotFoundError as error:
                raise WorkerGoneError(self._address) from error
            except (ConnectionLostError, OSError) as error:
                LOG.info("%s: %s; repeating the request", self._address, error)
                await asyncio.sleep(RECONNECT_S)
            finally:
                # A repeated request for the same run may have replaced the future.
                if self._waiting.get(name) is future:
                    del self._waiting[name]

    async def send(self, header: Header, payload: Sequence[Buffer] = ()) -> None:
        """Send one frame. Raises `ConnectionLostError` or `OSError`."""
        async with self._sending:
            if self._socket is None:
                self._socket = connection = await FrameSocket.connect(self._address)
                self._reading = asyncio.create_task(self._read(connection))
                # A done callback also runs if the task is cancelled before its first step.
                self._reading.add_done_callback(lambda _: connection.close())
            try:
                await self._socket.send(header, payload)
            except BaseException:
                # Part of a frame may have been sent, also if the run was cancelled.
                self._disconnect()
                raise

    async def close(self) -> None:
        """End the connection."""
        reading = self._reading
        self._disconnect()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

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
                future = self._waiting.get((header.get("operation", ""), header.get("token", -1)))
                if future is not None and not future.done():
                    future.set_result((header, payload))
        except PlexRLError as error:
            lost = error
        finally:
            if self._socket is connection:
                self._socket = self._reading = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(lost)
                    # Marks the error as retrieved: a cancelled run does not read it.
                    future.exception()
