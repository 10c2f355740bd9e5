"""The SDK for `async` controllers: the same surface, awaited.

Submissions of one deployment leave in the order of the calls; results are awaited on the event
loop, thousands at a time. What is rare (jobs, deployments, logs) runs the blocking client in a
thread.
"""

import asyncio
from collections.abc import Sequence
from copy import copy
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from plexrl.client import requests
from plexrl.client.checkpoints import AsyncCheckpointFuture
from plexrl.client.cluster import PATIENCE_S, Cluster, connect
from plexrl.client.deployment import Deployment
from plexrl.client.futures import AsyncFuture, wait_final_async
from plexrl.client.generations import AsyncGenerateFuture
from plexrl.client.job import MICRO_BATCH_TOKENS, Job
from plexrl.client.requests import Submission
from plexrl.client.results import ForwardResult, ScoreResult, StepResult, TrainResult
from plexrl.client.transport import AsyncTransport
from plexrl.wire.operations import AdamParams, LossSpec, SamplingParams

if TYPE_CHECKING:
    from plexrl.client.batch import Batch
    from plexrl.model_spec import ModelSpec

Plain = dict[str, Any]


class AsyncDeployment:
    """One logical model of a job; its operations run in the order of submission."""

    def __init__(self, transport: AsyncTransport, deployment: Deployment) -> None:
        self._transport = transport
        self._sync = deployment
        # asyncio locks are fair, so whoever called first submits first.
        self._submitting = asyncio.Lock()
        self._deadline_s: float | None = None

    def within(self, deadline_s: float) -> Self:
        """As `Deployment.within`."""
        limited = copy(self)
        limited._deadline_s = requests.checked_deadline(deadline_s)
        return limited

    @property
    def deployment(self) -> str:
        """`<job>/<name>`."""
        return self._sync.deployment

    async def barrier(self) -> AsyncFuture[Plain]:
        """Finished when everything submitted before it is."""
        return await self._submit(requests.barrier(self.deployment))

    async def load_checkpoint(self, name: str, *, job: str | None = None) -> AsyncFuture[Plain]:
        """Restore a checkpoint."""
        return await self._submit(requests.load_checkpoint(self.deployment, name, job))

    async def recover(self) -> None:
        """As `Deployment.recover`."""
        await asyncio.to_thread(self._sync.recover)

    async def status(self) -> Plain:
        """Where it runs and where its state lies."""
        return await asyncio.to_thread(self._sync.status)

    async def _submit(self, submission: Submission) -> AsyncFuture[Any]:
        return AsyncFuture(self._transport, await self._post(submission), submission.decoder)

    async def _post(self, submission: Submission) -> Plain:
        controller = self._transport.controller
        async with self._submitting:
            if controller is None:
                mark = 0
            else:
                controller.check()
                mark = controller.mark
            call = submission.call.within(self._deadline_s)
            view = dict((await self._transport.request(call)).json())
            if controller is not None:
                controller.submitted(submission, view, mark)
        return view


class AsyncTrainDeployment(AsyncDeployment):
    """A model that learns."""

    async def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ForwardResult]:
        """Logprobs of every token given those before it."""
        return await self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    async def forward_backward(
        self, batch: "Batch", loss: LossSpec, *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[TrainResult]:
        """Add the gradients of `loss` to those that wait for a step."""
        return await self._submit(
            requests.forward_backward(self.deployment, batch, loss, micro_batch_tokens)
        )

    async def optim_step(
        self, params: AdamParams | None = None, **fields: float
    ) -> AsyncFuture[StepResult]:
        """One AdamW step with the gradients that wait."""
        return await self._submit(
            requests.optim_step(self.deployment, params or AdamParams(**fields))
        )

    async def zero_grad(self) -> AsyncFuture[Plain]:
        """As `TrainDeployment.zero_grad`."""
        return await self._submit(requests.zero_grad(self.deployment))

    async def save_checkpoint(self, name: str, **options: Any) -> AsyncCheckpointFuture:
        """As `TrainDeployment.save_checkpoint`; the future waits until it is on the disk."""
        submission = requests.save_checkpoint(self.deployment, name, options)
        view = await self._post(submission)
        return AsyncCheckpointFuture(self._transport, view, submission.decoder)


class AsyncReferenceDeployment(AsyncDeployment):
    """A model that only says how likely tokens are."""

    async def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ForwardResult]:
        """Logprobs of every token given those before it."""
        return await self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    async def sync_weights(
        self,
        source: AsyncTrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> AsyncFuture[Plain]:
        """As `ReferenceDeployment.sync_weights`."""
        return await self._submit(
            requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        )


class AsyncRewardDeployment(AsyncDeployment):
    """A model that scores rows."""

    async def score(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ScoreResult]:
        """The score of every row."""
        return await self._submit(requests.score(self.deployment, batch, micro_batch_tokens))


class AsyncRolloutDeployment(AsyncDeployment):
    """A model that generates."""

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
        stream: bool = False,
    ) -> AsyncGenerateFuture:
        """As `RolloutDeployment.generate`."""
        submission = requests.generate(
            self.deployment, prompts, n, sampling or SamplingParams(), stream=stream
        )
        view = await self._post(submission)
        return AsyncGenerateFuture(self._transport, view, submission.decoder, n)

    async def sync_weights(
        self,
        source: AsyncTrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
        in_flight: bool = False,
        recompute_kv: bool = True,
    ) -> AsyncFuture[Plain]:
        """As `RolloutDeployment.sync_weights`."""
        return await self._submit(
            requests.sync_weights(
                self.deployment,
                source,
                delta=delta,
                digest=digest,
                in_flight=in_flight,
                recompute_kv=recompute_kv,
            )
        )

    async def pause(self, *, for_s: float = 600.0) -> list[Plain]:
        """As `RolloutDeployment.pause`."""
        call = requests.engine_order(self.deployment, "pause", {"for_s": for_s})
        return list((await self._transport.request(call)).json()["engines"])

    async def resume(self) -> list[Plain]:
        """As `RolloutDeployment.resume`."""
        call = requests.engine_order(self.deployment, "resume")
        return list((await self._transport.request(call)).json()["engines"])


class AsyncJob:
    """A job of this controller; `async with` ends it when the block does."""

    def __init__(self, transport: AsyncTransport, job: Job) -> None:
        self._transport = transport.of(job.controller)
        self._sync = job

    @property
    def job(self) -> str:
        """The job's id."""
        return self._sync.job

    async def train_deployment(
        self, name: str, model: "ModelSpec", **options: Any
    ) -> AsyncTrainDeployment:
        """As `Job.train_deployment`."""
        made = await asyncio.to_thread(self._sync.train_deployment, name, model, **options)
        return AsyncTrainDeployment(self._transport, made)

    async def rollout_deployment(
        self, name: str, model: "ModelSpec", **options: Any
    ) -> AsyncRolloutDeployment:
        """As `Job.rollout_deployment`."""
        made = await asyncio.to_thread(self._sync.rollout_deployment, name, model, **options)
        return AsyncRolloutDeployment(self._transport, made)

    async def reference_deployment(
        self, name: str, model: "ModelSpec", **options: Any
    ) -> AsyncReferenceDeployment:
        """As `Job.reference_deployment`."""
        made = await asyncio.to_thread(self._sync.reference_deployment, name, model, **options)
        return AsyncReferenceDeployment(self._transport, made)

    async def reward_deployment(
        self, name: str, model: "ModelSpec", **options: Any
    ) -> AsyncRewardDeployment:
        """As `Job.reward_deployment`."""
        made = await asyncio.to_thread(self._sync.reward_deployment, name, model, **options)
        return AsyncRewardDeployment(self._transport, made)

    @property
    def gradients_found(self) -> dict[str, int]:
        """As `Job.gradients_found`."""
        return self._sync.gradients_found

    async def log(self, step: int, values: dict[str, float]) -> None:
        """Add a row to the job's metrics."""
        await asyncio.to_thread(self._sync.log, step, values)

    async def status(self) -> Plain:
        """The job as the scheduler sees it."""
        return await asyncio.to_thread(self._sync.status)

    async def operations(self, after: int = 0, limit: int = 1000) -> list[Plain]:
        """As `Job.operations`."""
        return await asyncio.to_thread(self._sync.operations, after, limit)

    async def checkpoints(self) -> list[Plain]:
        """As `Job.checkpoints`."""
        return await asyncio.to_thread(self._sync.checkpoints)

    async def delete_checkpoint(self, name: str) -> None:
        """As `Job.delete_checkpoint`."""
        await asyncio.to_thread(self._sync.delete_checkpoint, name)

    async def explain(self) -> Plain:
        """As `Job.explain`."""
        return await asyncio.to_thread(self._sync.explain)

    async def logs(self, deployment: str | None = None, lines: int = 100) -> list[Plain]:
        """As `Job.logs`."""
        return await asyncio.to_thread(self._sync.logs, deployment, lines)

    async def __aenter__(self) -> "AsyncJob":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            await self._wait_for_last_operations()
        await asyncio.to_thread(self._sync.__exit__, kind, error, trace)

    async def _wait_for_last_operations(self) -> None:
        """Waited for here, because a thread that waits for them could not be interrupted."""
        controller = self._transport.controller
        try:
            for operation in [] if controller is None else controller.last_operations():
                await wait_final_async(self._transport, operation)
        except asyncio.CancelledError:
            # Whoever interrupts the wait for the last operations does not want them.
            await asyncio.to_thread(self._sync.finish, "cancelled", "CancelledError")
            raise


class AsyncCluster:
    """A cluster, as one API key sees it; for one event loop."""

    def __init__(self, cluster: Cluster, transport: AsyncTransport) -> None:
        self._sync = cluster
        self._transport = transport

    async def create_job(self, name: str, **options: Any) -> AsyncJob:
        """As `Cluster.create_job`."""
        job = await asyncio.to_thread(self._sync.create_job, name, **options)
        return AsyncJob(self._transport, job)

    async def attach_job(self, job: str, **options: Any) -> AsyncJob:
        """As `Cluster.attach_job`."""
        made = await asyncio.to_thread(self._sync.attach_job, job, **options)
        return AsyncJob(self._transport, made)

    async def jobs(self) -> list[Plain]:
        """All jobs the key may see."""
        return await asyncio.to_thread(self._sync.jobs)

    async def status(self) -> Plain:
        """The cluster in a few numbers."""
        return await asyncio.to_thread(self._sync.status)

    async def usage(self) -> list[Plain]:
        """As `Cluster.usage`."""
        return await asyncio.to_thread(self._sync.usage)

    async def tenants(self) -> list[Plain]:
        """As `Cluster.tenants`."""
        return await asyncio.to_thread(self._sync.tenants)

    async def configure_tenant(self, name: str, **settings: Any) -> Plain:
        """As `Cluster.configure_tenant`."""
        return await asyncio.to_thread(self._sync.configure_tenant, name, **settings)

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
        """Close the connections, and the embedded cluster if there is one."""
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
    timeout_s: float = PATIENCE_S,
) -> AsyncCluster:
    """As `connect`, for `async` controllers."""
    cluster = await asyncio.to_thread(connect, url, api_key, timeout_s=timeout_s)
    transport = AsyncTransport(cluster.url, cluster.api_key, timeout_s)
    return AsyncCluster(cluster, transport)
