"""Connections to workers, and the execution of admitted operations on all ranks of a WPG."""

import asyncio
import logging
from collections.abc import Sequence

from plexrl.errors import ConnectionLostError, PlexRLError
from plexrl.wire.frame_socket import FrameSocket
from plexrl.wire.framing import Buffer, Header

LOG = logging.getLogger(__name__)

RECONNECT_S = 0.1
RunName = tuple[str, int]
"""Operation and token."""
Answer = tuple[Header, bytearray]


class WorkerGoneError(Exception):
    """The worker's socket is no more: it is dead, and its node's agent says so to the scheduler."""


class WorkerLink:
    """One worker: many runs in flight over one connection.

    A broken connection does not end a run: the worker may live, and the run is asked for again on
    the next connection, as long as the worker's socket is there.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._socket: FrameSocket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[RunName, asyncio.Future[Answer]] = {}
        # Held over a whole frame: frames do not mix, and leave in the order of the calls.
        self._sending = asyncio.Lock()

    async def run(self, name: RunName, header: Header, payload: Sequence[Buffer]) -> Answer:
        """The worker's final answer to a run; asks until there is one.

        Raises:
            WorkerGoneError: there will be none.
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
                LOG.info("%s: %s; asking again", self._address, error)
                await asyncio.sleep(RECONNECT_S)
            finally:
                # The same run may have been asked for anew meanwhile.
                if self._waiting.get(name) is future:
                    del self._waiting[name]

    async def send(self, header: Header, payload: Sequence[Buffer] = ()) -> None:
        """Send one frame. Raises `ConnectionLostError` or `OSError`."""
        async with self._sending:
            if self._socket is None:
                self._socket = connection = await FrameSocket.connect(self._address)
                self._reading = asyncio.create_task(self._read(connection))
                # Also where the task is cancelled before its first step.
                self._reading.add_done_callback(lambda _: connection.close())
            try:
                await self._socket.send(header, payload)
            except BaseException:
                # Half a frame may have left, also where the run was cancelled.
                self._hang_up()
                raise

    async def close(self) -> None:
        """End the connection."""
        reading = self._reading
        self._hang_up()
        if reading is not None:
            await asyncio.gather(reading, return_exceptions=True)

    def _hang_up(self) -> None:
        """End the connection; the reading task wakes all who wait, and closes the socket."""
        self._socket = None
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read(self, connection: FrameSocket) -> None:
        lost: PlexRLError = ConnectionLostError("the connection was given up")
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
                    # Whoever was cancelled does not ask.
                    future.exception()
