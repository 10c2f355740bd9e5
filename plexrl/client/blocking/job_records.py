"""Adds to the records of a job, for a blocking controller."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, SupportsFloat
from urllib.parse import quote

from plexrl.client.blocking.deployment import Deployment
from plexrl.client.blocking.job_reader import JobReader
from plexrl.client.calls import requests
from plexrl.client.calls.controller import Controller, submit
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import Transport
from plexrl.client.data.argument_checks import source_deployment
from plexrl.client.data.metric_rows import metrics_row, samples_body
from plexrl.client.data.results import Sample
from plexrl.client.futures.forks import checkpoint_of, named, shared_name
from plexrl.client.futures.futures import Future
from plexrl.client.trackers.feed import TrackerFeed
from plexrl.client.trackers.tracker import TrackedRun
from plexrl.errors import CheckpointNotFoundError, InvalidRequestError
from plexrl.limits import check_numbers
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
        self._loads: dict[str, Future[object]] = {}
        """By trainer: the load of the parent's state, in a fork."""
        self._forked: list[str] = []
        """Trainers of a fork, which have the parent's state or load it."""

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
        if (load := self._loads.pop(source_deployment(source), None)) is not None:
            load.result()
        deployment = source_deployment(source).rpartition("/")[2]
        done = int(self.deployment_status(deployment)["trainer_step"])
        begun = 0 if self.fork is None else self.fork["step"]
        logged = max((row["step"] for row in self.metrics()), default=begun)
        if logged < done:
            self.log(done, {"resumed/steps_without_row": done - logged})
        return done

    def rewind(self, step: int) -> None:
        """Go back to the state after optimizer step `step`, of which each trainer of the job has a
        checkpoint (`checkpoint_every`), and give it to the rollouts. `resume_step` is `step` then.

        Raises:
            CheckpointNotFoundError: a trainer has no checkpoint of that step; nothing changed, or
                the same call completes it.
            InvalidRequestError: the job has no trainer.
        """
        check_numbers("fork", {"step": step})
        found = self._transport.ask("GET", self._path)["deployments"]
        trainers = [each["deployment"] for each in found if each["kind"] == "train"]
        if not trainers:
            raise InvalidRequestError(f"job {self.job!r} has no train deployment to rewind")
        known = {each["name"] for each in self.checkpoints()}
        self._check_kept([checkpoint_of(name, step) for name in trainers], known)
        waiting = [
            self._sent(
                requests.load_checkpoint(name, checkpoint_of(name, step), None, optimizer=True)
            )
            for name in trainers
        ]
        if len(trainers) == 1:
            rollouts = [each["deployment"] for each in found if each["kind"] == "rollout"]
            waiting += [self._sent(self._sync(name, trainers[0])) for name in rollouts]
        for future in waiting:
            future.result()

    def _check_kept(self, wanted: Sequence[str], known: Collection[str]) -> None:
        for name in wanted:
            if name not in known:
                kept = ", ".join(sorted(known)) or "none"
                raise CheckpointNotFoundError(
                    f"job {self.job!r} has no checkpoint {name!r}, it has {kept}: create its "
                    "trainer with checkpoint_every, or name a step that is kept"
                )

    def _begin_fork(self, deployment: str, kind: str) -> None:
        """Give a new deployment of a fork the parent's state; a repeated call changes nothing. A
        rollout gets the weights of the trainer, if there is one."""
        fork, name = self.fork, deployment.rpartition("/")[2]
        if fork is None or fork["step"] == 0:
            return
        if kind == "train" and deployment not in self._forked:
            self._forked.append(deployment)
        if kind == "rollout" and len(self._forked) == 1:
            (trainer,) = self._forked
            self._sent(named(self._sync(deployment, trainer), self.job, f"fork-{name}"))
        elif kind == "train" and self.deployment_status(name)["trainer_step"] < fork["step"]:
            shared = shared_name(fork, deployment)
            path = f"/v1/jobs/{quote(fork['job'])}/checkpoints"
            parent = checkpoint_of(deployment, fork["step"])
            body = {"job": self.job, "name": shared}
            self._transport.ask("POST", f"{path}/{quote(parent)}/share", body=body)
            load = requests.load_checkpoint(deployment, shared, None, optimizer=True)
            self._loads[deployment] = self._sent(named(load, self.job, f"fork-{name}"))

    def _sync(self, deployment: str, trainer: str) -> Submission:
        source = Deployment(self._transport, trainer)
        return requests.sync_weights(deployment, source, delta="auto", digest=False)

    def _sent(self, submission: Submission) -> Future[object]:
        steps = submit(submission, None, self._transport.controller)
        return Future(self._transport, self._transport.run(steps), submission.decoder)

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
