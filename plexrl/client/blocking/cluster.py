"""A connection to a cluster."""

import logging
import os
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from msgspec import UNSET, UnsetType

from plexrl.client.blocking.job import Job
from plexrl.client.calls import requests
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import Call, Transport
from plexrl.client.display.cluster_location import Place
from plexrl.client.display.handle_repr import handle_repr, without_credentials
from plexrl.client.display.leaving import tell_of_former
from plexrl.client.futures.checkpoints import list_call
from plexrl.errors import AuthenticationError, InvalidRequestError
from plexrl.wire.parameter_checks import check_identifier

if TYPE_CHECKING:
    from plexrl.cluster.embedded.start import EmbeddedCluster

LOG = logging.getLogger(__name__)

Plain = dict[str, Any]

PATIENCE_S = 120.0
"""How long a cluster may be silent before a request is given up."""


class Cluster:
    """A cluster, as one API key sees it. Safe for use by several threads."""

    def __init__(self, transport: Transport, local: "EmbeddedCluster | None" = None) -> None:
        """`local` is this process's share in a cluster that was found by its data directory."""
        self._transport = transport
        self._local = local
        self._former: list[Plain] | None = None
        self._has_told = False
        if local is not None:
            transport.place = Place(local.url, local.data_dir, local.is_embedded)

    def __repr__(self) -> str:
        marks = ["embedded"] if self._transport.place.is_embedded else []
        return handle_repr(self, without_credentials(self.url), *marks)

    @property
    def url(self) -> str:
        """The router's URL, or those of all routers with commas between."""
        return self._transport.url

    @property
    def api_key(self) -> str:
        """The key in use."""
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
    ) -> Job:
        """Submit a job; this process is its controller and keeps it alive by heartbeats.

        `name` is shown to people. `job_id` names the job for good; absent, it is the name and a
        few random characters. That of a live job of the same name takes that job over, as
        `attach_job` does. `tenant` is whose job it is, where the operator submits it for another.

        A job whose controller is silent for `controller_timeout_s` seconds is detached: what was
        submitted goes on. After `reattach_timeout_s` seconds more without one it is cancelled.

        A higher `priority` (-100 to 100, no higher than the tenant may) goes first, for GPUs and
        on them. The first `gang` deployments get GPUs all at once or not at all. `expected_s`
        seconds of length, where they are known, let the scheduler say when others get the job's
        GPUs.

        Raises:
            QuotaExceededError: the tenant has used up its GPU-seconds.
        """
        options = {
            "tenant": tenant,
            "controller_timeout_s": controller_timeout_s,
            "reattach_timeout_s": reattach_timeout_s,
            "priority": priority,
            "gang": gang,
            "expected_s": expected_s,
        }
        self._tell_of_former_jobs()
        call = requests.create_job(name, job_id, options)
        transport = self._transport.of(Controller())
        view = transport.request(call).json()
        LOG.info("job: %s", view["job"])
        return Job(
            transport,
            {**view, "controller_timeout_s": controller_timeout_s},
            heartbeat=True,
        )

    def attach_job(self, job: str, *, heartbeat: bool = True, keep_gradients: bool = False) -> Job:
        """Become the controller of the job with the id `job`; its deployments are as they were,
        under the same names. Without `heartbeat` the job is only looked at.

        A former controller that still lives gets `ControllerReplacedError` at its next call.
        Gradients that it left waiting for a step are dropped, because this controller would add its
        own to them; `keep_gradients` keeps them. `gradients_found` of the job says where there were
        some. A failure that the former controller took no note of is raised by the next call.
        """
        check_identifier("job", job)
        if not heartbeat:
            return Job(self._transport, self._get(f"/v1/jobs/{quote(job)}"), heartbeat=False)
        # It has a controller again: this one.
        self._former = self._former and [each for each in self._former if each["job"] != job]
        transport = self._transport.of(Controller())
        query = {"keep_gradients": keep_gradients}
        call = Call(method="POST", path=f"/v1/jobs/{quote(job)}/attach", query=query)
        return Job(transport, transport.request(call).json(), heartbeat=True)

    def jobs(self) -> list[Plain]:
        """All jobs the key may see."""
        return list(self._get("/v1/jobs")["jobs"])

    def read_checkpoints(self, job: str) -> Plain:
        """The checkpoints of the job with the id `job`. `checkpoints` is what `Job.checkpoints`
        answers; `failed` has the nodes that did not say what they write, and why."""
        return dict(self._transport.request(list_call(job)).json())

    def nodes(self) -> list[Plain]:
        """All nodes."""
        return list(self._get("/v1/nodes")["nodes"])

    def groups(self) -> list[Plain]:
        """All node groups (operator only)."""
        return list(self._get("/v1/groups")["groups"])

    def status(self) -> Plain:
        """The cluster in a few numbers."""
        return self._get("/v1/status")

    def operations(
        self,
        *,
        job: str | None = None,
        deployment: str | None = None,
        kind: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[Plain]:
        """Finished operations behind index `after`, oldest first, at most `limit`, the cluster's
        own included, with where their time went: `queue_s`, `switch_s`, `transfer_s`, `compute_s`.

        Where they are given, only those of a `job` (its id), of a `deployment` (`<job>/<name>`) and
        of a `kind` (`forward_backward`, `generate`, …).
        """
        wanted = {"job": job, "deployment": deployment, "kind": kind}
        query: Plain = {"after": after, "limit": limit}
        query |= {name: value for name, value in wanted.items() if value is not None}
        call = Call(method="GET", path="/v1/operations", query=query)
        return list(self._transport.request(call).json()["operations"])

    def usage(self) -> list[Plain]:
        """What was used, a row for each job and kind of operation: the tenant's own, or all for the
        operator."""
        return list(self._get("/v1/usage")["usage"])

    def sharing(self) -> list[Plain]:
        """What was saved by sharing GPUs, a row for each job that had some: the tenant's own, or
        all for the operator. `saved_gpu_seconds` = `isolated_gpu_seconds` (on groups of its own)
        less `held_gpu_seconds` (its part of shared ones); below 0 where sharing cost more."""
        return list(self._get("/v1/usage")["sharing"])

    def tenants(self) -> list[Plain]:
        """All tenants with their weights, their quotas and what they hold (operator only)."""
        return list(self._get("/v1/tenants")["tenants"])

    def create_tenant(self, name: str) -> str:
        """Create the tenant `name` (operator only); returns its API key, which is shown only
        now."""
        call = Call(method="POST", path="/v1/tenants", json={"name": name})
        return str(self._transport.request(call).json()["api_key"])

    def configure_tenant(
        self,
        name: str,
        *,
        weight: float | UnsetType = UNSET,
        jobs_max: int | UnsetType | None = UNSET,
        gpus_max: int | UnsetType | None = UNSET,
        gpu_seconds_max: float | UnsetType | None = UNSET,
        priority_max: int | UnsetType = UNSET,
        live_jobs_max: int | UnsetType | None = UNSET,
        checkpoints_max: int | UnsetType | None = UNSET,
        checkpoint_bytes_max: int | UnsetType | None = UNSET,
    ) -> Plain:
        """Set what the tenant `name` may have (operator only); returns the tenant as it is then.

        `weight` is its share of contended GPUs against other tenants' (1 at first), `priority_max`
        the highest `priority` of its jobs (0 at first). Quotas: `jobs_max` jobs with GPUs at a
        time and `live_jobs_max` that have not ended; `gpus_max` GPUs at a time; `gpu_seconds_max`
        GPU-seconds in all; `checkpoints_max` checkpoints, of `checkpoint_bytes_max` bytes together.

        What is not named stays as it is; None takes a quota away, or gives the cluster's own bound
        back where that has one: `live_jobs_max`, `checkpoints_max` and `checkpoint_bytes_max`.
        """
        named = {
            "weight": weight,
            "jobs_max": jobs_max,
            "gpus_max": gpus_max,
            "gpu_seconds_max": gpu_seconds_max,
            "priority_max": priority_max,
            "live_jobs_max": live_jobs_max,
            "checkpoints_max": checkpoints_max,
            "checkpoint_bytes_max": checkpoint_bytes_max,
        }
        settings = {key: value for key, value in named.items() if value is not UNSET}
        return dict(self._transport.request(requests.configure_tenant(name, settings)).json())

    def tenant_keys(self, name: str) -> list[Plain]:
        """The API keys of the tenant `name`, oldest first (operator only): each one's id, when it
        was made and when it was last used, to about a minute, since the scheduler was started;
        never the key."""
        return list(self._transport.request(requests.tenant_keys(name)).json()["keys"])

    def rotate_key(self, name: str) -> Plain:
        """Give the tenant `name` one more API key (operator only): `api_key`, which is shown only
        now, and its id `key`. The keys that the tenant had stay valid until they are revoked."""
        return dict(self._transport.request(requests.rotate_key(name)).json())

    def revoke_key(self, name: str, key: str) -> None:
        """Have an API key of the tenant `name` refused from now on (operator only); `key` is the
        key's id."""
        self._transport.request(requests.revoke_key(name, key))

    def drain(self, node: str) -> Plain:
        """Move all work off the node named `node`, each model between two of its operations, as
        soon as there is room elsewhere; nothing new comes to it (operator only)."""
        return dict(self._transport.request(requests.drain(node)).json())

    def undrain(self, node: str) -> Plain:
        """Have the drained node named `node` back in use (operator only)."""
        return dict(self._transport.request(requests.drain(node, back=True)).json())

    def close(self) -> None:
        """Close the connection. An embedded cluster ends with the last script that uses it."""
        self._transport.close()
        if self._local is not None:
            self._local.leave()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _note_former_jobs(self) -> None:
        """Note the jobs of a cluster that was just started: nobody controls them any more."""
        self._former = self.jobs()

    def _tell_of_former_jobs(self) -> None:
        """Before the first job on a cluster of this machine, whose GPUs they may hold."""
        if self._local is None or self._has_told:
            return
        self._has_told = True
        is_new = self._former is not None
        tell_of_former(
            self._transport, self.jobs() if self._former is None else self._former, is_new=is_new
        )

    def _get(self, path: str) -> Plain:
        return dict(self._transport.request(Call(method="GET", path=path)).json())


def connect(
    url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> Cluster:
    """Connect to a cluster: to `url`, or to the cluster of this machine that runs on `data_dir`.

    Without either, the environment says which: `PLEXRL_URL`, else `PLEXRL_DATA_DIR`; else the data
    directory is `~/.plexrl`. Where no cluster runs on the data directory, an embedded one is
    started. It ends with the last script that uses it; its checkpoints, jobs and logs stay in the
    data directory, and its next cluster, embedded or of `plexrl up`, goes on with them.

    Where several routers serve the cluster, `url` names them all, in a list or with commas between:
    one that does not answer is left for the next.

    The key is `api_key`, else `PLEXRL_API_KEY`, else, with a data directory, the operator's.

    A cluster that gives no answer for `timeout_s` seconds (120) is given up: the request raises
    `ConnectionLostError`.

    Raises:
        AuthenticationError: there is a URL and no key.
        InvalidRequestError: both `url` and `data_dir` are given.
        PermissionDeniedError, StorageError: the data directory cannot be used.
        UnavailableError: the embedded cluster did not start.
    """
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
            raise AuthenticationError(f"there is no API key for {url}: set PLEXRL_API_KEY")
        transport = Transport(url, api_key, timeout_s)
        LOG.info("cluster: %s", transport.place.url)
        return Cluster(transport)
    from plexrl.cluster.data_dir import DATA_DIR
    from plexrl.cluster.embedded.start import join_or_start

    if data_dir is None:
        data_dir = environment.get("PLEXRL_DATA_DIR") or DATA_DIR
    local = join_or_start(data_dir, timeout_s)
    cluster = Cluster(Transport(local.url, api_key or local.api_key, timeout_s), local)
    if local.is_started:
        cluster._note_former_jobs()
    return cluster
