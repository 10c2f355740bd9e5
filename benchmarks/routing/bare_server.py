"""A bare uvicorn endpoint: takes a body in, answers with a quarter of its bytes.

python -m benchmarks.routing.bare_server [FOLDER]

With a folder, body and answer are written to it and flushed before the answer, each as a file of
its own: what any service has to do that promises not to lose them.
"""

import asyncio
import functools
import itertools
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvicorn

Plain = dict[str, Any]
FLUSHES_MAX = 16
_NUMBERS = itertools.count()
_THREADS = ThreadPoolExecutor(FLUSHES_MAX)


@functools.lru_cache
def _answer(size: int) -> bytes:
    return bytes(size)


async def app(
    scope: Plain, receive: Callable[[], Awaitable[Plain]], send: Callable[[Plain], Awaitable[None]]
) -> None:
    """The whole application; a body is kept whole, as one that is used for something must be."""
    assert scope["type"] == "http"
    chunks: list[bytes] = []
    while True:
        message = await receive()
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            break
    body = b"".join(chunks)
    answer = _answer(len(body) // 4)
    if len(sys.argv) > 1:
        loop = asyncio.get_running_loop()
        for each in (body, answer):
            await loop.run_in_executor(_THREADS, _keep, Path(sys.argv[1]), each)
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


def _keep(folder: Path, body: bytes) -> None:
    """Write one file, flushed with its name, and delete it as the router deletes a payload."""
    path = folder / str(next(_NUMBERS))
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    path.unlink()


def main() -> None:
    """Serve until killed; the first line of output is the port."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    sys.stdout.write(f"{sock.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(app, log_level="error", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[sock])


if __name__ == "__main__":
    main()
