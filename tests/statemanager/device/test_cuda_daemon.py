"""A whole StateManager for GPUs, on the emulated driver: offloads, loads and what is left of them.

The daemon and two jobs share emulated devices; what runs beside the driver is what runs on a node.
It proves our calls, not the hardware: `tests/gpu` does that where there is a GPU.
"""

import multiprocessing
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.gpu.job import GpuJob, serve
from benchmarks.gpu.switch import Job, overlapped_ratio
from plexrl.errors import DeviceMemoryFullError, InvalidRequestError
from plexrl.statemanager.client.arena import Arena
from plexrl.statemanager.client.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.daemon.server import DaemonServer
from plexrl.statemanager.device.backend import DeviceKind
from plexrl.statemanager.device.cuda.device import CudaDevices
from plexrl.statemanager.protocol.ticket_key import read_ticket_key
from plexrl.statemanager.protocol.tickets import Claims, TicketKey, TicketRole
from plexrl.statemanager.store.store import Store
from tests.statemanager.conftest import DEADLINE_S, wait_until
from tests.statemanager.emulated_cuda import EmulatedCuda

MIB = 1 << 20
STATE = 5 * MIB
DEVICE_BYTES = STATE * 3 // 2
SWITCHES = 8


class Node(NamedTuple):
    listen: str
    key: TicketKey
    daemon: "MeetingCuda"
    worker: EmulatedCuda


class MeetingCuda(EmulatedCuda):
    """On demand, the first copy in each direction waits until the other one has begun, too."""

    def __init__(self, name: str, *, device_bytes: int) -> None:
        super().__init__(name, device_bytes=device_bytes)
        self.meeting: threading.Barrier | None = None
        self._to_meet: set[str] = set()

    def expect_both(self) -> None:
        self.meeting = threading.Barrier(2)
        self._to_meet = {"to_host", "to_device"}

    def copy_to_host(self, host: int, address: int, nbytes: int, stream: int) -> None:
        super().copy_to_host(host, address, nbytes, stream)
        self._meet("to_host")

    def copy_to_device(self, address: int, host: int, nbytes: int, stream: int) -> None:
        super().copy_to_device(address, host, nbytes, stream)
        self._meet("to_device")

    def _meet(self, direction: str) -> None:
        """Called when the copy has begun; it is done when its stream is waited for."""
        if self.meeting is not None and direction in self._to_meet:
            self._to_meet.discard(direction)
            self.meeting.wait(DEADLINE_S)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A daemon in this process, whose device fits one and a half states."""
    name = f"daemon-{uuid.uuid4().hex[:8]}"
    drivers = (
        MeetingCuda(name, device_bytes=DEVICE_BYTES),
        EmulatedCuda(name, device_bytes=DEVICE_BYTES),
    )
    drivers[1].enter(0)
    with tempfile.TemporaryDirectory(prefix="plexrl-", dir="/dev/shm") as host_dir:
        config = StateManagerConfig(
            node="gpu",
            listen=str(Path(host_dir) / "s.sock"),
            host_dir=f"{host_dir}/host",
            host_bytes=32 * MIB,
            nvme_dir=str(tmp_path / "nvme"),
            nvme_bytes=32 * MIB,
            device=DeviceKind.CUDA,
        )
        Path(config.host_dir).mkdir()
        devices = CudaDevices(drivers[0], idle_bytes_max=0, segment_bytes_max=MIB)
        store = Store(config, on_map=devices.register_host, on_unmap=devices.unregister_host)
        server = DaemonServer(config, store, devices)
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield Node(config.listen, read_ticket_key(config.ticket_key_path), *drivers)
        server.close()
        thread.join()
        store.close()
    for driver in drivers:
        driver.check_nothing_left()


def test_two_jobs_alternate_on_a_device_for_one(node: Node) -> None:
    jobs = [GpuJob(node.worker, node.listen, node.key, f"job{index}", STATE) for index in range(2)]
    jobs[0].fill()
    with pytest.raises(DeviceMemoryFullError, match="offload another job"):
        jobs[1].fill()
    assert jobs[0].offload(1) == STATE
    assert node.daemon.taken_bytes(0) == 0, "offloading returns the memory to the driver"
    jobs[1].fill()
    jobs[1].offload(1)
    assert node.daemon.pinned, "the host tier is pinned"
    jobs[0].load(1)
    for turn in range(SWITCHES):
        leaving, coming = jobs[turn % 2], jobs[1 - turn % 2]
        leaving.check(turn)
        leaving.offload(turn + 2)
        assert node.daemon.taken_bytes(0) == 0
        coming.load(turn + 1 if turn else 1)
        assert STATE <= node.daemon.taken_bytes(0) < STATE + MIB
    for job in jobs:
        job.close()
    del jobs, job, leaving, coming
    wait_until(lambda: node.daemon.taken_bytes(0) == 0)


def test_a_load_and_the_offload_before_it_copy_at_the_same_time(node: Node) -> None:
    jobs = [GpuJob(node.worker, node.listen, node.key, f"job{index}", STATE) for index in range(2)]
    for job in jobs:
        job.fill()
        job.offload(1)
    jobs[0].load(1)
    for turn in range(SWITCHES):
        leaving, coming = jobs[turn % 2], jobs[1 - turn % 2]
        node.daemon.expect_both()
        leaving.offload(turn + 2, (f"job{1 - turn % 2}/actor", turn + 1))
        assert node.daemon.taken_bytes(0) >= 2 * MIB, "what fits beside the other state is there"
        assert coming.load(turn + 1) == STATE - 2 * MIB
        coming.check(turn)
        assert STATE <= node.daemon.taken_bytes(0) < STATE + MIB
    for job in jobs:
        job.close()
    del jobs, job, leaving, coming
    wait_until(lambda: node.daemon.taken_bytes(0) == 0)


class LocalJob(Job):
    """As the benchmark's, on a thread of this process."""

    def __init__(self, node: Node, name: str) -> None:
        self.name, self.seq = name, 0
        self._pipe, theirs = multiprocessing.Pipe()
        self._job = GpuJob(node.worker, node.listen, node.key, name, STATE)
        self._thread = threading.Thread(target=serve, args=(theirs, self._job))
        self._thread.start()

    def end(self) -> None:
        self._pipe.send(("end", 0, ("", 0)))
        self._thread.join()
        self._job.close()


def test_the_benchmark_of_overlapped_switches_runs_on_an_emulated_gpu(node: Node) -> None:
    ratio, before = overlapped_ratio([LocalJob(node, name) for name in "ab"], STATE, 2)
    assert ratio > 0.0
    assert before > 0.39, "at least two of five MiB fit beside the other state"
    wait_until(lambda: node.daemon.taken_bytes(0) == 0)


def refusal(load: Callable[[], object]) -> tuple[str, Mapping[str, Any]]:
    """Message and details. Not the error, which would keep the arena."""
    try:
        load()
    except DeviceMemoryFullError as error:
        return error.message, error.details
    raise AssertionError("it was not refused")


def keep_memory(pipe: Connection, name: str, listen: str, key: TicketKey, kept: int) -> None:
    """A worker that offloads its state and keeps other device memory; a process that is no worker
    when it is told so, until it is told to end."""
    driver = EmulatedCuda(name, device_bytes=DEVICE_BYTES)
    driver.enter(0)
    job = GpuJob(driver, listen, key, "keeper", MIB)
    job.fill()
    driver.create(0, kept)
    job.offload(1)
    pipe.send(os.getpid())
    pipe.recv()
    job.close()
    pipe.send("closed")
    pipe.recv()


def test_a_load_without_enough_free_memory_names_who_kept_it(node: Node) -> None:
    ours, theirs = multiprocessing.Pipe()
    kept = 3 * MIB
    given = (theirs, node.worker.name, node.listen, node.key, kept)
    keeper = multiprocessing.get_context("spawn").Process(target=keep_memory, args=given)
    keeper.start()
    pid = ours.recv()
    job = GpuJob(node.worker, node.listen, node.key, "job", STATE)
    message, details = refusal(job.fill)
    for part in (
        "'job/actor'",
        "'keeper/actor' has offloaded",
        f"process {pid} still holds {kept}",
    ):
        assert part in message
    assert details["free_bytes"] == DEVICE_BYTES - kept
    assert details["holders"] == [
        {"deployment": "keeper/actor", "rank": 0, "lent_bytes": 0, "process_bytes": kept}
    ]
    ours.send("leave")
    assert ours.recv() == "closed"
    message, details = refusal(job.fill)
    assert f"process {pid}, which is no worker here, holds {kept} bytes" in message
    assert (details["rank"], details["strangers"]) == (0, {str(pid): kept})
    assert details["holders"] == []
    ours.send("end")
    keeper.join()
    job.fill()
    job.close()


def test_a_load_needs_room_for_what_the_framework_used_before(node: Node) -> None:
    job = GpuJob(node.worker, node.listen, node.key, "job", STATE)
    job.fill()
    job.offload(1)
    job.expect_use(DEVICE_BYTES - STATE + 1)
    message, _ = refusal(lambda: job.load(1))
    assert f"{DEVICE_BYTES - STATE + 1} to work" in message
    assert node.daemon.taken_bytes(0) == 0, "nothing was lent"
    job.close()


def test_a_job_that_ends_frees_its_memory(node: Node) -> None:
    job = GpuJob(node.worker, node.listen, node.key, "job", STATE)
    job.fill()
    assert node.daemon.taken_bytes(0) >= STATE
    job.close()
    del job
    wait_until(lambda: node.daemon.taken_bytes(0) == 0)


def test_an_arena_of_a_cpu_node_is_refused(node: Node) -> None:
    ticket = node.key.mint(Claims(role=TicketRole.WORKER, job="job", deployment="job/actor"))
    client = StateManagerClient(
        node.listen, deployment="job/actor", rank=0, world_size=1, ticket=ticket
    )
    with pytest.raises(InvalidRequestError, match="allocates cuda memory"):
        client.register(Arena(4096), (), group="g", token=1)
    client.close()
