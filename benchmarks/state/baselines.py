"""Baselines: plain memory copies, `fio` and `iperf3`, alternating with the measured work.

Others use the machine too, so a rate by itself says little. Every work and its baseline run in
turns, and two ratios are taken of the rounds: best to best, which is what is possible, and the
median of each round's own ratio, which is what is usual.
"""

import ctypes
import json
import mmap
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.sizes import sized
from plexrl.statemanager.bytes.mapped_memory import address_of

MIB = 1 << 20
GB = 1e9
BLOCK_BYTES = 4 * MIB
ROUNDS = sized(9, quick=1)

Seconds = float
Work = Callable[[], Seconds]
"""Does it once, and says how long that took, what it had to prepare left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What works that took turns took, by name."""

    seconds: Mapping[str, list[Seconds]]

    def best_s(self, name: str) -> Seconds:
        """The quickest round."""
        return min(self.seconds[name])

    def median_s(self, name: str) -> Seconds:
        """The usual round."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> float:
        """How near a work comes to its baseline, the best of both."""
        return self.best_s(baseline) / self.best_s(name)

    def usual_ratio(self, name: str, baseline: str) -> float:
        """The same, the median of what each round says."""
        pairs = zip(self.seconds[baseline], self.seconds[name], strict=True)
        return statistics.median(plain / ours for plain, ours in pairs)


def in_turns(works: Mapping[str, Work], rounds: int = ROUNDS) -> Rounds:
    """Run every work once per round, after one warm-up round."""
    seconds: dict[str, list[Seconds]] = {name: [] for name in works}
    for index in range(rounds + 1):
        for name, work in works.items():
            took = work()
            if index:
                seconds[name].append(took)
    return Rounds(seconds=seconds)


def timed(work: Callable[[], object]) -> Seconds:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Memcpy:
    """Plain `memmove` between two mappings of memory files, all pages there, as ours lie in too."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._maps = [_memory_file(nbytes) for _ in range(2)]
        self._addresses = [address_of(mapped) for mapped in self._maps]
        self._pools = {2: ThreadPoolExecutor(2)}
        for address in self._addresses:
            ctypes.memset(address, 1, nbytes)

    def work(self, threads: int) -> Work:
        """A copy of everything in blocks, on so many threads."""
        return lambda: timed(lambda: self._copy(self._addresses[0], threads))

    def changed_work(self, threads: int) -> Work:
        """The same of memory that was just changed, part of which the CPU's caches have to write
        back yet."""
        words = np.frombuffer(self._maps[1], dtype=np.uint32)

        def copy() -> Seconds:
            np.add(words, 1, out=words)
            return timed(lambda: self._copy(self._addresses[0], threads))

        return copy

    def fresh_work(self, threads: int) -> Work:
        """The same into a new memory file, which is given back at the end."""

        def copy() -> None:
            with _memory_file(self.nbytes) as mapped:
                self._copy(address_of(mapped), threads)

        return lambda: timed(copy)

    def _copy(self, target: int, threads: int) -> None:
        source = self._addresses[1]
        block_bytes = min(BLOCK_BYTES, -(-self.nbytes // threads))

        def run(first: int) -> None:
            for start in range(first * block_bytes, self.nbytes, threads * block_bytes):
                count = min(block_bytes, self.nbytes - start)
                ctypes.memmove(target + start, source + start, count)

        if threads == 1:
            run(0)
            return
        pool = self._pools[threads]
        wait([pool.submit(run, index) for index in range(threads)])


def _memory_file(nbytes: int) -> mmap.mmap:
    fd = os.memfd_create("plexrl-baseline", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


def fio(directory: Path, kind: str, nbytes: int, depth: int) -> Work | None:
    """`fio` past the page cache in blocks of 4 MiB; None where it is not installed.

    `kind` is `read` or `write`; a write is to a new file and synced at its end, as ours are. A read
    is of what the last write in `directory` wrote.
    """
    if shutil.which("fio") is None:
        return None
    path = directory / "fio"

    def run() -> Seconds:
        if kind == "write":
            path.unlink(missing_ok=True)
        found = subprocess.run(
            [
                *("fio", "--name=plexrl", "--output-format=json", f"--rw={kind}", "--direct=1"),
                *(f"--bs={BLOCK_BYTES}", f"--size={nbytes}", f"--iodepth={depth}"),
                *("--ioengine=libaio", "--fallocate=posix", "--end_fsync=1"),
                f"--filename={path}",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        job = json.loads(found.stdout)["jobs"][0]
        return nbytes / float(job[kind]["bw_bytes"])

    return run


def iperf3(nbytes: int) -> Work | None:
    """`iperf3` over loopback, one stream of so many bytes; None where it is not installed."""
    if shutil.which("iperf3") is None:
        return None

    def run() -> Seconds:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        server = subprocess.Popen(
            ["iperf3", "--server", "--one-off", "--port", port],
            stdout=subprocess.DEVNULL,
            stderr=sys.stderr,
        )
        try:
            return nbytes / _iperf_client_rate(port, nbytes)
        finally:
            server.kill()
            server.wait()

    return run


def _iperf_client_rate(port: str, nbytes: int) -> float:
    command = ["iperf3", "--client", "127.0.0.1", "--port", port, "--bytes", str(nbytes), "--json"]
    for _ in range(50):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        # A server that is not listening yet, or has ended a former test late, is asked again.
        received = json.loads(found.stdout or "{}").get("end", {}).get("sum_received")
        if found.returncode == 0 and received:
            return float(received["bits_per_second"]) / 8
        time.sleep(0.05)
    raise RuntimeError(f"iperf3 failed: {found.stdout}{found.stderr}")
