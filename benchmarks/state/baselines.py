"""What the machine can do: plain memory copies, `fio` and `iperf3`, measured in the same run."""

import ctypes
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

MIB = 1 << 20
GB = 1e9
BLOCK_BYTES = 4 * MIB
REPEATS = 7


def best_rate(nbytes: int, work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Bytes per second of the quickest of some repetitions: what is possible, not what is usual on
    a machine that others use too."""
    best_s = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - start)
    return nbytes / best_s


def memcpy_rate(target: int, source: int, nbytes: int, threads: int) -> float:
    """Bytes per second of plain `memmove` between two mapped, resident places, in blocks."""
    move = ctypes.CDLL(None).memmove
    move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    move.restype = ctypes.c_void_p

    def run(first: int) -> None:
        for start in range(first * BLOCK_BYTES, nbytes, threads * BLOCK_BYTES):
            move(target + start, source + start, min(BLOCK_BYTES, nbytes - start))

    def copy() -> None:
        if threads == 1:
            run(0)
            return
        workers = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    return best_rate(nbytes, copy)


def fio_rate(directory: Path, kind: str, nbytes: int, depth: int) -> float | None:
    """Bytes per second of `fio` with direct I/O in blocks of 4 MiB; None where it is not installed.

    `kind` is `read` or `write`; a write is synced at its end, as the tier's are.
    """
    if shutil.which("fio") is None:
        return None
    found = subprocess.run(
        [
            *("fio", "--name=plexrl", "--output-format=json", f"--rw={kind}", "--direct=1"),
            *(f"--bs={BLOCK_BYTES}", f"--size={nbytes}", f"--iodepth={depth}"),
            *("--ioengine=libaio", "--fallocate=posix", "--end_fsync=1"),
            f"--filename={directory / 'fio.data'}",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    job = json.loads(found.stdout)["jobs"][0]
    return float(job[kind]["bw_bytes"])


def iperf_rate(seconds: int = 3) -> float | None:
    """Bytes per second of `iperf3` over loopback, one stream; None where it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        ["iperf3", "--server", "--one-off", "--port", port],
        stdout=subprocess.DEVNULL,
        stderr=sys.stderr,
    )
    try:
        return _iperf_client(port, seconds)
    finally:
        server.kill()
        server.wait()


def _iperf_client(port: str, seconds: int) -> float:
    for _ in range(50):
        found = subprocess.run(
            ["iperf3", "--client", "127.0.0.1", "--port", port, "--time", str(seconds), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode == 0:
            return float(json.loads(found.stdout)["end"]["sum_received"]["bits_per_second"]) / 8
        time.sleep(0.1)
    raise RuntimeError(f"iperf3 failed: {found.stdout}{found.stderr}")
