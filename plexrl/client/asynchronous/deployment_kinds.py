"""Deployments, for `async` controllers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Self

from plexrl.client.asynchronous.in_thread import in_thread
from plexrl.client.blocking.deployment import Deployment
from plexrl.client.calls import requests
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.data.results import (
    Chunk,
    ForwardResult,
    GenerateResult,
    LoadedCheckpoint,
    ScoreResult,
    StepResult,
    SyncReport,
    TrainResult,
)
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.futures.checkpoints import AsyncCheckpointFuture
from plexrl.client.futures.futures import AsyncFuture
from plexrl.client.futures.generations import AsyncGenerateFuture
from plexrl.wire.operations import (
    MICRO_BATCH_TOKENS,
    SHARD_BYTES_MAX,
    AdamParams,
    CheckpointParams,
    LossSpec,
    SamplingParams,
)

if TYPE_CHECKING:
    from plexrl.client.data.batch import Batch

Plain = dict[str, Any]


class AsyncDeployment:
    """Like `Deployment`, for `async` controllers."""

    def __init__(self, transport: AsyncTransport, deployment: Deployment) -> None:
        self._transport = transport
        self._sync = deployment
        # asyncio locks are fair, so operations are submitted in the order of the calls.
        self._submitting = asyncio.Lock()
        self._deadline_s: float | None = None

    def __repr__(self) -> str:
        return handle_repr(self, self.deployment, deadline_s=self._deadline_s)

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
        """As `Deployment.barrier`."""
        return await self._submit(requests.barrier(self.deployment))

    async def load_checkpoint(
        self, name: str, *, job: str | None = None, optimizer: bool = True
    ) -> AsyncFuture[LoadedCheckpoint]:
        """As `Deployment.load_checkpoint`."""
        return await self._submit(
            requests.load_checkpoint(self.deployment, name, job, optimizer=optimizer)
        )

    recover = in_thread(Deployment.recover)
    """As `Deployment.recover`."""
    status = in_thread(Deployment.status)
    """As `Deployment.status`."""
    tokenizer = in_thread(Deployment.tokenizer)
    """As `Deployment.tokenizer`."""

    async def _submit(self, submission: Submission) -> AsyncFuture[Any]:
        return AsyncFuture(self._transport, await self._post(submission), submission.decoder)

    async def _post(self, submission: Submission) -> Plain:
        controller = self._transport.controller
        async with self._submitting:
            if controller is None:
                count = 0
            else:
                controller.check()
                count = controller.acknowledged_count
            call = submission.call.within(self._deadline_s)
            view = dict((await self._transport.request(call)).json())
            if controller is not None:
                controller.submitted(submission, view, count)
        return view


class AsyncTrainDeployment(AsyncDeployment):
    """Like `TrainDeployment`, for `async` controllers."""

    async def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ForwardResult]:
        """As `TrainDeployment.forward`."""
        return await self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    async def forward_backward(
        self, batch: "Batch", loss: LossSpec, *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[TrainResult]:
        """As `TrainDeployment.forward_backward`."""
        return await self._submit(
            requests.forward_backward(self.deployment, batch, loss, micro_batch_tokens)
        )

    async def optim_step(
        self,
        *,
        learning_rate: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> AsyncFuture[StepResult]:
        """As `TrainDeployment.optim_step`."""
        params = AdamParams(
            learning_rate=learning_rate,
            beta1=beta1,
            beta2=beta2,
            eps=eps,
            weight_decay=weight_decay,
            grad_clip_norm=grad_clip_norm,
        )
        return await self._submit(requests.optim_step(self.deployment, params))

    async def zero_grad(self) -> AsyncFuture[Plain]:
        """As `TrainDeployment.zero_grad`."""
        return await self._submit(requests.zero_grad(self.deployment))

    async def save_checkpoint(
        self,
        name: str,
        *,
        overwrite: bool = False,
        format: Literal["both", "hf", "training"] = "both",
        dtype: Literal["bfloat16", "float16"] | None = None,
        shard_bytes_max: int = SHARD_BYTES_MAX,
        step: int | None = None,
        keep: bool = False,
        keep_last: int | None = None,
        keep_every: int | None = None,
        upload: bool = False,
    ) -> AsyncCheckpointFuture:
        """As `TrainDeployment.save_checkpoint`."""
        params = CheckpointParams(
            name=name,
            overwrite=overwrite,
            format=format,
            dtype=dtype,
            shard_bytes_max=shard_bytes_max,
            step=step,
            keep=keep,
            keep_last=keep_last,
            keep_every=keep_every,
            upload=upload,
        )
        submission = requests.save_checkpoint(self.deployment, params)
        view = await self._post(submission)
        return AsyncCheckpointFuture(self._transport, view, submission.decoder)


class AsyncReferenceDeployment(AsyncDeployment):
    """Like `ReferenceDeployment`, for `async` controllers."""

    async def forward(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ForwardResult]:
        """As `ReferenceDeployment.forward`."""
        return await self._submit(requests.forward(self.deployment, batch, micro_batch_tokens))

    async def sync_weights(
        self,
        source: AsyncTrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> AsyncFuture[SyncReport]:
        """As `ReferenceDeployment.sync_weights`."""
        return await self._submit(
            requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        )


class AsyncRewardDeployment(AsyncDeployment):
    """Like `RewardDeployment`, for `async` controllers."""

    async def score(
        self, batch: "Batch", *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
    ) -> AsyncFuture[ScoreResult]:
        """As `RewardDeployment.score`."""
        return await self._submit(requests.score(self.deployment, batch, micro_batch_tokens))


class AsyncRolloutDeployment(AsyncDeployment):
    """Like `RolloutDeployment`, for `async` controllers."""

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

    async def generate_stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        sampling: SamplingParams | None = None,
    ) -> AsyncIterator[Chunk | GenerateResult]:
        """As `RolloutDeployment.generate_stream`."""
        future = await self.generate(prompts, n=n, sampling=sampling, stream=True)
        async for chunk in future.stream():
            yield chunk
        yield await future

    async def sync_weights(
        self,
        source: AsyncTrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
        in_flight: bool = False,
        recompute_kv: bool = True,
    ) -> AsyncFuture[SyncReport]:
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
        call = requests.engine_command(self.deployment, "pause", {"for_s": for_s})
        return list((await self._transport.request(call)).json()["engines"])

    async def resume(self) -> list[Plain]:
        """As `RolloutDeployment.resume`."""
        call = requests.engine_command(self.deployment, "resume")
        return list((await self._transport.request(call)).json()["engines"])
