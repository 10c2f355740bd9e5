"""Reads what a tracker has of a job, with the tracker's own library, and controllers that are
killed while they write."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from plexrl.client.data.metric_rows import read_rows
from plexrl.client.trackers.feed import TrackerFeed
from plexrl.client.trackers.tracker import ROW_KEY, TrackedRun
from plexrl.client.trackers.wandb import _records, settled_last_row
from plexrl.router.job_files.metrics_log import MetricsFiles
from plexrl.router.job_files.record_store import JobKey
from plexrl.wire.messages.views import MetricsRow

JOB = "digits-1a2b3c4d"
KEY = JobKey("operator", JOB)
Found = list[tuple[int, float, float]]
"""Step, reward and row of each row, in the order of the rows."""


def metrics_of(folder: Path) -> MetricsFiles:
    return MetricsFiles(folder, row_bytes_max=10_000, job_bytes_max=1 << 20)


def feed_of(folder: Path, names: Sequence[str]) -> TrackerFeed:
    """A feed from the metrics in `folder`, as the router keeps them."""
    log = metrics_of(folder)

    def read(after: int) -> list[MetricsRow]:
        return read_rows(json.loads(log.page(KEY, after))["rows"])

    run = TrackedRun(job=JOB, name="digits", folder=folder / "runs")
    return TrackerFeed(run, names, read)


def log_step(log: MetricsFiles, step: int) -> None:
    """Log a row with a millisecond of its own: MLflow has no other order of rows."""
    logged_ms = time.time_ns() // 1_000_000
    log.append(KEY, step, {"reward/mean": step / 8})
    while time.time_ns() // 1_000_000 <= logged_ms + 1:
        threading.Event().wait(0.001)


def write_and_end(folder: Path, name: str, first: int, last: int, end: str) -> None:
    """Be a controller that logs the steps `first` to `last`. It is killed while its tracker writes
    (`kill`), or returns without closing anything (`exit`)."""
    feed = feed_of(folder, [name])
    log = metrics_of(folder)
    for step in range(first, last + 1):
        log_step(log, step)
        if step == first or end == "kill":
            # Else the last rows are copied when the process ends.
            feed.wake()
        while step == first and feed.copied(name) < step:
            threading.Event().wait(0.01)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def tensorboard_rows(folder: Path) -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "runs" / JOB), {"scalars": 0}, purge_orphaned_data=False)
    found.Reload()
    rewards = found.Scalars("reward/mean")
    rows = found.Scalars(ROW_KEY)
    return sorted(
        ((r.step, r.value, i.value) for r, i in zip(rewards, rows, strict=True)),
        key=lambda row: row[2],
    )


def wandb_rows(folder: Path) -> Found:
    # W&B ends a run before its own process has written the file.
    settled_last_row(folder / "runs" / "wandb", JOB)
    found = []
    for file in sorted((folder / "runs" / "wandb").glob(f"offline-run-*-{JOB}*/run-{JOB}.wandb")):
        for record in _records(file.read_bytes()):
            if record.WhichOneof("record_type") != "history":
                continue
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            assert values["_step"] == values[ROW_KEY]
            found.append((values["step"], values["reward/mean"], values[ROW_KEY]))
    return sorted(found, key=lambda row: row[2])


def mlflow_rows(folder: Path) -> Found:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("plexrl")
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    rewards = client.get_metric_history(run.info.run_id, "reward/mean")
    rows = client.get_metric_history(run.info.run_id, ROW_KEY)
    rewards.sort(key=lambda each: each.timestamp)
    rows.sort(key=lambda each: each.step)
    return [(r.step, r.value, i.value) for r, i in zip(rewards, rows, strict=True)]


def trackio_rows(folder: Path) -> Found:
    del folder
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("plexrl", JOB)
    return sorted(
        ((row["step"], row["reward/mean"], row[ROW_KEY]) for row in rows), key=lambda row: row[2]
    )


READERS: dict[str, Callable[[Path], Found]] = {
    "tensorboard": tensorboard_rows,
    "wandb": wandb_rows,
    "mlflow": mlflow_rows,
    "trackio": trackio_rows,
}


if __name__ == "__main__":
    write_and_end(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
