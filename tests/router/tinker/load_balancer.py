"""A load balancer without stickiness: each request goes to the next router."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import cycle
from urllib.parse import urlsplit

CHUNK_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 16


class LoadBalancer:
    """Takes HTTP requests, one for each connection, and gives them to `urls` in turns. A router
    that does not listen is passed over; one that dies in a request ends its connection."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._routers = cycle([urlsplit(url) for url in urls])
        self._count = len(urls)
        self.served: dict[int, int] = {}
        """Requests by the router's port."""

    async def start(self) -> asyncio.Server:
        return await asyncio.start_server(
            self._carry, "127.0.0.1", 0, limit=HEAD_BYTES_MAX, backlog=4096
        )

    async def _carry(self, asked: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._carry_request(asked, answer)
        finally:
            answer.close()

    async def _carry_request(
        self, asked: asyncio.StreamReader, answer: asyncio.StreamWriter
    ) -> None:
        head = await asked.readuntil(b"\r\n\r\n")
        reader, writer = await self._connect()
        writer.write(_for_one_request(head))
        sending = asyncio.create_task(_forward(asked, writer))
        try:
            await _forward(reader, answer)
        finally:
            sending.cancel()
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        for _ in range(self._count):
            router = next(self._routers)
            assert router.port is not None
            with suppress(ConnectionRefusedError):
                found = await asyncio.open_connection(router.hostname, router.port)
                self.served[router.port] = self.served.get(router.port, 0) + 1
                return found
        raise ConnectionRefusedError


def _for_one_request(head: bytes) -> bytes:
    lines = [each for each in head.split(b"\r\n") if not each.lower().startswith(b"connection:")]
    return b"\r\n".join([lines[0], b"Connection: close", *lines[1:]])


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


@contextmanager
def balanced(urls: Sequence[str]) -> Iterator[tuple[str, LoadBalancer]]:
    """The URL of a load balancer that runs in a thread."""
    made, loop = LoadBalancer(urls), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(made.start(), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", made
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    # Those that have just been accepted begin, so that they close what they have.
    await asyncio.sleep(0)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
