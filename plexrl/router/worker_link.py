"""Connections to workers, and the execution of admitted operations on all ranks of a WPG."""

import asyncio
import logging

from plexrl.errors import ConnectionLostError, PlexRLError
from plexrl.wire.framing import Header, read_frame, write_frame

LOG = logging.getLogger(__name__)

RECONNECT_S = 0.1
RunName = tuple[str, int]
"""Operation and token."""
Answer = tuple[Header, bytes]


class WorkerGoneError(Exception):
    """The worker's socket is no more: it is dead, and its node's agent says so to the scheduler."""


class WorkerLink:
    """One worker: many runs in flight over one connection.

    A broken connection does not end a run: the worker may live, and the run is asked for again on
    the next connection, as long as the worker's socket is there.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[RunName, asyncio.Future[Answer]] = {}
        self._connecting = asyncio.Lock()

    async def run(self, name: RunName, header: Header, payload: bytes) -> Answer:
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
                self._waiting.pop(name, None)

    async def send(self, header: Header, payload: bytes = b"") -> None:
        """Send one frame. Raises `ConnectionLostError` or `OSError`."""
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._address)
                self._reading = asyncio.create_task(self._read(reader))
            writer = self._writer
        await write_frame(writer, header, payload)

    async def close(self) -> None:
        """End the connection."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header, payload = await read_frame(reader)
                future = self._waiting.get((header.get("operation", ""), header.get("token", -1)))
                if future is not None and not future.done():
                    future.set_result((header, payload))
        except PlexRLError as error:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(error)
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None
