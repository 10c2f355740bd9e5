"""Concurrent clients in a process of their own: raw HTTP on sockets, the same for both servers.

    python -m benchmarks.routing.clients < one JSON object

They work in a closed loop: each sends its next request when the last one is answered. When the time
is up nobody begins another one, and those under way are finished and counted.
Bodies are sent from one buffer and answers read into one, so that clients cost as little as can be.
"""

import asyncio
import itertools
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

READ_BYTES = 1 << 20
RETRY_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The parameters of the clients."""

    port: int
    clients: int
    at_once: int
    """Of the clients, those that have a request under way: what bounds the memory of large ones."""
    seconds: float
    body_file: str
    key: str = ""
    deployments: tuple[str, ...] = ()
    """`<job>/<name>`, shared out among the clients; none: one POST to a bare server."""
    kind: str = ""


@dataclass(slots=True)
class Outcome:
    """The result of a load."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    refused: int = 0
    """429s, each sent again."""


class Client:
    """One connection that stays open."""

    def __init__(self, port: int, key: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._port = port
        self._key = key
        self._socket: socket.socket | None = None
        self._buffer = bytearray(READ_BYTES)

    async def request(self, method: str, path: str, body: bytes | memoryview = b"") -> int:
        """The status of the answer, which is read whole."""
        if self._socket is None:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(self._socket, ("127.0.0.1", self._port))
        head = (
            f"{method} {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {self._key}\r\n"
            "content-type: application/vnd.plexrl.safetensors\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode()
        try:
            await self._loop.sock_sendall(self._socket, head)
            if body:
                await self._loop.sock_sendall(self._socket, body)
        except (BrokenPipeError, ConnectionResetError):
            # An early refusal; the answer is there, and the connection is not used further.
            pass
        return await self._answer()

    async def _answer(self) -> int:
        assert self._socket is not None
        got = bytearray()
        while b"\r\n\r\n" not in got:
            part = await self._loop.sock_recv(self._socket, 65536)
            if not part:
                raise ConnectionError("the server hung up")
            got += part
        head, _, rest = bytes(got).partition(b"\r\n\r\n")
        lines = head.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        left = int(headers.get("content-length", 0)) - len(rest)
        while left > 0:
            count = await self._loop.sock_recv_into(
                self._socket, memoryview(self._buffer)[: min(left, READ_BYTES)]
            )
            if not count:
                raise ConnectionError("the server hung up")
            left -= count
        if headers.get("connection") == "close":
            self.close()
        return int(lines[0].split()[1])

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


async def operate(client: Client, load: Load, deployment: str, body: bytes, out: Outcome) -> None:
    """One operation from its submission to its result."""
    job, _, name = deployment.partition("/")
    number = next(_NUMBERS)
    operation = f"{job}:{id(client)}.{number}.{time.time_ns()}"
    path = f"/v1/jobs/{job}/deployments/{name}/operations/{load.kind}?operation={operation}"
    while (status := await client.request("POST", path, body)) != 202:
        assert status == 429, f"the router answered {status}"
        client.close()
        out.refused += 1
        await asyncio.sleep(RETRY_S)
    path = f"/v1/operations/{operation}?wait_s=25"
    while (status := await client.request("GET", path)) != 200:
        assert status == 202, f"the router answered {status}"


_NUMBERS = itertools.count()


async def work(load: Load) -> Outcome:
    """Run the load."""
    body = await asyncio.to_thread(Path(load.body_file).read_bytes)
    out = Outcome()
    turns = asyncio.Semaphore(load.at_once)
    started_at = time.perf_counter()

    async def one(index: int) -> None:
        client = Client(load.port, load.key)
        while True:
            async with turns:
                began_at = time.perf_counter()
                if began_at > started_at + load.seconds:
                    break
                if load.deployments:
                    deployment = load.deployments[index % len(load.deployments)]
                    await operate(client, load, deployment, body, out)
                else:
                    status = await client.request("POST", "/", body)
                    assert status == 200, f"the bare server answered {status}"
                out.latencies_s.append(time.perf_counter() - began_at)
        client.close()

    async with asyncio.TaskGroup() as clients:
        for index in range(load.clients):
            clients.create_task(one(index))
    out.seconds = time.perf_counter() - started_at
    return out


def main() -> None:
    """Run the load that standard input describes."""
    load = msgspec.json.decode(sys.stdin.read(), type=Load)
    found: dict[str, Any] = asdict(asyncio.run(work(load)))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
