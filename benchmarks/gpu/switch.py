"""Compares context switches on a GPU with pinned copies by the same driver.

    python -m benchmarks.gpu.switch [--quick] [--state-gib N] [--switches N] [--json]

Two processes take turns on device 0. Reports offload and load against `cuMemcpyAsync` between
pinned host memory and the device, what a switch of a tiny state costs (the fixed part), and the
device's free memory after every switch. Fixed part and load are measured again with no returned
memory kept for the next load, and many small copies as batches and with one call for each. An
offload of two ranks with equal states is measured with digests and without. Switches whose offload
names what is loaded next take turns with switches whose load begins after the offload. Where
`cuda-checkpoint` is installed, it is compared too: its switch over ours. Needs an NVIDIA GPU, and
memory for both states in /dev/shm; without a GPU it says so and measures nothing.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.gpu import cuda_checkpoint
from benchmarks.gpu.job import Reply, serve_job
from benchmarks.gpu.part import note
from benchmarks.gpu.replicas import replica_figures
from benchmarks.report import report
from benchmarks.sizes import sized
from plexrl.errors import DeviceUnavailableError
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.device.cuda.bindings import BoundDriver
from plexrl.statemanager.device.mapping import map_zero, set_zero
from plexrl.worker.state.device import GpuDevice

GIB = 1 << 30
TINY_BYTES = 2 << 20
SHARED_MEMORY = "/dev/shm"
SPARE_BYTES = sized(2 * GIB, quick=GIB // 4)
"""Free space of the host tier in addition to the two states."""
COPY_BYTES = sized(4 * GIB, quick=GIB // 4)
REPEATS = 5
SWITCHES_RELEASED = 20
"""Switches with no returned memory kept; the time of a check is short."""
BATCH_COPIES = sized(8192, quick=1024)
BATCH_PIECE_BYTES = 16 << 10


class Job:
    """A job's process, and the pipe to it."""

    def __init__(self, node: StateManagerConfig, name: str, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        given = (theirs, node.listen, str(node.ticket_key_path), name, nbytes)
        # It ends with this process, whatever goes wrong here.
        self.name = name
        self.process = context.Process(target=serve_job, args=given, daemon=True)
        self.process.start()
        # Else a job that dies would never be the end of what is read from the pipe.
        theirs.close()
        self.seq = 0

    def ask(self, action: str, successor: "Job | None" = None) -> Reply:
        """Execute an action; raises RuntimeError if the job reports an error. `successor`: the job
        that is loaded after an offload."""
        self.seq += action == "offload"
        version = ("", 0) if successor is None else (f"{successor.name}/actor", successor.seq)
        self._pipe.send((action, self.seq, version))
        reply: Reply = self._pipe.recv()
        if reply[0]:
            raise RuntimeError(f"{action}: {reply[0]}")
        return reply

    def end(self) -> None:
        """Return when the process is gone."""
        self._pipe.send(("end", 0, ("", 0)))
        self.process.join()


def plain_rates(driver: BoundDriver) -> tuple[float, float]:
    """GB/s of one pinned copy (to host, to device), the best of some."""
    driver.enter(0)
    host = map_zero(COPY_BYTES)
    set_zero(host, COPY_BYTES)
    driver.register_host(host, COPY_BYTES)
    stream, handle = driver.create_stream(), driver.create(0, COPY_BYTES)
    address = driver.reserve(COPY_BYTES)
    driver.map(address, COPY_BYTES, handle)
    driver.allow_access(0, address, COPY_BYTES)

    def best(begin: Callable[[], None]) -> float:
        seconds = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            begin()
            driver.synchronize_stream(stream)
            seconds.append(time.perf_counter() - started)
        return COPY_BYTES / min(seconds) / 1e9

    to_host = best(lambda: driver.copy_to_host(host, address, COPY_BYTES, stream))
    to_device = best(lambda: driver.copy_to_device(address, host, COPY_BYTES, stream))
    driver.unmap(address, COPY_BYTES)
    driver.release(handle)
    driver.unreserve(address, COPY_BYTES)
    driver.unregister_host(host)
    return to_host, to_device


def batch_ratio(driver: BoundDriver) -> float:
    """How many times as long one call for each of many small pinned copies takes as a batch."""
    driver.enter(0)
    total = BATCH_COPIES * BATCH_PIECE_BYTES
    host = map_zero(2 * total)
    driver.register_host(host, 2 * total)
    stream, handle = driver.create_stream(), driver.create(0, 2 * total)
    address = driver.reserve(2 * total)
    driver.map(address, 2 * total, handle)
    driver.allow_access(0, address, 2 * total)
    # Every second piece, so that neighbours cannot be joined.
    copies = [
        (address + start, host + start, BATCH_PIECE_BYTES)
        for start in range(0, 2 * total, 2 * BATCH_PIECE_BYTES)
    ]

    def each() -> None:
        for target, source, nbytes in copies:
            driver.copy_to_device(target, source, nbytes, stream)

    def seconds(begin: Callable[[], None]) -> float:
        found = []
        for _ in range(REPEATS):
            started = time.perf_counter()
            begin()
            driver.synchronize_stream(stream)
            found.append(time.perf_counter() - started)
        return min(found)

    one_by_one = seconds(each)
    batched = seconds(lambda: driver.copy_batch(copies, stream, to_host=False))
    driver.unmap(address, 2 * total)
    driver.release(handle)
    driver.unreserve(address, 2 * total)
    driver.unregister_host(host)
    return one_by_one / batched


def state_bytes_max() -> int:
    """How large each of two states may be, so that both fit into the host tier in /dev/shm.

    Raises:
        RuntimeError: there is no room to speak of.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = min(free, 1024 * int(line.split()[1]))
    nbytes = (free * 4 // 5 - SPARE_BYTES) // 2 >> 21 << 21
    if nbytes <= 0:
        raise RuntimeError(
            f"{SHARED_MEMORY} has {free >> 20} MiB: `mount -o remount,size=40g {SHARED_MEMORY}`, "
            "or start the container with `--shm-size`"
        )
    return nbytes


def take_turns(
    node: StateManagerConfig, name: str, nbytes: int, switches: int, driver: BoundDriver
) -> list[tuple[float, float, float, int]]:
    """(seconds of a whole switch, of its offload, of its load, free bytes after it), of each."""
    jobs = [Job(node, f"{name}{index}", nbytes) for index in range(2)]
    for job in jobs:
        job.ask("fill")
        job.ask("offload")
    jobs[0].ask("load")
    turns = []
    for turn in range(switches):
        leaving, coming = jobs[turn % 2], jobs[1 - turn % 2]
        started = time.perf_counter()
        _, offload_s, _ = leaving.ask("offload")
        _, load_s, _ = coming.ask("load")
        turns.append((time.perf_counter() - started, offload_s, load_s, driver.memory_info()[0]))
        if turn % 10 == 0:
            coming.ask("check")
    for job in jobs:
        job.end()
    return turns


def overlapped_ratio(jobs: Sequence[Job], nbytes: int, switches: int) -> tuple[float, float]:
    """(time of an overlapped switch over one in sequence, part of its load that was copied during
    the offload); the two jobs end."""
    for job in jobs:
        job.ask("fill")
        job.ask("offload")
    jobs[0].ask("load")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    before = []
    for turn in range(2 * switches):
        leaving, coming = jobs[turn % 2], jobs[1 - turn % 2]
        # Each way there and back, then the other way.
        overlaps = turn // 2 % 2 == 0
        started = time.perf_counter()
        leaving.ask("offload", coming if overlaps else None)
        _, _, moved = coming.ask("load")
        seconds[overlaps].append(time.perf_counter() - started)
        if overlaps:
            before.append(1.0 - moved / nbytes)
        coming.ask("check")
    for job in jobs:
        job.end()
    medians = {overlaps: statistics.median(found) for overlaps, found in seconds.items()}
    return medians[True] / medians[False], statistics.median(before)


def start_daemon(
    directory: Path,
    host_bytes: int,
    *,
    device: DeviceKind = DeviceKind.CUDA,
    device_bytes: int | None = None,
    device_idle_bytes: int | None = None,
) -> tuple[subprocess.Popen[str], StateManagerConfig]:
    """A StateManager that is ready for calls, and its configuration."""
    config = StateManagerConfig(
        node="gpu",
        listen=str(directory / "s.sock"),
        host_dir=tempfile.mkdtemp(prefix="plexrl-gpu-", dir=SHARED_MEMORY),
        host_bytes=host_bytes,
        # The first turns allocate it; in the background it would disturb them.
        host_prefault_bytes=0,
        nvme_dir=str(directory / "nvme"),
        nvme_bytes=GIB,
        device=device,
        device_bytes=device_bytes,
        device_idle_bytes=device_idle_bytes,
        persist_on_exit=False,
    )
    path = directory / "config.json"
    path.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "plexrl.statemanager", "--config", str(path)]
    command.append("--end-with-parent")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None
    if not json.loads(process.stdout.readline() or "{}").get("ready"):
        raise RuntimeError("the StateManager did not start: see its messages above")
    return process, config


@contextmanager
def running_daemon(
    host_bytes: int,
    *,
    device: DeviceKind = DeviceKind.CUDA,
    device_bytes: int | None = None,
    idle_bytes: int | None = None,
) -> Iterator[StateManagerConfig]:
    """A StateManager of the device, until the block ends. It lends at most `device_bytes`, and
    keeps at most `idle_bytes` of returned memory."""
    directory = Path(tempfile.mkdtemp(prefix="plexrl-gpu-"))
    daemon, node = start_daemon(
        directory,
        host_bytes,
        device=device,
        device_bytes=device_bytes,
        device_idle_bytes=idle_bytes,
    )
    try:
        yield node
    finally:
        with daemon:
            daemon.terminate()
        shutil.rmtree(directory)
        # The StateManager removes it, unless it failed.
        shutil.rmtree(node.host_dir, ignore_errors=True)


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state-gib", type=int, default=sized(8, quick=1))
    parser.add_argument("--switches", type=int, default=sized(100, quick=4))
    parser.add_argument("--quick", action="store_true", help="small states, few switches")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    try:
        driver = BoundDriver()
        driver.enter(0)
    except DeviceUnavailableError as error:
        sys.stdout.write(f"no GPU here, so nothing was measured: {error}\n")
        return
    nbytes = min(wanted.state_gib * GIB, state_bytes_max())
    to_host, to_device = plain_rates(driver)
    show(
        "Pinned copies",
        {
            "plain_to_host_gb_s": to_host,
            "plain_to_device_gb_s": to_device,
            "batch_ratio": batch_ratio(driver),
        },
    )

    def turns(
        count: int, idle_bytes: int | None, *sizes: int
    ) -> list[list[tuple[float, float, float, int]]]:
        """As `take_turns` for each size, with a StateManager that keeps `idle_bytes`."""
        with running_daemon(2 * max(sizes) + SPARE_BYTES, idle_bytes=idle_bytes) as node:
            return [take_turns(node, f"job{size}-", size, count, driver) for size in sizes]

    tiny, large = turns(wanted.switches, None, TINY_BYTES, nbytes)
    switch_s, offload_s, load_s = (statistics.median(turn[at] for turn in large) for at in range(3))
    free = [turn[3] for turn in large]
    offload, load = nbytes / offload_s / 1e9, nbytes / load_s / 1e9
    show(
        f"{wanted.switches} switches of two states of {nbytes / GIB:.1f} GiB",
        {
            "offload_gb_s": offload,
            "load_gb_s": load,
            "offload_ratio": offload / to_host,
            "load_ratio": load / to_device,
            "fixed_switch_ms": 1e3 * statistics.median(turn[0] for turn in tiny),
            "state_bytes": nbytes,
            "free_bytes_first": free[0],
            "free_bytes_last": free[-1],
            "free_bytes_min": min(free),
        },
    )
    few = min(wanted.switches, SWITCHES_RELEASED)
    tiny_released, large_released = turns(few, 0, TINY_BYTES, nbytes)
    show(
        "No returned memory kept",
        {
            "fixed_switch_ms_released": 1e3 * statistics.median(turn[0] for turn in tiny_released),
            "load_released_ratio": statistics.median(turn[2] for turn in large_released) / load_s,
        },
    )
    with running_daemon(nbytes + SPARE_BYTES) as node:
        device = GpuDevice(driver.uuids()[0], driver)
        show("Two ranks with equal states", replica_figures(node, device, nbytes // 4))
    with running_daemon(2 * nbytes + SPARE_BYTES) as node:
        jobs = [Job(node, f"overlap{index}", nbytes) for index in range(2)]
        overlapped, before = overlapped_ratio(jobs, nbytes, few)
    show(
        "Load during the offload",
        {"overlapped_switch_ratio": overlapped, "overlapped_switch_prefetched": before},
    )
    if (suspended_s := cuda_checkpoint.switch_s(nbytes)) is not None:
        show("cuda-checkpoint", {"cuda_checkpoint_ratio": suspended_s / switch_s})


def show(title: str, figures: dict[str, float]) -> None:
    """Report a part, so that it remains if a later one is stopped."""
    note(title)
    rows = [[name, f"{value:.3f}"] for name, value in figures.items()]
    report(title, ["figure", "value"], rows, figures)


if __name__ == "__main__":
    main()
