"""Measures the training stall of a checkpoint and the speed of writing it.

The stall is what a rank waits for: a snapshot, and the request for a checkpoint. After a step all
of the state has changed, so the snapshot copies it; without a step since the last snapshot it
copies nothing. Writing is compared with plain writes of as many bytes past the page cache.
"""

import mmap
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.report import percentile
from benchmarks.sizes import sized
from benchmarks.state.baselines import GB, MIB, Seconds, in_turns, timed
from benchmarks.state.rig import Figures, Rank, Rows, daemon, row
from plexrl.statemanager.checkpoint.requests import (
    CancelCheckpoint,
    CheckpointState,
    CheckpointStatus,
    WriteCheckpoint,
)
from plexrl.statemanager.checkpoint.restore import Checkpoint
from plexrl.statemanager.layout.keys import StateKey, StatePart, StateSlice
from plexrl.wire.messages.node_queries import CheckpointView

TENSORS = sized(3 * 250, quick=6)
TENSOR_BYTES = MIB
STATE_BYTES = TENSORS * TENSOR_BYTES
STALLS = sized(20, quick=2)
UNCHANGED_STALLS = sized(200, quick=4)
ROUNDS = sized(4, quick=1)
WRITE_BYTES = 8 * MIB
POLL_S = 0.005


def measure() -> tuple[Rows, Figures]:
    """Stalls, writing and reading."""
    with daemon() as served:
        folder = Path(served.config.checkpoint_url)
        trainer = _Trainer(Rank(served, _slices()))
        first_s = timed(trainer.snapshot)
        stalls = trainer.stalls_ms(STALLS, after_step=True)
        unchanged = trainer.stalls_ms(UNCHANGED_STALLS, after_step=False)
        works = {"plain": lambda: _plain_write(folder.parent / "plain"), "ours": trainer.save}
        found = in_turns(works, ROUNDS)
        read_s = _read_back(folder / "job" / trainer.latest)
    figures = {
        "checkpoint_stall_ms": percentile(stalls, 50),
        "checkpoint_stall_p99_ms": percentile(stalls, 99),
        "checkpoint_stall_unchanged_ms": percentile(unchanged, 50),
        "checkpoint_first_snapshot_s": first_s,
        "checkpoint_write_gb_s": STATE_BYTES / found.best_s("ours") / GB,
        "checkpoint_write_ratio": found.ratio("ours", "plain"),
        "checkpoint_read_gb_s": STATE_BYTES / read_s / GB,
    }
    stall = f"{figures['checkpoint_stall_ms']:.2f} ms"
    rate = f"{figures['checkpoint_write_gb_s']:.2f} GB/s, {figures['checkpoint_write_ratio']:.2f}"
    tail = f"p99 {figures['checkpoint_stall_p99_ms']:.2f}"
    return [
        row(f"checkpoint of {TENSORS} tensors: stall of training after a step", stall, tail),
        row(
            "the same without a step since the last snapshot",
            f"{figures['checkpoint_stall_unchanged_ms']:.2f} ms",
            bar="≤ 5 ms",
        ),
        row(
            "checkpoint written, of plain writes", rate, f"{found.usual_ratio('ours', 'plain'):.2f}"
        ),
        row("checkpoint read back", f"{figures['checkpoint_read_gb_s']:.2f} GB/s"),
    ], figures


class _Trainer:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._count = 0
        self._seq = 1
        self.latest = ""
        """Name of the checkpoint that was written last."""
        rank.fill()

    def snapshot(self) -> None:
        """Copies if there was a step since the last one."""
        self._rank.snapshot(self._seq)

    def save(self) -> Seconds:
        """Until a checkpoint is durable, by the daemon's clock; the one before goes."""
        if self.latest:
            self._folder().joinpath(self.latest).rename(self._folder() / "gone")
            shutil.rmtree(self._folder() / "gone")
        self._count += 1
        self.latest = f"c{self._count}"
        self._ask(self.latest)
        while True:
            request = CheckpointStatus(deployment=self._rank.deployment, name=self.latest)
            (plain,) = self._rank.client.request(request)["checkpoints"]
            found = msgspec.convert(plain, CheckpointView)
            if CheckpointState(found["state"]).is_final:
                assert found["state"] == CheckpointState.DURABLE, found
                return found["seconds"]
            time.sleep(POLL_S)

    def stalls_ms(self, count: int, *, after_step: bool) -> list[float]:
        """Waits for a snapshot and a pin, one after the other's end."""
        found = []
        for index in range(count):
            name = f"stall{index % 4}"
            if after_step:
                self._rank.change()
                self._seq += 1
            start = time.perf_counter()
            self.snapshot()
            self._ask(name)
            found.append(1e3 * (time.perf_counter() - start))
            request = CancelCheckpoint(deployment=self._rank.deployment, name=name)
            self._rank.client.request(request)
        return found

    def _folder(self) -> Path:
        return Path(self._rank.client.path).parent / "checkpoints" / "job"

    def _ask(self, name: str) -> None:
        deployment = self._rank.deployment
        request = WriteCheckpoint(deployment=deployment, seq=self._seq, name=name, overwrite=True)
        self._rank.client.request(request)


def _slices() -> tuple[StateSlice, ...]:
    """A third of parameters, and two moments of each."""
    piece = StateSlice(
        key=StateKey(part=StatePart.PARAMETER, name=""),
        dtype="F32",
        global_shape=(512, TENSOR_BYTES // 4 // 512),
        offset=(0, 0),
        shape=(512, TENSOR_BYTES // 4 // 512),
        arena_offset=0,
    )
    found = []
    for index in range(TENSORS):
        name, kind = f"layer{index // 3}.weight", ("", "/exp_avg", "/exp_avg_sq")[index % 3]
        part = StatePart.OPTIMIZER if kind else StatePart.PARAMETER
        key = StateKey(part=part, name=name + kind)
        found.append(replace(piece, key=key, arena_offset=index * TENSOR_BYTES))
    return tuple(found)


def _plain_write(path: Path) -> Seconds:
    """As many bytes, in one file, from memory that is there."""
    block = memoryview(mmap.mmap(-1, WRITE_BYTES))
    block[:] = bytes(range(256)) * (WRITE_BYTES // 256)
    path.unlink(missing_ok=True)

    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            os.posix_fallocate(fd, 0, STATE_BYTES)
            for start in range(0, STATE_BYTES, WRITE_BYTES):
                part = block[: min(WRITE_BYTES, STATE_BYTES - start)]
                assert os.pwrite(fd, part, start) == len(part), "the disk is full"
            os.fsync(fd)
        finally:
            os.close(fd)

    return timed(write)


def _read_back(path: Path) -> Seconds:
    """Of filling a rank's slices, digests checked; from the page cache if it is there."""
    memory = np.ones(STATE_BYTES, dtype=np.uint8).data

    def fill() -> None:
        with Checkpoint(path) as checkpoint:
            checkpoint.fill(_slices(), lambda piece: memory[piece.arena_offset :][: piece.nbytes])

    return timed(fill)
