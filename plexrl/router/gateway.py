"""What the routes share: who is calling, the scheduler, the blobs, deployments' specifications."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from plexrl.deployment_spec import DeploymentSpec
from plexrl.errors import (
    AuthenticationError,
    ConnectionLostError,
    OverloadedError,
    PermissionDeniedError,
)
from plexrl.router.arrivals import Arrivals, steady
from plexrl.router.blobs import BlobStore, Upload
from plexrl.router.checkpoint_owners import CheckpointOwners
from plexrl.router.engines import Engines
from plexrl.router.executor import Executor
from plexrl.router.metrics_log import MetricsLog
from plexrl.router.scheduler_link import SchedulerLink
from plexrl.router.specs import DeploymentSpecs
from plexrl.router.stopping import Stopping

Plain = dict[str, Any]
CACHE_S = 60.0
CACHE_MAX = 10_000
ANSWER_S = 30.0
"""How much longer than a poll lasts its answer is waited for."""
FINAL = ("finished", "failed", "cancelled")
"""States that an operation does not leave."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose key a request carries."""

    tenant: str
    is_operator: bool

    @property
    def scope(self) -> str | None:
        """The tenant whose objects the caller may see; None sees all."""
        return None if self.is_operator else self.tenant

    @property
    def claim(self) -> Plain:
        """What a call to the scheduler says about whom it is made for."""
        if self.is_operator:
            return {"tenant": None, "as_operator": True}
        return {"tenant": self.tenant}


class Gateway:
    """One router's shared parts; the caches hold only what never changes."""

    def __init__(
        self,
        scheduler: SchedulerLink,
        executor: Executor,
        blobs: BlobStore,
        metrics: MetricsLog,
        specs: DeploymentSpecs,
        arrivals: Arrivals,
        checkpoint_owners: CheckpointOwners,
        body_bytes_max: int,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.blobs = blobs
        self.metrics = metrics
        self._arrivals = arrivals
        self.checkpoint_owners = checkpoint_owners
        self.body_bytes_max = body_bytes_max
        self._callers: OrderedDict[str, tuple[float, Caller]] = OrderedDict()
        self._specs = specs
        self.engines = Engines(executor)
        self.stopping = Stopping()

    async def caller(self, request: Request) -> Caller:
        """Who sent the request.

        Raises:
            AuthenticationError: no key, or an unknown one.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise AuthenticationError(
                "the request carries no API key: send `Authorization: Bearer <key>`"
            )
        digest = key_digest(key)
        known = self._callers.get(digest)
        if known is not None and time.monotonic() - known[0] < CACHE_S:
            return known[1]
        answer = await self.scheduler.call("authenticate", {"key_digest": digest})
        caller = Caller(answer["tenant"], bool(answer["is_operator"]))
        self._callers[digest] = (time.monotonic(), caller)
        while len(self._callers) > CACHE_MAX:
            self._callers.popitem(last=False)
        return caller

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
            ConnectionLostError: the client went away before its end.
        """
        try:
            with self._arrivals.admit(caller.tenant, _announced(request, self.body_bytes_max)):
                chunks = steady(request.stream())
                upload = await self.blobs.receive(chunks, self.body_bytes_max)
        except ClientDisconnect as error:
            raise ConnectionLostError("the client went away before its request's end") from error
        except OverloadedError:
            await self._drain(request)
            raise
        try:
            yield upload
        finally:
            upload.drop()

    async def _drain(self, request: Request) -> None:
        left = self.body_bytes_max
        with suppress(ClientDisconnect, ConnectionLostError):
            async for chunk in steady(request.stream()):
                left -= len(chunk)
                if left < 0:
                    return


def _announced(request: Request, bytes_max: int) -> int:
    """How long the body is to be; one that does not say may be as long as any."""
    length = request.headers.get("content-length", "")
    return min(int(length), bytes_max) if length.isdigit() else bytes_max


def key_digest(key: str) -> str:
    """What is kept of an API key."""
    return hashlib.sha256(key.encode()).hexdigest()
