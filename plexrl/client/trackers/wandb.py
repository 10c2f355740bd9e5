"""Weights & Biases: one run for each job, online or offline (`WANDB_MODE`).

The step of W&B is the row's index, which never falls; `step` is the x-axis. Offline each controller
adds a file to the run, which `wandb sync` joins. Online the service drops rows with a known index.
"""

import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plexrl.client.trackers.tracker import ROW_KEY, TrackedRun, marked_values
from plexrl.wire.messages.views import MetricsRow

if TYPE_CHECKING:
    from wandb import Run

PROJECT = "plexrl"
SETTLE_S = 2.0
"""W&B writes files in a process of its own, which goes on for a moment after a run or a controller.
Files that do not change for so long are complete."""
HEADER_BYTES, BLOCK_BYTES = 7, 32 << 10
RECORD = struct.Struct("<IHB")
"""Head of a record in a W&B file: checksum, length, and whether it is whole (1), or the first (2),
a middle (3) or the last part (4) of a record."""


class WandbRun:
    """One run of W&B."""

    def __init__(self, run: "Run", last_row: int) -> None:
        self._run = run
        self._last_row = last_row
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    def last_row(self) -> int:
        return self._last_row

    def write(self, rows: Sequence[MetricsRow]) -> None:
        for row in rows:
            self._run.log({**marked_values(row), "step": row["step"]}, step=row["index"])

    def close(self, outcome: str | None) -> None:
        self._run.finish(exit_code=1 if outcome == "failed" else 0)


def open_run(run: TrackedRun) -> WandbRun:
    """Open the run of a job, or make it."""
    import wandb

    where = Path(os.environ.get("WANDB_DIR") or run.folder)
    where.mkdir(parents=True, exist_ok=True)
    last_row = settled_last_row(where / "wandb", run.job)
    opened = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or PROJECT,
        id=run.job,
        name=run.job,
        dir=where,
        resume="allow",
        reinit="create_new",
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True
        ),
    )
    if opened.offline:
        return WandbRun(opened, last_row)
    # Online the service says what it has: files here may hold rows that were never sent.
    known = opened.summary.get(ROW_KEY, 0)  # type: ignore[no-untyped-call]  # W&B has no type here
    return WandbRun(opened, int(known))


def settled_last_row(folder: Path, job: str) -> int:
    """The index of the last row in the files of the run; 0: none."""
    files = list(folder.glob(f"*run-*-{job}*/run-{job}.wandb"))
    files.sort(key=lambda file: file.stat().st_mtime)
    while files:
        sizes = [file.stat().st_size for file in files]
        found = [_last_row(file) for file in files]
        if found[-1][1]:
            return max(row for row, _ in found)
        time.sleep(SETTLE_S)
        if sizes == [file.stat().st_size for file in files]:
            return max(row for row, _ in found)
    return 0


def _last_row(file: Path) -> tuple[int, bool]:
    """The index of the file's last row, and whether its writer has closed it."""
    last, closed = 0, False
    for record in _records(file.read_bytes()):
        closed |= record.WhichOneof("record_type") == "exit"
        for item in record.history.item:
            if ROW_KEY in (item.key, "/".join(item.nested_key)):
                last = max(last, int(float(item.value_json)))
    return last, closed


def _records(text: bytes) -> Iterator[Any]:
    """The records of a W&B file, which is a log of LevelDB. One that a kill cut off is left out."""
    # Made at run time, so that no type is known.
    from wandb.proto import wandb_internal_pb2

    read = vars(wandb_internal_pb2)["Record"].FromString
    at, parts = HEADER_BYTES, b""
    while at + RECORD.size <= len(text):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD.size:
            at += left
            continue
        _, length, kind = RECORD.unpack_from(text, at)
        at += RECORD.size
        if kind == 0 or at + length > len(text):
            return
        parts = text[at : at + length] if kind in (1, 2) else parts + text[at : at + length]
        at += length
        if kind in (1, 4):
            yield read(parts)
