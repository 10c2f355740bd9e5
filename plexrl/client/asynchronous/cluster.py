"""The SDK for `async` controllers: the same surface, awaited.

Submissions of one deployment leave in the order of the calls; results are awaited on the event
loop, thousands at a time. What is rare (jobs, deployments, logs) runs the blocking client in a
thread.
"""

import asyncio
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from msgspec import UNSET, UnsetType

from plexrl.client.asynchronous.job import AsyncJob
from plexrl.client.blocking.cluster import PATIENCE_S, Cluster, connect
from plexrl.client.calls.transport import AsyncTransport

Plain = dict[str, Any]


class AsyncCluster:
    """A cluster, as one API key sees it; for one event loop."""

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
    def api_key(self) -> str:
        """As `Cluster.api_key`."""
        return self._sync.api_key

    async def create_job(
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
    ) -> AsyncJob:
        """As `Cluster.create_job`."""
        made = await asyncio.to_thread(
            self._sync.create_job,
            name,
            tenant=tenant,
            job_id=job_id,
            controller_timeout_s=controller_timeout_s,
            reattach_timeout_s=reattach_timeout_s,
            priority=priority,
            gang=gang,
            expected_s=expected_s,
        )
        return AsyncJob(self._transport, made)

    async def attach_job(
        self, job: str, *, heartbeat: bool = True, keep_gradients: bool = False
    ) -> AsyncJob:
        """As `Cluster.attach_job`."""
        made = await asyncio.to_thread(
            self._sync.attach_job, job, heartbeat=heartbeat, keep_gradients=keep_gradients
        )
        return AsyncJob(self._transport, made)

    async def jobs(self) -> list[Plain]:
        """As `Cluster.jobs`."""
        return await asyncio.to_thread(self._sync.jobs)

    async def read_checkpoints(self, job: str) -> Plain:
        """As `Cluster.read_checkpoints`."""
        return await asyncio.to_thread(self._sync.read_checkpoints, job)

    async def nodes(self) -> list[Plain]:
        """As `Cluster.nodes`."""
        return await asyncio.to_thread(self._sync.nodes)

    async def groups(self) -> list[Plain]:
        """As `Cluster.groups`."""
        return await asyncio.to_thread(self._sync.groups)

    async def status(self) -> Plain:
        """As `Cluster.status`."""
        return await asyncio.to_thread(self._sync.status)

    async def operations(
        self,
        *,
        job: str | None = None,
        deployment: str | None = None,
        kind: str | None = None,
        after: int = 0,
        limit: int = 1000,
    ) -> list[Plain]:
        """As `Cluster.operations`."""
        return await asyncio.to_thread(
            self._sync.operations,
            job=job,
            deployment=deployment,
            kind=kind,
            after=after,
            limit=limit,
        )

    async def usage(self) -> list[Plain]:
        """As `Cluster.usage`."""
        return await asyncio.to_thread(self._sync.usage)

    async def sharing(self) -> list[Plain]:
        """As `Cluster.sharing`."""
        return await asyncio.to_thread(self._sync.sharing)

    async def tenants(self) -> list[Plain]:
        """As `Cluster.tenants`."""
        return await asyncio.to_thread(self._sync.tenants)

    async def create_tenant(self, name: str) -> str:
        """As `Cluster.create_tenant`."""
        return await asyncio.to_thread(self._sync.create_tenant, name)

    async def configure_tenant(
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
        """As `Cluster.configure_tenant`."""
        return await asyncio.to_thread(
            self._sync.configure_tenant,
            name,
            weight=weight,
            jobs_max=jobs_max,
            gpus_max=gpus_max,
            gpu_seconds_max=gpu_seconds_max,
            priority_max=priority_max,
            live_jobs_max=live_jobs_max,
            checkpoints_max=checkpoints_max,
            checkpoint_bytes_max=checkpoint_bytes_max,
        )

    async def tenant_keys(self, name: str) -> list[Plain]:
        """As `Cluster.tenant_keys`."""
        return await asyncio.to_thread(self._sync.tenant_keys, name)

    async def rotate_key(self, name: str) -> Plain:
        """As `Cluster.rotate_key`."""
        return await asyncio.to_thread(self._sync.rotate_key, name)

    async def revoke_key(self, name: str, key: str) -> None:
        """As `Cluster.revoke_key`."""
        await asyncio.to_thread(self._sync.revoke_key, name, key)

    async def drain(self, node: str) -> Plain:
        """As `Cluster.drain`."""
        return await asyncio.to_thread(self._sync.drain, node)

    async def undrain(self, node: str) -> Plain:
        """As `Cluster.undrain`."""
        return await asyncio.to_thread(self._sync.undrain, node)

    async def close(self) -> None:
        """As `Cluster.close`."""
        await self._transport.close()
        await asyncio.to_thread(self._sync.close)

    async def __aenter__(self) -> "AsyncCluster":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()


async def connect_async(
    url: str | Sequence[str] | None = None,
    api_key: str | None = None,
    *,
    data_dir: str | os.PathLike[str] | None = None,
    timeout_s: float = PATIENCE_S,
) -> AsyncCluster:
    """As `connect`, for `async` controllers."""
    cluster = await asyncio.to_thread(connect, url, api_key, data_dir=data_dir, timeout_s=timeout_s)
    transport = AsyncTransport(cluster.url, cluster.api_key, timeout_s)
    return AsyncCluster(cluster, transport)
