"""Bodies of requests arrive whole, whatever the pieces in which a client sends them."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import uvicorn
import xxhash
from uvicorn.server import ServerState

from plexrl.router.server.connections import Connections
from plexrl.router.server.guarded_protocol import LARGE_PART_BYTES, GuardedProtocol

Plain = dict[str, Any]
DEADLINE_S = 60.0


async def digest(
    scope: Plain, receive: Callable[[], Awaitable[Plain]], send: Callable[[Plain], Awaitable[None]]
) -> None:
    """An application that answers with the digest of each body."""
    assert scope["type"] == "http"
    found = xxhash.xxh3_128()
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        found.update(message["body"])
        if not message["more_body"]:
            break
    body = found.hexdigest().encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answers(pieces: Sequence[bytes], count: int) -> list[bytes]:
    """The bodies of the answers to `count` requests on one connection."""
    config = uvicorn.Config(digest, access_log=False, lifespan="off")
    config.load()
    state, held = ServerState(), Connections(10, 10)
    server = await asyncio.get_running_loop().create_server(
        lambda: GuardedProtocol(held, DEADLINE_S, config, state, {}), "127.0.0.1", 0
    )
    async with server, asyncio.timeout(DEADLINE_S):
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()

        sending = asyncio.create_task(send())
        found = []
        for _ in range(count):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            found.append(await reader.readexactly(32))
        await sending
        writer.close()
        await writer.wait_closed()
    return found


def plain(body: bytes) -> bytes:
    return b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunked(body: bytes) -> bytes:
    head = b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
    return b"%b%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)


@pytest.mark.parametrize("piece", [LARGE_PART_BYTES - 1, LARGE_PART_BYTES, 100_003, 8 << 20])
def test_requests_one_after_another_have_their_own_bodies(piece: int) -> None:
    sizes = (0, 3 << 20, 1, LARGE_PART_BYTES, 2 * LARGE_PART_BYTES + 1, 1 << 20)
    bodies = [os.urandom(size) for size in sizes]
    stream = b"".join((chunked if index == 3 else plain)(body) for index, body in enumerate(bodies))
    pieces = [stream[start : start + piece] for start in range(0, len(stream), piece)]
    wanted = [xxhash.xxh3_128(body).hexdigest().encode() for body in bodies]
    assert asyncio.run(answers(pieces, len(bodies))) == wanted
