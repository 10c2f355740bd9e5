"""Compares the link between a router and a worker over TLS with the one over a Unix socket.

    python -m benchmarks.routing.worker_links [--quick] [--json]

The worker is a process with the sockets of a real worker, which sends each payload back. The router
is this process, with the router's own connection. Both links are measured in the same run, by
turns, because the machine may be busy.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.cluster.join.authority import LIFE, Authority
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from plexrl.wire.links.frame_socket import FrameSocket
from plexrl.wire.messages import WorkerName
from plexrl.worker.process.server.server import WorkerServer

PAYLOAD_BYTES = sized(256 << 20, quick=8 << 20)
PAYLOADS = sized(9, quick=1)
ROUNDS = sized(1000, quick=20)
WORKER = WorkerName("job/actor", 0, 1)
RUN = {"request": "run", "worker": WORKER}


def serve(address: Address, files: TlsFiles | None, ready: Connection) -> None:
    """A worker that sends every payload back."""
    server = WorkerServer(address, WORKER, None if files is None else Credentials(files))
    ready.send(server.address)
    while True:
        request = server.requests.get()
        request.connection.send({"reply": "finished"}, request.payload)


@contextmanager
def worker(address: Address, files: TlsFiles | None) -> Iterator[Address]:
    """A running worker; gives its address."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(address, files, sender), daemon=True)
    process.start()
    try:
        yield receiver.recv()
    finally:
        process.kill()
        process.join()


async def there_and_back_s(link: FrameSocket, payload: bytearray) -> float:
    """Seconds in which a payload is sent and comes back."""
    start = time.perf_counter()
    await link.send(RUN, (payload,) if payload else ())
    _, body = await link.receive()
    assert len(body) == len(payload)
    return time.perf_counter() - start


async def measure(links: dict[str, FrameSocket]) -> dict[str, tuple[float, float]]:
    """(GB/s in both directions, round trip of an empty frame in µs) of each link, as medians."""
    payload = bytearray(PAYLOAD_BYTES)
    bulk: dict[str, list[float]] = {name: [] for name in links}
    empty: dict[str, list[float]] = {name: [] for name in links}
    for _ in range(PAYLOADS):
        for name, link in links.items():
            bulk[name].append(await there_and_back_s(link, payload))
    for _ in range(ROUNDS):
        for name, link in links.items():
            empty[name].append(await there_and_back_s(link, bytearray()))
    return {
        name: (
            2 * PAYLOAD_BYTES / statistics.median(bulk[name]) / 1e9,
            1e6 * statistics.median(empty[name]),
        )
        for name in links
    }


def main() -> None:
    """Measure both links."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        authority = Authority.open(Path(folder) / "authority")
        node, router = (
            authority.issue(Path(folder) / role, Identity(role, "x"), (), LIFE)
            for role in (Role.NODE, Role.ROUTER)
        )

        async def run(near: Address, far: Address) -> dict[str, tuple[float, float]]:
            links = {
                "Unix": await FrameSocket.connect(near),
                "TLS": await FrameSocket.connect(far, Credentials(router)),
            }
            return await measure(links)

        with (
            worker(UnixAddress(f"{folder}/w"), None) as near,
            worker(TlsAddress("127.0.0.1", 0, "x"), node) as far,
        ):
            found = asyncio.run(run(near, far))
    rows = [(name, f"{rate:.2f}", f"{trip:.0f}") for name, (rate, trip) in found.items()]
    report(
        "Router to worker and back",
        ("link", "GB/s", "round trip, µs"),
        rows,
        {
            "unix_gb_per_s": found["Unix"][0],
            "tls_gb_per_s": found["TLS"][0],
            "tls_to_unix": found["TLS"][0] / found["Unix"][0],
            "unix_round_trip_us": found["Unix"][1],
            "tls_round_trip_us": found["TLS"][1],
        },
    )


if __name__ == "__main__":
    main()
