"""What a checkpoint costs training, and how fast it reaches the disk.

    python benchmarks/checkpoint.py [--json]

A rank's state of `STATE_BYTES` lies in a StateManager of its own process. The stall is what the
rank waits for: a snapshot of what is stored already, and the request for a checkpoint. Writing is
compared with plain writes of as many bytes past the page cache, in turns with it.
"""

import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.report import percentile, report
from plexrl.statemanager.arena import Arena
from plexrl.statemanager.checkpoint.requests import (
    CancelCheckpoint,
    CheckpointReport,
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
)
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.client import StateManagerClient
from plexrl.statemanager.config import StateManagerConfig
from plexrl.statemanager.keys import StateKey, StatePart, StateSlice
from plexrl.statemanager.ticket_key import read_ticket_key
from plexrl.statemanager.tickets import Claims, Role

MIB = 1 << 20
TENSORS = 3 * 250
TENSOR_BYTES = MIB
STATE_BYTES = TENSORS * TENSOR_BYTES
STALLS = 200
ROUNDS = 5
WRITE_BYTES = 8 * MIB
POLL_S = 0.005
DEPLOYMENT = "job/actor"


def slices() -> tuple[StateSlice, ...]:
    """A third of parameters, and two moments of each."""
    found = []
    for index in range(TENSORS):
        name, kind = f"layer{index // 3}.weight", ("", "/exp_avg", "/exp_avg_sq")[index % 3]
        part = StatePart.OPTIMIZER if kind else StatePart.PARAMETER
        found.append(
            StateSlice(
                key=StateKey(part=part, name=name + kind),
                dtype="F32",
                global_shape=(512, TENSOR_BYTES // 4 // 512),
                offset=(0, 0),
                shape=(512, TENSOR_BYTES // 4 // 512),
                arena_offset=index * TENSOR_BYTES,
            )
        )
    return tuple(found)


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def plain_write(path: Path) -> None:
    """As many bytes, in one file, from memory that is there."""
    block = memoryview(mmap.mmap(-1, WRITE_BYTES))
    block[:] = bytes(range(256)) * (WRITE_BYTES // 256)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, STATE_BYTES)
        for start in range(0, STATE_BYTES, WRITE_BYTES):
            part = block[: min(WRITE_BYTES, STATE_BYTES - start)]
            assert os.pwrite(fd, part, start) == len(part), "the disk is full"
        os.fsync(fd)
    finally:
        os.close(fd)


class Rank:
    """One rank and its StateManager."""

    def __init__(self, config: StateManagerConfig) -> None:
        self._config = config
        self._arena = Arena(STATE_BYTES)
        claims = Claims(role=Role.WORKER, job="job", deployment=DEPLOYMENT, group="g")
        self.client = StateManagerClient(
            config.listen,
            deployment=DEPLOYMENT,
            rank=0,
            world_size=1,
            ticket=read_ticket_key(config.ticket_key_path).mint(claims),
            timeout_s=60.0,
        )
        self.client.register(self._arena, slices(), group="g", token=1)
        contents = np.frombuffer(self._arena.buffer, dtype=np.uint8)
        contents[:] = np.random.default_rng(1).integers(0, 256, contents.size, dtype=np.uint8)

    def snapshot(self) -> None:
        """Copies the first time only: the arena never changes."""
        parts = frozenset({StatePart.PARAMETER, StatePart.OPTIMIZER})
        self.client.snapshot(seq=1, keep_seq=1, token=1, parts=parts)

    def save(self, name: str) -> CheckpointReport:
        """Ask for a checkpoint."""
        request = WriteCheckpoint(deployment=DEPLOYMENT, seq=1, name=name, overwrite=True)
        return msgspec.convert(self.client.request(request), CheckpointReport)

    def wait(self, name: str) -> CheckpointReport:
        """Until it is durable."""
        while True:
            request = CheckpointStatus(deployment=DEPLOYMENT, name=name)
            (plain,) = self.client.request(request)["checkpoints"]
            found = msgspec.convert(plain, CheckpointReport)
            if found.state.is_final:
                assert found.state == CheckpointState.DURABLE, found
                return found
            time.sleep(POLL_S)

    def stalls_ms(self) -> list[float]:
        """Waits for a snapshot that changes nothing and a pin, one after the other's end."""
        found = []
        for index in range(STALLS):
            name = f"stall{index % 4}"
            start = time.perf_counter()
            self.snapshot()
            self.save(name)
            found.append(1e3 * (time.perf_counter() - start))
            self.client.request(CancelCheckpoint(deployment=DEPLOYMENT, name=name))
        return found


def read_back(path: Path) -> float:
    """Seconds of filling a rank's slices, digests checked; from the page cache if it is there."""
    memory = np.ones(STATE_BYTES, dtype=np.uint8).data

    def fill() -> None:
        with Checkpoint(path) as checkpoint:
            checkpoint.fill(slices(), lambda piece: memory[piece.arena_offset :][: piece.nbytes])

    return timed(fill)


def measure(folder: Path, config: StateManagerConfig) -> None:
    """Measure and print the figures."""
    rank = Rank(config)
    with closing(rank.client):
        first_s = timed(rank.snapshot)
        stalls = rank.stalls_ms()
        ours, plain = [], []
        for index in range(ROUNDS):
            plain.append(timed(lambda: plain_write(folder / "plain")))
            rank.save(f"c{index}")
            ours.append(rank.wait(f"c{index}").seconds)
            shutil.rmtree(folder / "checkpoints" / "job" / f"c{index - 1}", ignore_errors=True)
        read_s = read_back(folder / "checkpoints" / "job" / f"c{ROUNDS - 1}")
    gb = STATE_BYTES / 1e9
    plain_s, ours_s = percentile(plain, 50), percentile(ours, 50)
    figures = {
        "state_gb": gb,
        "checkpoint_stall_p50_ms": percentile(stalls, 50),
        "checkpoint_stall_p99_ms": percentile(stalls, 99),
        "first_snapshot_s": first_s,
        "plain_write_gb_s": gb / plain_s,
        "checkpoint_write_gb_s": gb / ours_s,
        "checkpoint_write_ratio": plain_s / ours_s,
        "checkpoint_read_gb_s": gb / read_s,
    }
    rows = [(name, f"{value:.3f}") for name, value in figures.items()]
    report(f"Checkpoints of {gb:.2f} GB in {TENSORS} tensors", ("what", "value"), rows, figures)


def main() -> None:
    """Run a StateManager and measure against it."""
    folder = Path(tempfile.mkdtemp(prefix="plexrl-bench-"))
    host_dir = tempfile.mkdtemp(prefix="plexrl-bench-", dir="/dev/shm")
    config = StateManagerConfig(
        node="n",
        listen=str(folder / "sm.sock"),
        host_dir=host_dir,
        host_bytes=4 * STATE_BYTES,
        nvme_dir=str(folder / "nvme"),
        nvme_bytes=4 * STATE_BYTES,
        checkpoint_dir=str(folder / "checkpoints"),
        persist_on_exit=False,
    )
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "plexrl.statemanager", "--config", str(folder / "config.json")]
    command.append("--end-with-parent")
    daemon = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        assert json.loads(daemon.stdout.readline())["ready"]
        measure(folder, config)
    finally:
        daemon.terminate()
        daemon.wait()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(host_dir, ignore_errors=True)


if __name__ == "__main__":
    main()
