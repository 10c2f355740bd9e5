"""MLflow: one run for each job, found by its tag.

Rows go to the server of `MLFLOW_TRACKING_URI`, or to an SQLite file. A database keeps a value once,
however often it is sent, so that a row which a kill cut off is completed without repetition.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from plexrl.client.trackers.tracker import ROW_KEY, TrackedRun, marked_values
from plexrl.wire.messages.views import MetricsRow

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

JOB_TAG = "plexrl.job"
EXPERIMENT = "plexrl"
BATCH = 1000
"""Most values that a server takes in one request."""
STATUS = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class MlflowRun:
    """One run of MLflow."""

    def __init__(self, client: "MlflowClient", run: str) -> None:
        self._client = client
        self._run = run
        client.update_run(run, status="RUNNING")

    def last_row(self) -> int:
        # Its step is the row's index too, so the newest value is the largest.
        latest = self._client.get_run(self._run).data.metrics.get(ROW_KEY, 0.0)
        return int(latest)

    def write(self, rows: Sequence[MetricsRow]) -> None:
        from mlflow.entities import Metric

        for row in rows:
            at_ms = round(row["time"] * 1000)
            metrics = [
                Metric(_allowed(name), value, at_ms, row["step"])
                for name, value in marked_values(row).items()
                if name != ROW_KEY
            ]
            # Last, because it says that the others are there.
            metrics.append(Metric(ROW_KEY, float(row["index"]), at_ms, row["index"]))
            for start in range(0, len(metrics), BATCH):
                self._client.log_batch(self._run, metrics=metrics[start : start + BATCH])

    def close(self, outcome: str | None) -> None:
        if outcome is not None:
            self._client.set_terminated(self._run, status=STATUS[outcome])


def open_run(run: TrackedRun) -> MlflowRun:
    """Open the run of a job, or make it."""
    import mlflow
    from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME
    from mlflow.tracking import MlflowClient

    uri = None
    if not mlflow.is_tracking_uri_set():
        run.folder.mkdir(parents=True, exist_ok=True)
        uri = f"sqlite:///{(run.folder / 'mlflow.db').absolute()}"
    client = MlflowClient(tracking_uri=uri)
    name = MLFLOW_EXPERIMENT_NAME.get() or EXPERIMENT
    known = client.get_experiment_by_name(name)
    experiment = client.create_experiment(name) if known is None else known.experiment_id
    found = client.search_runs([experiment], f"tags.`{JOB_TAG}` = '{run.job}'")
    if found:
        return MlflowRun(client, found[0].info.run_id)
    made = client.create_run(experiment, tags={JOB_TAG: run.job}, run_name=run.job)
    return MlflowRun(client, made.info.run_id)


def _allowed(name: str) -> str:
    """The name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /:]", "_", name)
