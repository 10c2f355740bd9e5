"""What the routes share: who is calling, the scheduler, the blobs, deployments' specifications."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from plexrl.errors import (
    ConnectionLostError,
    OverloadedError,
    PermissionDeniedError,
    StorageFullError,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.router.blobs.checkpoint_owners import CheckpointOwners
from plexrl.router.blobs.checkpoint_quota import CheckpointQuota
from plexrl.router.blobs.store import BlobStore, Upload
from plexrl.router.blobs.upload_admission import Arrivals, steady
from plexrl.router.execution.engines import Engines
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.execution.specs import DeploymentSpecs
from plexrl.router.http.admission import BODY_KEY, BodyRefusedError, IncomingBody
from plexrl.router.http.authentication import Caller, Callers, bearer_key
from plexrl.router.http.server.stopping import Stopping
from plexrl.router.observe.health import ClusterHealth
from plexrl.router.observe.metrics_log import MetricsLog
from plexrl.wire.tensors import MEDIA_TYPE

Plain = dict[str, Any]
ANSWER_S = 30.0
"""How much longer than a poll lasts its answer is waited for."""
CONTROLLER_HEADER = "plexrl-controller"
"""Names the controller that sends a request by a token of its own choice."""
FINAL = ("finished", "failed", "cancelled")
"""States that an operation does not leave."""


class Gateway:
    """One router's shared parts; its parts keep nothing that another router does not know."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        executor: Executor,
        blobs: BlobStore,
        metrics: MetricsLog,
        specs: DeploymentSpecs,
        arrivals: Arrivals,
        checkpoint_owners: CheckpointOwners,
        checkpoint_quota: CheckpointQuota,
        callers: Callers,
        health: ClusterHealth,
        data_dir: Path,
        body_bytes_max: int,
    ) -> None:
        self.scheduler = scheduler
        self._callers = callers
        self.executor = executor
        self.blobs = blobs
        self.metrics = metrics
        self._arrivals = arrivals
        self.checkpoint_owners = checkpoint_owners
        self.health = health
        self.checkpoint_quota = checkpoint_quota
        self.data_dir = data_dir
        self.body_bytes_max = body_bytes_max
        self._specs = specs
        self.engines = Engines(executor)
        self.stopping = Stopping()

    async def caller(self, request: Request) -> Caller:
        """Who sent the request.

        Raises:
            AuthenticationError: no key, or an unknown one.
        """
        caller = await self._callers.of_key(bearer_key(request.headers.get("authorization", "")))
        request.state.is_operator = caller.is_operator
        return replace(caller, controller=request.headers.get(CONTROLLER_HEADER, ""))

    async def operator(self, request: Request) -> Caller:
        """The caller, who must be the operator. Raises `PermissionDeniedError`."""
        caller = await self.caller(request)
        if not caller.is_operator:
            raise PermissionDeniedError("this needs the operator's key")
        return caller

    async def spec(self, deployment: str, caller: Caller) -> DeploymentSpec:
        """A deployment's specification. Raises `UnknownDeploymentError`."""
        return await self._specs.read(deployment, caller.scope)

    async def operation(self, caller: Caller, operation: str, wait_s: float) -> Plain:
        """An operation as the scheduler shows it, once it is final, `wait_s` have passed or this
        router stops. Raises `UnknownOperationError`."""
        fields = {"operation": operation, **caller.claim, "timeout_s": wait_s}
        if wait_s > 0 and not self.stopping.has_begun:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as wait:
                    with self.stopping.cutting_short(wait):
                        return await self.scheduler.call(
                            "wait_operation", fields, timeout_s=wait_s + ANSWER_S
                        )
        return await self.scheduler.call("wait_operation", {**fields, "timeout_s": 0.0})

    async def deployment(self, caller: Caller, deployment: str) -> Plain:
        """A deployment as the scheduler shows it. Raises `UnknownDeploymentError`."""
        fields = {"deployment": deployment, **caller.claim}
        return await self.scheduler.call("get_deployment", fields)

    @asynccontextmanager
    async def body(self, request: Request, caller: Caller) -> AsyncIterator[Upload]:
        """The request's body, read only as far as the bound; dropped afterwards unless published.

        Raises:
            PayloadTooLargeError: it is longer.
            OverloadedError: too many bytes are arriving already.
            StorageFullError: there is no room for it.
            ConnectionLostError: the client went away before its end.
        """
        body = request.scope["state"][BODY_KEY]
        assert isinstance(body, IncomingBody)
        if request.headers.get("content-type", "").startswith(MEDIA_TYPE):
            body.allow(self.body_bytes_max)
        try:
            with self._arrivals.admit(caller.tenant, _announced(request, self.body_bytes_max)):
                chunks = steady(request.stream(), body.timeout_s)
                upload = await self.blobs.receive(chunks, self.body_bytes_max)
        except ClientDisconnect as error:
            raise ConnectionLostError("the client went away before its request's end") from error
        except (OverloadedError, StorageFullError):
            # A client that is still sending would not hear why.
            await self._drain(request, body.timeout_s)
            raise
        try:
            yield upload
        finally:
            upload.drop()

    async def _drain(self, request: Request, stall_s: float) -> None:
        left = self.body_bytes_max
        with suppress(ClientDisconnect, ConnectionLostError, BodyRefusedError):
            async for chunk in steady(request.stream(), stall_s):
                left -= len(chunk)
                if left < 0:
                    return


def _announced(request: Request, bytes_max: int) -> int:
    """How long the body is to be; one that does not say may be as long as any."""
    length = request.headers.get("content-length", "")
    return min(int(length), bytes_max) if length.isdigit() else bytes_max
