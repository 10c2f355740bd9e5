"""Adds to the records of a job, for a blocking controller."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, SupportsFloat
from urllib.parse import quote

from plexrl.client.blocking.job_reader import JobReader
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import Transport
from plexrl.client.data.argument_checks import source_deployment
from plexrl.client.data.metric_rows import metrics_row, samples_body
from plexrl.client.data.results import Sample
from plexrl.client.trackers.feed import TrackerFeed
from plexrl.client.trackers.tracker import TrackedRun
from plexrl.wire.messages.run_views import LoggedRow, RunWarningView
from plexrl.wire.messages.views import JobView

LOG = logging.getLogger(__name__)


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
        self._warned: set[str] = set()
        """Codes of the warnings of the run that hold since an earlier row."""

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Add a row to the job's metrics, and to its trackers: `values` by name, for the
        controller's own `step`. NaN and infinite values are kept. A second row for the same step
        replaces nothing; a row with a lower step than the row before it is kept and marked
        (`rewinds_from`).

        Raises:
            InvalidRequestError: one of `values` is not a number.
        """
        self._control.check()
        row = metrics_row(step, values)
        logged: LoggedRow = self._transport.ask("POST", f"{self._path}/metrics", body=row)
        self._say(logged.get("warnings", []))
        if self._trackers is not None:
            self._trackers.wake()

    def log_samples(
        self,
        step: int,
        samples: Sequence[Sample],
        texts: Sequence[str],
        rewards: Sequence[SupportsFloat | None],
        prompts: Sequence[str] = (),
    ) -> None:
        """Keep samples of a step, for `plexrl samples`: of each of `samples` its text in `texts`,
        its reward in `rewards` (None or NaN: the reward failed), its prompt in `prompts`, its
        length and what ended it. Give all of a `step` in one call: it replaces those of an earlier
        call.

        Kept are the first 64 of a step, the first 4000 characters of each text, and the newest 1000
        steps within 64 MiB (`samples_job_bytes_max` of the cluster).

        Raises:
            InvalidRequestError: there are not as many texts, rewards or prompts as samples.
        """
        self._control.check()
        body = samples_body(step, samples, texts, rewards, prompts)
        self._transport.ask("POST", f"{self._path}/samples", body=body)

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

    def _say(self, warnings: Sequence[RunWarningView]) -> None:
        """Log the warnings of the run that are new since the last row."""
        for warning in warnings:
            if warning["code"] not in self._warned:
                LOG.warning("run warning (%s): %s", warning["code"], warning["text"])
        self._warned = {warning["code"] for warning in warnings}

    def _close_trackers(self, outcome: str | None) -> None:
        if self._trackers is not None:
            self._trackers.close(outcome)
