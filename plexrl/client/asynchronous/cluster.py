"""A cluster, for `async` controllers.

The `async` classes have the methods of the blocking ones, as coroutines. Operations of one
deployment are submitted in the order of the calls; thousands of results can be awaited at a time.
Rare requests (jobs, deployments, logs) run the blocking client in a thread.
"""

import asyncio
import os
from collections.abc import Sequence

from plexrl.client.asynchronous.from_blocking import in_thread, wrapped_in_thread
from plexrl.client.asynchronous.job import AsyncJob
from plexrl.client.blocking.administration import AccessControl
from plexrl.client.blocking.cluster import (
    FIRST_CALL,
    SILENCE_S_MAX,
    Cluster,
    open_cluster,
)
from plexrl.client.calls.routes import check_router
from plexrl.client.calls.script_runs import ScriptRuns
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.display.first_contact import FirstContact
from plexrl.client.profiling.job_quotes import JobQuotes


class AsyncAccessControl:
    """Who may do what. The methods are those of `AccessControl`."""

    def __init__(self, access: AccessControl, transport: AsyncTransport) -> None:
        self._sync = access
        self._transport = transport

    whoami = in_thread(AccessControl.whoami)
    tenant = in_thread(AccessControl.tenant)
    keys = in_thread(AccessControl.keys)
    create_key = in_thread(AccessControl.create_key)
    revoke_key = in_thread(AccessControl.revoke_key)
    audit = in_thread(AccessControl.audit)


class AsyncCluster:
    """A cluster as one API key sees it, for one event loop. The methods are those of `Cluster`."""

    def __init__(self, cluster: Cluster, transport: AsyncTransport) -> None:
        self._sync = cluster
        self._transport = transport

    def __repr__(self) -> str:
        return repr(self._sync).replace("<Cluster", "<AsyncCluster", 1)

    @property
    def url(self) -> str:
        """As `Cluster.url`."""
        return self._sync.url

    @property
    def access(self) -> AsyncAccessControl:
        """As `Cluster.access`."""
        return AsyncAccessControl(self._sync.access, self._transport)

    @property
    def ca(self) -> str | os.PathLike[str] | None:
        """As `Cluster.ca`."""
        return self._sync.ca

    @property
    def api_key(self) -> str:
        """As `Cluster.api_key`."""
        return self._sync.api_key

    @property
    def runs(self) -> ScriptRuns:
        """As `Cluster.runs`; its methods block."""
        return self._sync.runs

    @property
    def quotes(self) -> JobQuotes:
        """As `Cluster.quotes`; its methods block."""
        return self._sync.quotes

    create_job = wrapped_in_thread(Cluster.create_job, AsyncJob)
    attach_job = wrapped_in_thread(Cluster.attach_job, AsyncJob)
    jobs = in_thread(Cluster.jobs)
    read_checkpoints = in_thread(Cluster.read_checkpoints)
    nodes = in_thread(Cluster.nodes)
    rollouts = in_thread(Cluster.rollouts)
    groups = in_thread(Cluster.groups)
    status = in_thread(Cluster.status)
    overview = in_thread(Cluster.overview)
    queue = in_thread(Cluster.queue)
    operations = in_thread(Cluster.operations)
    usage = in_thread(Cluster.usage)
    quoted = in_thread(Cluster.quoted)
    sharing = in_thread(Cluster.sharing)
    tenants = in_thread(Cluster.tenants)
    create_tenant = in_thread(Cluster.create_tenant)
    configure_tenant = in_thread(Cluster.configure_tenant)
    tenant_keys = in_thread(Cluster.tenant_keys)
    rotate_key = in_thread(Cluster.rotate_key)
    revoke_key = in_thread(Cluster.revoke_key)
    drain = in_thread(Cluster.drain)
    undrain = in_thread(Cluster.undrain)
    remove_node = in_thread(Cluster.remove_node)

    async def close(self) -> None:
        """As `Cluster.close`."""
        if self._transport.is_inherited:
            return
        await self._transport.close()
        await asyncio.to_thread(self._sync.close)

    async def __aenter__(self) -> "AsyncCluster":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def connect_async(
    url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    timeout_s: float = SILENCE_S_MAX,
) -> AsyncCluster:
    """As `connect`, for `async` controllers."""
    cluster = await asyncio.to_thread(
        open_cluster, url, api_key, data_dir=data_dir, ca=ca, timeout_s=timeout_s
    )
    transport = AsyncTransport(cluster.url, cluster.api_key, timeout_s, cluster.ca)
    connected = AsyncCluster(cluster, transport)
    if cluster._local is not None:
        return connected
    try:
        with FirstContact(cluster.url, timeout_s):
            # On the event loop, where a cancellation ends it at once.
            check_router(await transport.request(FIRST_CALL))
    except BaseException:
        await connected.close()
        raise
    return connected
