"""Links over Unix sockets beside links over mutual TLS, in one run.

    python -m benchmarks.links [--quick] [--json]

Client and server are two processes of this machine. `calls` are those of the scheduler's links (one
event loop at each end); `frames` those of workers and StateManagers (blocking sockets, one thread
for each connection). TLS goes over the loopback interface, so that its cost is not hidden by a
network.
"""

import asyncio
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.report import percentile, report
from benchmarks.sizes import sized
from plexrl.cluster.join.authority import Authority
from plexrl.errors import ConnectionLostError
from plexrl.wire.framing import recv_frame, send_frame
from plexrl.wire.links.address import Address, TlsAddress, UnixAddress, parse_address
from plexrl.wire.links.credentials import Credentials, Identity, Role, TlsFiles
from plexrl.wire.links.dial import (
    Link,
    Listener,
    connect,
    connect_blocking,
    listen_blocking,
    serve,
)
from plexrl.wire.rpc import Peer

CALLS = sized(3000, quick=10)
AT_ONCE = 64
CONNECTIONS = sized(100, quick=2)
FRAME_BYTES = 8 << 20
FRAMES = sized(64, quick=1)
ROUNDS = sized(3, quick=1)


def serve_calls(listen: str, files: TlsFiles, started: Connection) -> None:
    """A process that answers empty calls."""

    async def answer(_: Peer, __: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def on_link(link: Link) -> None:
        await Peer(link.reader, link.writer, {"call": answer}).run()

    async def run() -> None:
        server = await serve(
            parse_address(listen), Credentials(files), on_link, roles=(Role.ROUTER,)
        )
        started.send(str(server.address))
        await asyncio.Event().wait()

    asyncio.run(run())


def serve_frames(listen: str, files: TlsFiles, started: Connection) -> None:
    """A process that answers each frame with an empty one."""
    listener = listen_blocking(parse_address(listen), Credentials(files), roles=(Role.ROUTER,))
    started.send(str(listener.address))
    while True:
        accepted = listener.accept()
        threading.Thread(target=_answer_frames, args=(listener, accepted), daemon=True).start()


def _answer_frames(listener: Listener, accepted: Any) -> None:
    connected, _ = listener.greet(accepted)
    try:
        while True:
            recv_frame(connected)
            send_frame(connected, {})
    except (ConnectionLostError, OSError):
        connected.close()


async def calls(address: Address, credentials: Credentials) -> dict[str, float]:
    """Microseconds of a connection and of a call; calls per second with `AT_ONCE` at a time."""
    link = await connect(address, credentials, role=Role.SCHEDULER)
    peer = Peer(link.reader, link.writer, {})
    running = asyncio.create_task(peer.run())
    one = [await _timed(lambda: peer.call("call")) for _ in range(CALLS)]
    begun = time.perf_counter()
    await asyncio.gather(*(_repeat(peer, CALLS // AT_ONCE + 1) for _ in range(AT_ONCE)))
    rate = AT_ONCE * (CALLS // AT_ONCE + 1) / (time.perf_counter() - begun)
    peer.close()
    await running
    connecting = [await _timed(lambda: _connect(address, credentials)) for _ in range(CONNECTIONS)]
    return {
        "call_us": percentile(one, 50),
        "call_p99_us": percentile(one, 99),
        "calls_per_s": rate,
        "connect_us": percentile(connecting, 50),
    }


async def _repeat(peer: Peer, count: int) -> None:
    for _ in range(count):
        await peer.call("call")


async def _connect(address: Address, credentials: Credentials) -> None:
    link = await connect(address, credentials, role=Role.SCHEDULER)
    link.writer.transport.abort()


async def _timed(work: Callable[[], Awaitable[object]]) -> float:
    begun = time.perf_counter()
    await work()
    return 1e6 * (time.perf_counter() - begun)


def frames(address: Address, credentials: Credentials) -> dict[str, float]:
    """Microseconds of an empty frame and its answer; bytes per second of large frames."""
    connected, _ = connect_blocking(address, credentials, role=Role.SCHEDULER)
    one = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        send_frame(connected, {})
        recv_frame(connected)
        one.append(1e6 * (time.perf_counter() - begun))
    payload = bytes(FRAME_BYTES)
    begun = time.perf_counter()
    for _ in range(FRAMES):
        send_frame(connected, {}, payload)
        recv_frame(connected)
    rate = FRAMES * FRAME_BYTES / (time.perf_counter() - begun)
    connected.close()
    return {"frame_us": percentile(one, 50), "frame_p99_us": percentile(one, 99), "bytes_s": rate}


def measure(listen: str, server: TlsFiles, client: TlsFiles) -> dict[str, float]:
    """All figures of one kind of address."""
    found: dict[str, float] = {}
    context = multiprocessing.get_context("spawn")
    for target in (serve_calls, serve_frames):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(listen, server, sender), daemon=True)
        process.start()
        try:
            address, credentials = parse_address(receiver.recv()), Credentials(client)
            if target is serve_calls:
                found |= asyncio.run(calls(address, credentials))
            else:
                found |= frames(address, credentials)
        finally:
            process.kill()
            process.join()
    return found


ROWS = (
    ("round trip of a call, median (µs)", "call_us", 1.0),
    ("round trip of a call, p99 (µs)", "call_p99_us", 1.0),
    (f"calls a second, {AT_ONCE} at a time", "calls_per_s", 1.0),
    ("connect, with handshake (µs)", "connect_us", 1.0),
    ("round trip of a frame, median (µs)", "frame_us", 1.0),
    ("round trip of a frame, p99 (µs)", "frame_p99_us", 1.0),
    ("payload of 8 MiB frames (GB/s)", "bytes_s", 1e9),
)


def main() -> None:
    """Measure both kinds in turn, `ROUNDS` times; print the medians."""
    found: dict[str, list[dict[str, float]]] = {"unix": [], "tls": []}
    with tempfile.TemporaryDirectory(prefix="plexrl-bench-") as name:
        folder = Path(name)
        authority = Authority.open(folder / "authority")
        server = authority.issue(folder, Identity(Role.SCHEDULER))
        client = authority.issue(folder, Identity(Role.ROUTER, "bench"))
        for _ in range(ROUNDS):
            near, far = UnixAddress(str(folder / "s.sock")), TlsAddress("127.0.0.1", 0)
            found["unix"].append(measure(str(near), server, client))
            found["tls"].append(measure(str(far), server, client))
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for title, key, unit in ROWS:
        near_value, far_value = (
            percentile([each[key] for each in found[kind]], 50) / unit for kind in ("unix", "tls")
        )
        digits = 2 if unit > 1.0 else 0
        rows.append(
            (
                title,
                f"{near_value:,.{digits}f}",
                f"{far_value:,.{digits}f}",
                f"{far_value / near_value:.2f}",
            )
        )
        figures |= {f"unix_{key}": near_value, f"tls_{key}": far_value}
    report("Links", ("", "Unix socket", "TLS 1.3", "TLS / Unix"), rows, figures)


if __name__ == "__main__":
    main()
