"""Adds to the records of a job, for a blocking controller."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, SupportsFloat
from urllib.parse import quote

from plexrl.client.blocking.job_reader import JobReader
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import Transport
from plexrl.client.data.argument_checks import source_deployment
from plexrl.client.data.metric_rows import metrics_row
from plexrl.client.trackers.feed import TrackerFeed
from plexrl.client.trackers.tracker import TrackedRun
from plexrl.wire.messages.views import JobView


class TrainSource(Protocol):
    """A train deployment, of a blocking or of an `async` controller."""

    @property
    def deployment(self) -> str:
        """As `Deployment.deployment`."""
        ...

    @property
    def optim_step(self) -> Callable[..., object]:
        """As `TrainDeployment.optim_step`."""
        ...


class JobRecords(JobReader):
    """Reads and writes the records of a job."""

    def __init__(self, transport: Transport, view: JobView, control: Controller) -> None:
        super().__init__(transport, view)
        self._control = control
        self._trackers: TrackerFeed | None = None

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Add a row to the job's metrics, and to its trackers: `values` by name, for the
        controller's own `step`. NaN and infinite values are kept. A second row for the same step
        replaces nothing; a row with a lower step than the row before it is kept and marked
        (`rewinds_from`).

        Raises:
            InvalidRequestError: one of `values` is not a number.
        """
        self._control.check()
        self._transport.ask("POST", f"{self._path}/metrics", body=metrics_row(step, values))
        if self._trackers is not None:
            self._trackers.wake()

    def resume_step(self, source: TrainSource) -> int:
        """Optimizer steps in the weights of the trainer `source`, from which a controller that
        attached the job goes on. It numbers rows of `log`, checkpoints and the steps of trackers.

        If an earlier controller was killed between an `optim_step` and its row, a row for this step
        says how many rows are missing (`resumed/steps_without_row`).
        """
        deployment = source_deployment(source).rpartition("/")[2]
        done = int(self.deployment_status(deployment)["trainer_step"])
        logged = max((row["step"] for row in self.metrics()), default=0)
        if logged < done:
            self.log(done, {"resumed/steps_without_row": done - logged})
        return done

    def delete_checkpoint(self, name: str) -> None:
        """Delete the checkpoint `name`. Raises `CheckpointNotFoundError`."""
        self._transport.ask("DELETE", f"{self._path}/checkpoints/{quote(name, safe='')}")

    def _follow(self, trackers: Sequence[str], folder: Path) -> None:
        """Copy the job's metrics to `trackers` until this controller leaves the job. Raises as
        `TrackerFeed`."""
        if trackers:
            run = TrackedRun(job=self.job, name=self.name, folder=folder)
            self._trackers = TrackerFeed(run, trackers, lambda after: self.metrics(after=after))

    def _close_trackers(self, outcome: str | None) -> None:
        if self._trackers is not None:
            self._trackers.close(outcome)
