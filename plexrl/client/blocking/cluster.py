"""A connection to a cluster."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import quote

from plexrl.client.blocking.administration import Administration
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.job_exit import warn_of_former_jobs
from plexrl.client.calls.routes import check_router
from plexrl.client.calls.script_runs import ScriptRuns
from plexrl.client.calls.transport import Call, Transport
from plexrl.client.display.cluster_location import ClusterLocation
from plexrl.client.display.first_contact import FirstContact
from plexrl.client.display.handle_repr import handle_repr, without_credentials
from plexrl.client.futures.forks import Fork, fork_of, plain_fork
from plexrl.client.profiling.declared_job import DeclaringTransport, declaring_for
from plexrl.client.profiling.job_quotes import JobQuotes, figures_of
from plexrl.client.trackers.feed import ChosenTrackers
from plexrl.errors import AuthenticationError, InvalidRequestError, StorageError
from plexrl.limits import check_numbers
from plexrl.wire.messages.cluster_views import (
    Groups,
    GroupView,
    Nodes,
    NodeView,
    SharingView,
    StatusView,
    UsageReport,
    UsageView,
)
from plexrl.wire.messages.node_queries import JobCheckpoints
from plexrl.wire.messages.overview_views import ClusterOverview, QueueView, QuoteFiguresView
from plexrl.wire.messages.rollout_views import Rollouts, RolloutStatus
from plexrl.wire.messages.run_views import QuotedJobView
from plexrl.wire.messages.views import Jobs, JobView, LoggedOperationView, Operations
from plexrl.wire.parameter_checks import check_identifier

if TYPE_CHECKING:
    # Most commands of the command line read no job, and its modules take long to import.
    from plexrl.client.blocking.job import Job
    from plexrl.cluster.embedded.start import EmbeddedCluster

LOG = logging.getLogger(__name__)

SILENCE_S_MAX = 120.0
"""Default time without a response after which a request fails."""
FIRST_CALL = Call(method="GET", path="/v1/health", read_timeout_s=10.0)
"""The first request of a connection, to learn whether a router replies. It needs no key."""


class Cluster(Administration):
    """A cluster as one API key sees it. Thread-safe."""

    def __init__(self, transport: Transport, local: "EmbeddedCluster | None" = None) -> None:
        """`local` is this process's use of a cluster that was found by its data directory."""
        self._transport = transport
        self._local = local
        self._former_jobs: list[JobView] | None = None
        self._has_warned = False
        self._job_id = os.environ.get("PLEXRL_JOB_ID") or None
        self._fork = fork_of(os.environ)
        if local is not None:
            transport.location = ClusterLocation(local.url, local.data_dir, local.is_embedded)

    def __repr__(self) -> str:
        marks = ["embedded"] if self._transport.location.is_embedded else []
        return handle_repr(self, without_credentials(self.url), *marks)

    @property
    def url(self) -> str:
        """URL of the router, or URLs of all routers separated by commas."""
        return self._transport.url

    @property
    def ca(self) -> str | os.PathLike[str] | None:
        """File of the authorities that the cluster's certificate must be of; None: public ones."""
        return self._transport.ca

    @property
    def api_key(self) -> str:
        """The API key in use."""
        return self._transport.api_key

    def create_job(
        self,
        name: str,
        *,
        tenant: str | None = None,
        job_id: str | None = None,
        controller_timeout_s: float = 60.0,
        reattach_timeout_s: float = 300.0,
        priority: int = 0,
        gang: int = 0,
        expected_s: float = 0.0,
        slo: float | None = None,
        trackers: Sequence[str] | None = None,
        run_warnings: bool | Mapping[str, float] = True,
        quote: QuoteFiguresView | None = None,
        dry_run: bool = False,
        fork: Fork | None = None,
    ) -> "Job":
        """Submit a job. This process becomes its controller and sends heartbeats.

        `name` is shown to people. `job_id` is the job's unique id; absent, the first job of this
        connection has the id in `PLEXRL_JOB_ID`, if that is set; any other id is the name and a few
        random characters. The id of a live job with the same name takes over that job, as
        `attach_job` does. `tenant` is the job's owner, if the operator submits for another tenant.

        If the controller is silent for `controller_timeout_s` seconds, the job is detached;
        submitted operations continue. After `reattach_timeout_s` more seconds without a controller
        the job is cancelled.

        A job of higher `priority` (-100 to 100, at most the tenant's limit) gets GPUs first and
        runs first. The first `gang` deployments get GPUs all at once or not at all. `expected_s` is
        the job's expected length in seconds on GPUs of its own; the scheduler uses it to estimate
        when others get the GPUs.

        `slo` is the greatest part waiting / (waiting + running) of its time that the job accepts to
        wait for others on its GPUs, at least 0 and below 1: it joins no group in which it would
        wait longer. 0: it shares GPUs with nobody. None: its tenant's, or else the cluster's.

        `trackers` are the experiment trackers that get a copy of the job's metrics: `wandb`,
        `tensorboard`, `mlflow`, `trackio`. Absent: those in `PLEXRL_TRACKERS`, separated by commas.
        Their files are in `PLEXRL_TRACKER_DIR`, else in `runs`.

        The cluster warns of a sick run, such as one whose samples end by length. `run_warnings`
        gives other limits by name, `{"ended_by_length": 0.9}`, or switches it off (False).

        With `dry_run` nothing is submitted: the job takes deployments, which are not created, and
        `Job.quote` says when it would start and end, what it would cost, and whom it would delay.
        `quote` is such an answer's `asked`, or one of its `alternatives`: `Cluster.usage` and the
        job's page then show it beside the bill.

        A `fork` begins with what another job had after a step: its train deployments, which have
        the names and models of that job's, load its checkpoints, without a copy, and its rollouts
        get their weights. `Job.resume_step` says where to go on, `Job.setting` what differs.
        Absent: as `plexrl fork` says, if that started this script.

        Raises:
            InvalidRequestError: a tracker is unknown, or its library is not installed.
            QuotaExceededError: the tenant has used all of its GPU-seconds.
        """
        from plexrl.client.blocking.job import Job
        from plexrl.client.calls import requests

        options: dict[str, object] = {
            "tenant": tenant,
            "controller_timeout_s": controller_timeout_s,
            "reattach_timeout_s": reattach_timeout_s,
            "priority": priority,
            "gang": gang,
            "expected_s": expected_s,
            "slo": slo,
            "run_warnings": run_warnings,
        }
        if quote is not None:
            options["quote"] = figures_of(quote)
        if (origin := plain_fork(fork or self._take_fork())) is not None:
            options["fork"] = origin
        chosen = ChosenTrackers(trackers, os.environ)
        if dry_run or isinstance(self._transport, DeclaringTransport):
            declaring = DeclaringTransport.over(self._transport)
            call = requests.create_job(name, job_id, options)
            job = Job(declaring, declaring.request(call).json(), heartbeat=False)
            job.left.set()
            return job
        self._warn_of_former_jobs()
        call = requests.create_job(name, job_id or self._take_job_id(), options)
        transport = self._transport.for_controller(Controller())
        view: JobView = transport.request(call).json()
        LOG.info("job: %s", view["job"])
        return _followed(Job(transport, view, heartbeat=True), chosen)

    def attach_job(
        self,
        job: str,
        *,
        heartbeat: bool = True,
        keep_gradients: bool = False,
        trackers: Sequence[str] | None = None,
    ) -> "Job":
        """Become the controller of the job with the id `job`. Its deployments keep their names and
        state. With `heartbeat=False` the job is only read, without control.

        An earlier controller that is alive gets `ControllerReplacedError` at its next call.
        Gradients that it accumulated without a step are dropped, so that they do not mix with this
        controller's; `keep_gradients` keeps them. `gradients_found` of the job lists the
        deployments that had some. A failure that the earlier controller did not acknowledge is
        raised by the next call.

        `trackers` are as in `create_job`. Absent, and without `PLEXRL_TRACKERS`: those that an
        earlier controller of the job used in the same folder. They continue its runs.

        Raises:
            InvalidRequestError: a tracker is unknown, or its library is not installed.
        """
        from plexrl.client.blocking.job import Job

        check_identifier("job", job)
        chosen = ChosenTrackers(trackers, os.environ)
        if not heartbeat:
            seen: JobView = self._transport.ask("GET", f"/v1/jobs/{quote(job)}")
            return Job(self._transport, seen, heartbeat=False)
        # This process controls the job now, so no warning is due.
        self._former_jobs = self._former_jobs and [
            former_job for former_job in self._former_jobs if former_job["job"] != job
        ]
        transport = self._transport.for_controller(Controller())
        query = {"keep_gradients": keep_gradients}
        view: JobView = transport.ask("POST", f"/v1/jobs/{quote(job)}/attach", query=query)
        return _followed(Job(transport, view, heartbeat=True), chosen)

    @property
    def quotes(self) -> JobQuotes:
        """Quotes of jobs like others; of a declared one: `create_job(dry_run=True)`."""
        return JobQuotes(self._transport)

    @property
    def runs(self) -> ScriptRuns:
        """Scripts that run on the cluster."""
        return ScriptRuns(self._transport)

    def jobs(self) -> list[JobView]:
        """All jobs the key may see."""
        found: Jobs = self._transport.ask("GET", "/v1/jobs")
        return found["jobs"]

    def read_checkpoints(self, job: str) -> JobCheckpoints:
        """The checkpoints of the job with the id `job`. `checkpoints` is the list that
        `Job.checkpoints` returns; `failed` lists the nodes that did not reply, and why."""
        from plexrl.client.futures.checkpoints import list_call

        found: JobCheckpoints = self._transport.request(list_call(job)).json()
        return found

    def nodes(self) -> list[NodeView]:
        """All nodes."""
        found: Nodes = self._transport.ask("GET", "/v1/nodes")
        return found["nodes"]

    def groups(self) -> list[GroupView]:
        """All node groups (operator only)."""
        found: Groups = self._transport.ask("GET", "/v1/groups")
        return found["groups"]

    def rollouts(self, job: str | None = None) -> list[RolloutStatus]:
        """Rollouts of the job with the id `job`, or of all jobs that the key may see."""
        path = "/v1/rollouts" if job is None else f"/v1/jobs/{quote(job)}/rollouts"
        found: Rollouts = self._transport.ask("GET", path)
        return found["rollouts"]

    def status(self) -> StatusView:
        """The cluster in a few numbers, and the conditions that delay work now."""
        view: StatusView = self._transport.ask("GET", "/v1/status")
        return view

    def overview(self) -> ClusterOverview:
        """GPUs by state, what waits, and the conditions that delay work now."""
        view: ClusterOverview = self._transport.ask("GET", "/v1/overview")
        return view

    def queue(self, which: str = "gpus", *, limit: int = 50) -> QueueView:
        """The first `limit` of what waits: `which` is `gpus`, `turns` or `impossible`."""
        check_numbers("queue", {"limit": limit})
        query = {"which": which, "limit": str(limit)}
        view: QueueView = self._transport.ask("GET", "/v1/queue", query=query)
        return view

    def operations(
        self,
        *,
        job: str | None = None,
        deployment: str | None = None,
        kind: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[LoggedOperationView]:
        """Finished operations after index `after`, oldest first, at most `limit`, the cluster's own
        too. Each has the time of its phases: `queue_s`, `switch_s`, `transfer_s`, `compute_s`.

        Given a `job` (its id), a `deployment` (`<job>/<name>`) or a `kind` (`forward_backward`,
        `generate`, …), only operations of these.
        """
        wanted = {"job": job, "deployment": deployment, "kind": kind}
        check_numbers("page", {"after": after, "limit": limit})
        query: dict[str, str | float] = {"after": after, "limit": limit}
        query |= {name: value for name, value in wanted.items() if value is not None}
        found: Operations = self._transport.ask("GET", "/v1/operations", query=query)
        return found["operations"]

    def usage(self) -> list[UsageView]:
        """Usage by job and kind of operation: the tenant's own; for the operator all tenants'."""
        view: UsageReport = self._transport.ask("GET", "/v1/usage")
        return view["usage"]

    def quoted(self) -> list[QuotedJobView]:
        """What jobs were quoted beside what came of them, oldest first: the tenant's own; for the
        operator all. Only jobs that were created with a `quote`."""
        view: UsageReport = self._transport.ask("GET", "/v1/usage")
        return view["quoted"]

    def sharing(self) -> list[SharingView]:
        """Savings by sharing GPUs, one row for each job with savings: the tenant's own; for the
        operator all. `saved_gpu_seconds` is `isolated_gpu_seconds` (on groups of its own) less
        `held_gpu_seconds` (its part of shared groups); negative if sharing cost more."""
        found: UsageReport = self._transport.ask("GET", "/v1/usage")
        return found["sharing"]

    def close(self) -> None:
        """Close the connection. An embedded cluster ends with the last script that uses it."""
        self._transport.close()
        if self._local is not None:
            self._local.leave()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take_fork(self) -> Fork | None:
        """The fork that the first job is, if `plexrl fork` started this script."""
        fork, self._fork = self._fork, None
        return fork

    def _take_job_id(self) -> str | None:
        """The id of the first job, if whoever started this script has chosen one."""
        job_id, self._job_id = self._job_id, None
        return job_id

    def _record_former_jobs(self) -> None:
        """Record the jobs of a cluster that was just started: none has a controller."""
        self._former_jobs = self.jobs()

    def _warn_of_former_jobs(self) -> None:
        """Warn, before the first job on a local cluster, of jobs that may hold its GPUs."""
        if self._local is None or self._has_warned:
            return
        self._has_warned = True
        is_new = self._former_jobs is not None
        jobs = self.jobs() if self._former_jobs is None else self._former_jobs
        warn_of_former_jobs(self._transport, jobs, is_new=is_new)


def connect(
    url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout_s: float = SILENCE_S_MAX,
) -> Cluster:
    """Connect to the cluster at `url`, or to this machine's cluster on `data_dir`.

    Without either, the environment decides: `PLEXRL_URL`, else `PLEXRL_DATA_DIR`; else the data
    directory is `~/.plexrl`. If no cluster runs on the data directory, an embedded cluster is
    started. It ends with the last script that uses it; its checkpoints, jobs and logs stay in the
    data directory, and the next cluster on it, embedded or by `plexrl up`, continues with them.

    If several routers serve the cluster, `url` names them all, as a list or separated by commas;
    after a router fails, the next one is used.

    The certificate at an `https://` URL must be of an authority in the PEM file `ca`, else
    `PLEXRL_CA_FILE`, else of a public one.

    The key is `api_key`, else `PLEXRL_API_KEY`, else, with a data directory, the operator's.

    A request fails with `ConnectionLostError` after `timeout_s` seconds (120) without a response.
    So does `connect`, which asks the router at `url` at once, and prints on standard error what it
    waits for.

    Raises:
        AuthenticationError: a URL without a key, or a certificate that is not accepted.
        ConnectionLostError: no router replied.
        InvalidRequestError: both `url` and `data_dir` are given, `ca` cannot be used, or another
            web server replied.
        PermissionDeniedError, StorageError: the data directory cannot be used.
        UnavailableError: the embedded cluster did not start.
    """
    cluster = open_cluster(url, api_key, data_dir=data_dir, ca=ca, timeout_s=timeout_s)
    if cluster._local is not None:
        return cluster
    try:
        with FirstContact(cluster.url, timeout_s):
            check_router(cluster._transport.request(FIRST_CALL))
    except BaseException:
        cluster.close()
        raise
    return cluster


def open_cluster(
    url: str | Sequence[str] | None,
    api_key: str | None,
    *,
    data_dir: str | os.PathLike[str] | None,
    ca: str | os.PathLike[str] | None,
    timeout_s: float,
) -> Cluster:
    """As `connect`, without a request to the router at a URL."""
    check_numbers("connection", {"timeout_s": timeout_s})
    if url is not None and data_dir is not None:
        raise InvalidRequestError(
            f"url={str(url)!r} and data_dir={str(data_dir)!r} name two clusters: give one of them"
        )
    environment = os.environ
    if url is None and data_dir is None:
        url = environment.get("PLEXRL_URL") or None
    api_key = api_key or environment.get("PLEXRL_API_KEY")
    if url is not None:
        if not api_key:
            raise AuthenticationError("no API key for the URL was given: set PLEXRL_API_KEY")
        transport = Transport(url, api_key, timeout_s, ca or environment.get("PLEXRL_CA_FILE"))
        LOG.info("cluster: %s", transport.location.url)
        return Cluster(declaring_for(transport, environment))
    from plexrl.cluster.data_dir.folder import DATA_DIR
    from plexrl.cluster.embedded.start import join_or_start

    if data_dir is None:
        data_dir = environment.get("PLEXRL_DATA_DIR") or DATA_DIR
    local = join_or_start(data_dir, timeout_s)
    transport = Transport(local.url, api_key or local.api_key, timeout_s, ca or local.ca)
    cluster = Cluster(declaring_for(transport, environment), local)
    if local.is_started:
        cluster._record_former_jobs()
    return cluster


def _followed(job: "Job", chosen: ChosenTrackers) -> "Job":
    """The job, whose metrics are copied to trackers. It exists, and its caller needs it, also if
    they cannot be copied."""
    try:
        job._follow(chosen.names_for(job.job), chosen.folder)
    except StorageError as error:
        LOG.warning("the metrics of %s are copied to no tracker: %s", job.job, error)
    return job
