"""Reads a job's state, logs and results, for a blocking controller."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from plexrl.client.calls.download import download
from plexrl.client.calls.transport import Query, Transport
from plexrl.client.data.metric_rows import read_rows
from plexrl.client.data.rollout_profile import RolloutProfile
from plexrl.client.futures.checkpoints import list_call
from plexrl.client.profiling.rollout_profile import make_profile
from plexrl.errors import InvalidRequestError, NotFoundError
from plexrl.limits import check_numbers
from plexrl.wire.messages.node_queries import (
    CheckpointFiles,
    CheckpointView,
    FileView,
    JobCheckpoints,
    JobLogs,
    LogView,
)
from plexrl.wire.messages.run_views import ForkView, SampledSteps, StepSamples
from plexrl.wire.messages.views import (
    DeploymentStatus,
    ExplainedJobView,
    JobView,
    LoggedOperationView,
    MetricsRow,
    Operations,
)

if TYPE_CHECKING:
    from plexrl.wire.messages.rollout_views import MeasuredRollout

LOG = logging.getLogger(__name__)
SettingT = TypeVar("SettingT", str, float, bool)


class JobReader:
    """Reads the state and the records of a job."""

    def __init__(self, transport: Transport, view: JobView) -> None:
        self._transport = transport
        self.job: str = view["job"]
        self.name: str = view["name"]
        self.place = transport.location
        """How another process finds the job's cluster."""
        self.fork: ForkView | None = view.get("fork")
        """Where the job comes from; None: it is no fork."""
        self._path = f"/v1/jobs/{quote(self.job)}"

    def setting(self, name: str, default: SettingT) -> SettingT:
        """The value of the fork's setting `name`; in a job that is no fork, or has no such setting,
        `default`.

        Raises:
            InvalidRequestError: the setting is of another type than `default`.
        """
        if self.fork is None or name not in self.fork["settings"]:
            return default
        value = self.fork["settings"][name]
        kind = type(default)
        if isinstance(value, kind) and isinstance(value, bool) == isinstance(default, bool):
            return value
        if kind is int and isinstance(value, float) and value.is_integer():
            # JSON and `plexrl fork --set` have one kind of numbers.
            return kind(value)
        raise InvalidRequestError(
            f"setting {name!r} is {value!r}, and its default {default!r} is a "
            f"{type(default).__name__}: fork with a value of that type"
        )

    def metrics(self, *, after: int = 0) -> list[MetricsRow]:
        """Rows of the job's metrics with `index` above `after`, oldest first; each has `index`,
        `step`, `time` (seconds since the epoch) and `values`."""
        check_numbers("page", {"after": after})
        found: list[MetricsRow] = []
        while True:
            rows = self._transport.ask("GET", f"{self._path}/metrics", query={"after": after})[
                "rows"
            ]
            if not rows:
                return found
            found += read_rows(rows)
            after = rows[-1]["index"]

    def samples(self, step: int | None = None) -> StepSamples:
        """The samples that the controller logged for a `step`, by default the newest.

        Raises:
            NotFoundError: there are none.
        """
        if step is None:
            steps = self.sampled_steps()
            if not steps:
                raise NotFoundError(
                    f"job {self.job!r} has no samples: its controller adds them by job.log_samples"
                )
            step = steps[-1]
        check_numbers("metrics", {"step": step})
        found: StepSamples = self._transport.ask("GET", f"{self._path}/samples/{step}")
        return found

    def sampled_steps(self) -> list[int]:
        """The steps that have samples, ascending."""
        found: SampledSteps = self._transport.ask("GET", f"{self._path}/samples")
        return found["steps"]

    def logs(self, deployment: str | None = None, *, lines: int = 100) -> list[LogView]:
        """The last `lines` of each worker's log, for one `deployment` (`<job>/<name>`, or the name)
        or for all. A warning is logged for every node that returned none."""
        found = self.read_logs(deployment, lines=lines)
        for each in found["failed"]:
            LOG.warning("no logs from node %s: %s", each["node"], each["reason"])
        return found["logs"]

    def read_logs(self, deployment: str | None = None, *, lines: int = 100) -> JobLogs:
        """`logs`: the last `lines` of each worker's log, for one `deployment` or for all; `failed`:
        the nodes that returned none, and why."""
        check_numbers("page", {"lines": lines})
        query: dict[str, str | float | bool | None] = {"lines": lines}
        if deployment is not None:
            query["deployment"] = deployment
        found: JobLogs = self._transport.ask("GET", f"{self._path}/logs", query=query)
        return found

    def checkpoints(self) -> list[CheckpointView]:
        """The job's checkpoints by name, with `state`, `step`, bytes written and `path`, which may
        be a URL."""
        found: JobCheckpoints = self._transport.request(list_call(self.job)).json()
        return found["checkpoints"]

    def checkpoint_files(self, name: str) -> list[FileView]:
        """The files of the complete checkpoint `name`. Raises `CheckpointNotFoundError`."""
        path = f"{self._path}/checkpoints/{quote(name, safe='')}/files"
        found: CheckpointFiles = self._transport.ask("GET", path)
        return found["files"]

    def download_checkpoint(self, name: str, folder: str | os.PathLike[str]) -> Path:
        """Write the files of the complete checkpoint `name` into a new folder; `transformers` can
        load it. Returns the folder, which exists only if all of it was written.

        Raises:
            CheckpointNotFoundError: the job has no complete checkpoint of that name.
            ConflictError: the checkpoint was replaced meanwhile.
            InvalidRequestError: the folder exists.
            StorageError: the folder cannot be written.
        """
        return download(self._transport, f"{self._path}/checkpoints/{quote(name, safe='')}", folder)

    def explain(self) -> ExplainedJobView:
        """Why the job waits or runs: a summary; its unfinished operations with reason, holder and
        estimated start; its deployments with how they got their group or why they have none; and
        as `holders` the jobs that hold the GPUs it waits for, those without a controller first; and
        as `rollouts` what its asynchronous rollouts wait for, such as rewards."""
        view: ExplainedJobView = self._transport.ask("GET", f"{self._path}/explain")
        return view

    def operations(self, *, after: int = 0, limit: int = 1000) -> list[LoggedOperationView]:
        """Finished operations of this job after index `after`, oldest first, at most `limit`; as
        `Cluster.operations`."""
        check_numbers("page", {"after": after, "limit": limit})
        query: Query = {"job": self.job, "after": after, "limit": limit}
        found: Operations = self._transport.ask("GET", "/v1/operations", query=query)
        return found["operations"]

    def rollout_profile(self, rollout: str) -> RolloutProfile:
        """The profile of the asynchronous rollout of that name, for `plexrl plan-rollout`: its
        latest response lengths, and what decoding, training and new weights take.

        Raises:
            ConflictError: the rollout has not trained two steps.
        """
        path = f"{self._path}/rollouts/{quote(rollout)}/profile"
        measured: MeasuredRollout = self._transport.ask("GET", path)
        names = [measured["source"], *measured["instances"]]
        deployments = {name: self.deployment_status(name) for name in names}
        operations: list[LoggedOperationView] = []
        while page := self.operations(after=operations[-1]["index"] if operations else 0):
            operations += page
        return make_profile(measured, deployments, operations)

    def status(self) -> JobView:
        """The job as the scheduler sees it: `state`, `reason`, its deployments and times."""
        view: JobView = self._transport.ask("GET", self._path)
        return view

    def deployment_status(self, deployment: str) -> DeploymentStatus:
        """As `Deployment.status`, for the `deployment` of that name (`<job>/<name>`, or the name
        alone)."""
        name = quote(deployment.rpartition("/")[2])
        view: DeploymentStatus = self._transport.ask("GET", f"{self._path}/deployments/{name}")
        return view
