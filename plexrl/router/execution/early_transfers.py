"""Payloads that go on to the workers while the scheduler still journals their operations.

The client is answered, and the run requested from the workers, only after the journal's commit. The
split of the batch and its transfer need not wait for that: workers keep a payload that comes ahead
of its run, without effect. A refused operation's payload is discarded there. What is lost on the
way costs only time, because a run whose payload is not at its workers brings it along.

Only workers to which this router is connected receive payloads early. Each deployment has at most
one such payload, that of the operation which was submitted first.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plexrl.errors import PlexRLError
from plexrl.ids import BlobRef
from plexrl.router.dispatch.run_parts import RunParts, split_batch
from plexrl.router.execution.worker_link import WorkerLink

if TYPE_CHECKING:
    from plexrl.model.deployment_spec import DeploymentSpec
    from plexrl.wire.operations import OperationParams
    from plexrl.wire.tensors import Body

LOG = logging.getLogger(__name__)

EARLY_BYTES_MAX = 16 << 20
"""Larger payloads wait for their run: a commit is short beside their transfer, and workers of
deployments that wait for their GPUs would keep them in memory."""
KEPT_BYTES_MAX = 64 << 20
"""Bound on the payloads of all early transfers; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers that executed a deployment's latest run."""

    incarnation: int
    links: tuple[WorkerLink, ...]
    """By rank."""


@dataclass(slots=True)
class _Early:
    payload: BlobRef
    nbytes: int
    workers: Workers
    splitting: asyncio.Task[RunParts]
    sending: asyncio.Task[None] | None = None


class EarlyTransfers:
    """The early transfers of one router."""

    def __init__(self) -> None:
        self._by_deployment: OrderedDict[str, _Early] = OrderedDict()
        """Oldest first."""
        self._nbytes = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(
        self,
        deployment: str,
        params: "OperationParams",
        payload: BlobRef,
        nbytes: int,
        read: "Callable[[], Awaitable[Body]]",
        workers: Workers,
        spec: "DeploymentSpec",
    ) -> None:
        """Split a payload of `nbytes`, which `read` reads, for `workers`, which have the layout of
        `spec`, and send it to them; unless it is too large, or the deployment has an early transfer
        already."""
        if nbytes > EARLY_BYTES_MAX or deployment in self._by_deployment:
            return

        async def split() -> RunParts:
            return await split_batch(params, len(workers.links), await read(), spec)

        splitting = asyncio.create_task(split())
        # Errors are found again, and reported, when the run is executed.
        splitting.add_done_callback(lambda done: done.cancelled() or done.exception())
        early = _Early(payload, nbytes, workers, splitting)
        early.sending = self._keep(self._send(early))
        self._by_deployment[deployment] = early
        self._nbytes += nbytes
        while self._nbytes > KEPT_BYTES_MAX:
            self._pop(next(iter(self._by_deployment)))

    async def take(
        self, deployment: str, payload: BlobRef, incarnation: int, ranks: int
    ) -> RunParts | None:
        """The parts of a payload that were split early for this incarnation; None if there are
        none. Ends the early transfer of the deployment, whichever payload it has."""
        early = self._pop(deployment)
        if early is None or early.payload != payload:
            return None
        if (early.workers.incarnation, len(early.workers.links)) != (incarnation, ranks):
            return None
        try:
            return await asyncio.shield(early.splitting)
        except PlexRLError:
            return None

    def discard(self, deployment: str, payload: BlobRef) -> None:
        """Discard a payload whose operation was not accepted."""
        early = self._by_deployment.get(deployment)
        if early is not None and early.payload == payload:
            self._pop(deployment)
            self._keep(self._discard(early))

    async def close(self) -> None:
        """End all transfers."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _pop(self, deployment: str) -> _Early | None:
        early = self._by_deployment.pop(deployment, None)
        if early is not None:
            self._nbytes -= early.nbytes
        return early

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, early: _Early) -> None:
        try:
            parts = await asyncio.shield(early.splitting)
        except PlexRLError:
            return
        links = early.workers.links
        requests = zip(parts.requests(len(links)), parts.payloads, strict=True)
        sends = [links[rank].stage(early.payload, payload) for (rank, _), payload in requests]
        await asyncio.gather(*(_quietly(send) for send in sends))

    async def _discard(self, early: _Early) -> None:
        assert early.sending is not None
        await asyncio.wait({early.sending})
        for link in early.workers.links:
            await _quietly(link.discard_staged(early.payload))


async def _quietly(send: Awaitable[None]) -> None:
    """Send to a worker that may be gone; its run finds out."""
    try:
        await send
    except (PlexRLError, OSError) as error:
        LOG.info("a payload was not sent early: %s", error)
