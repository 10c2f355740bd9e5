"""The objects that all routes share, and how a route handler gets them."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypeVar
from weakref import WeakValueDictionary

from fastapi import Depends, Request

from plexrl.errors import (
    ConnectionLostError,
    OverloadedError,
    StorageError,
    StorageFullError,
    UnavailableError,
)
from plexrl.model.deployment_spec import DeploymentSpec
from plexrl.model.text.tokenizer import Tokenizer
from plexrl.router.blobs.store import BlobStore, Upload
from plexrl.router.blobs.upload_admission import UploadAdmission, timed_chunks
from plexrl.router.execution.deployment_specs import DeploymentSpecs, OwnedSpec
from plexrl.router.execution.engines import Engines
from plexrl.router.execution.executor import Executor
from plexrl.router.execution.rollout_link import RolloutLink
from plexrl.router.execution.scheduler_link import SchedulerLink
from plexrl.router.job_files.captures import Captures
from plexrl.router.job_files.checkpoint_quota import CheckpointQuota
from plexrl.router.job_files.metrics_log import MetricsLog
from plexrl.router.job_files.model_access import ModelAccess
from plexrl.router.job_files.record_store import JobKey, RecordStore
from plexrl.router.job_files.samples import SampleLog
from plexrl.router.observe.health import ClusterHealth
from plexrl.router.observe.overview import Overviews
from plexrl.router.observe.rollouts import RolloutViews
from plexrl.router.observe.run_watch import RunWatch
from plexrl.router.server.request_limits import BODY_KEY, BodyRefusedError, LimitedBody
from plexrl.router.services.authentication import Caller, KeyCache
from plexrl.router.services.cancel_on_disconnect import CancelOnDisconnect
from plexrl.router.services.quotes import Quotes
from plexrl.router.services.shutdown import Shutdown
from plexrl.wire import scheduler_methods as m
from plexrl.wire.messages.views import (
    DeploymentView,
    ExplainedJobView,
    JobView,
    OperationView,
)
from plexrl.wire.tensors import MEDIA_TYPE

ViewT = TypeVar("ViewT")

KEY_CHECK_S = 1.0
"""Shortest time between two checks whether the key of a stream is valid."""
RESPONSE_MARGIN_S = 30.0
"""How much longer than the poll itself the router waits for the scheduler's reply to a poll."""
CONTROLLER_HEADER = "plexrl-controller"
"""Header that identifies the controller that sends a request, by a token of its own choice."""


@dataclass(slots=True, kw_only=True)
class RouterServices:
    """The shared objects of one router. They hold no state that another router would need."""

    scheduler: SchedulerLink
    executor: Executor
    blobs: BlobStore
    metrics: MetricsLog
    captures: Captures
    records: RecordStore
    samples: SampleLog
    run_watch: RunWatch
    specs: DeploymentSpecs
    uploads: UploadAdmission
    model_access: ModelAccess
    checkpoint_quota: CheckpointQuota
    keys: KeyCache
    engines: Engines
    rollouts: RolloutLink
    rollout_views: RolloutViews
    disconnects: CancelOnDisconnect
    health: ClusterHealth
    overviews: Overviews
    quotes: Quotes
    data_dir: Path
    threads: ThreadPoolExecutor
    """Runs calls that may wait for an object store."""
    body_bytes_max: int
    """Largest payload of an operation, in bytes."""
    runs_max: int = 0
    """Controllers that may run on the cluster; 0: it runs none."""
    tokenizers: OrderedDict[tuple[str, str], Tokenizer] = field(default_factory=OrderedDict)
    """Tokenizers used last, by deployment and its specification."""
    tokenizer_locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(
        default_factory=WeakValueDictionary
    )
    """Held while a tokenizer is loaded."""
    shutdown: Shutdown = field(default_factory=Shutdown)
    audit_reads: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the audit log is read."""

    async def caller(self, request: Request) -> Caller:
        """Return who sent the request.

        Raises:
            AuthenticationError: the request has no key or an unknown one.
            OverloadedError: too many such requests came from the same address.
        """
        known = getattr(request.state, "caller", None)
        if isinstance(known, Caller):
            return known
        address = request.client.host if request.client else ""
        caller = await self.keys.caller_of(self.keys.authorization_of(request), address)
        controller = request.headers.get(CONTROLLER_HEADER, "")
        found: Caller = replace(caller, controller=controller)
        # A key of a job is not cached, and the handlers of a request ask several times.
        request.state.caller = found
        return found

    async def check_still_valid(self, request: Request) -> None:
        """Check that the key of a long answer is still valid: a stream must not outlive its key.
        While nobody can tell, the answer goes on.

        Raises:
            AuthenticationError: the key was revoked or has expired.
        """
        now = time.monotonic()
        if now < getattr(request.state, "key_checked_at", -KEY_CHECK_S) + KEY_CHECK_S:
            return
        request.state.key_checked_at = now
        address = request.client.host if request.client else ""
        with suppress(UnavailableError, ConnectionLostError, OverloadedError, StorageError):
            await self.keys.caller_of(self.keys.authorization_of(request), address)

    async def ask(self, request: Request, method: m.Method[ViewT], **fields: object) -> ViewT:
        """Call the scheduler with `fields` and the claim of the sender of the request.

        Raises as `caller` and `SchedulerLink.call`.
        """
        caller = await self.caller(request)
        return await self.scheduler.call(method, {**fields, **caller.claim})

    async def manage(self, request: Request, method: m.Method[ViewT], **fields: object) -> ViewT:
        """As `ask`, for a call about a tenant that the tenant's admin may make."""
        caller = await self.caller(request)
        return await self.scheduler.call(method, {**fields, **caller.management})

    async def spec(self, deployment: str, caller: Caller) -> DeploymentSpec:
        """Return a deployment's specification. Raises `UnknownDeploymentError`."""
        return (await self.owned_spec(deployment, caller)).spec

    async def owned_spec(self, deployment: str, caller: Caller) -> OwnedSpec:
        """Return a deployment's specification and its tenant. Raises `UnknownDeploymentError`."""
        return await self.specs.read(deployment, caller.scope)

    async def operation(self, caller: Caller, operation: str, wait_s: float) -> OperationView:
        """Return the scheduler's view of an operation, once the operation is final, `wait_s`
        seconds have passed or this router stops. Raises `UnknownOperationError`."""
        fields = {"operation": operation, **caller.claim, "timeout_s": wait_s}
        if wait_s > 0 and not self.shutdown.has_begun:
            with suppress(TimeoutError):
                async with asyncio.timeout(None) as wait:
                    with self.shutdown.interrupting(wait):
                        return await self.scheduler.call(
                            m.WAIT_OPERATION, fields, timeout_s=wait_s + RESPONSE_MARGIN_S
                        )
        return await self.scheduler.call(m.WAIT_OPERATION, {**fields, "timeout_s": 0.0})

    async def deployment(self, caller: Caller, deployment: str) -> DeploymentView:
        """Return the scheduler's view of a deployment. Raises `UnknownDeploymentError`."""
        fields = {"deployment": deployment, **caller.claim}
        return await self.scheduler.call(m.GET_DEPLOYMENT, fields)

    async def job_key(self, request: Request, job: str) -> JobKey:
        """What the files of a job are kept by; as `ask`, the caller may have the job. Raises
        `UnknownJobError`."""
        view = await self.ask(request, m.GET_JOB, job=job)
        return job_key(view)

    async def check_job(self, caller: Caller, job: str) -> None:
        """Check that the caller may see a job, which another controller may have. Raises
        `UnknownJobError`."""
        await self.scheduler.call(m.GET_JOB, {"job": job, **caller.rights})

    @asynccontextmanager
    async def upload(self, request: Request, caller: Caller) -> AsyncIterator[Upload]:
        """Receive the request's body; drop it when the block ends, unless it was published.

        Raises:
            PayloadTooLargeError: the body is over the limit.
            OverloadedError: too many bytes are arriving already.
            StorageFullError: the disk is full.
            ConnectionLostError: the client disconnected before the end of the body.
        """
        body = request.scope["state"][BODY_KEY]
        assert isinstance(body, LimitedBody)
        if request.headers.get("content-type", "").startswith(MEDIA_TYPE):
            body.allow(self.body_bytes_max)
        # A body without a declared length may be as long as the limit.
        declared = self.body_bytes_max if body.content_length is None else body.content_length
        try:
            with self.uploads.admit(caller.tenant, min(declared, self.body_bytes_max)):
                chunks = timed_chunks(body.chunks(), body.timeout_s)
                upload = await self.blobs.receive(chunks, self.body_bytes_max)
        except (OverloadedError, StorageFullError):
            # A client that is still sending does not read the response.
            await self.drain(body)
            raise
        try:
            yield upload
        finally:
            upload.drop()

    async def drain(self, body: LimitedBody) -> None:
        """Receive the rest of a refused body, and drop it."""
        left = self.body_bytes_max
        with suppress(ConnectionLostError, BodyRefusedError):
            async for chunk in timed_chunks(body.chunks(), body.timeout_s):
                left -= len(chunk)
                if left < 0:
                    return


def job_key(view: JobView | ExplainedJobView) -> JobKey:
    """What the files of a job are kept by."""
    return JobKey(view["tenant"], view["job"])


async def router_services(request: Request) -> RouterServices:
    """Return the services of the application that serves `request`."""
    services = request.app.state.services
    assert isinstance(services, RouterServices)
    return services


Services = Annotated[RouterServices, Depends(router_services)]
"""Type of a route handler's parameter that receives the shared services."""
