"""Deployments, for `async` controllers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Literal, Self

from plexrl.client.asynchronous.from_blocking import ASYNC_FUTURES, in_thread, submitting
from plexrl.client.blocking.deployment import Deployment, missing_attribute
from plexrl.client.blocking.deployment_kinds import (
    ReferenceDeployment,
    RewardDeployment,
    RolloutDeployment,
    TrainDeployment,
)
from plexrl.client.calls import requests
from plexrl.client.calls.controller import submit
from plexrl.client.calls.requests import Submission
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.data.results import Chunk, GenerateResult, SyncReport
from plexrl.client.display.handle_repr import handle_repr
from plexrl.client.futures.futures import AsyncFuture, Future
from plexrl.wire.operations import SamplingParams


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

    if not TYPE_CHECKING:
        # As in `Deployment`.
        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, AsyncDeployment, name)

    def within(self, deadline_s: float) -> Self:
        """As `Deployment.within`."""
        limited = copy(self)
        limited._deadline_s = requests.checked_deadline(deadline_s)
        return limited

    @property
    def deployment(self) -> str:
        """`<job>/<name>`."""
        return self._sync.deployment

    barrier = submitting(Deployment.barrier)
    load_checkpoint = submitting(Deployment.load_checkpoint)
    recover = in_thread(Deployment.recover)
    end = in_thread(Deployment.end)
    status = in_thread(Deployment.status)
    tokenizer = in_thread(Deployment.tokenizer)

    async def _submit(self, submission: Submission) -> AsyncFuture[Any]:
        found: AsyncFuture[Any] = await self._submit_for(submission, Future)
        return found

    async def _submit_for(
        self, submission: Submission, future: type[Future[Any]], *samples: int
    ) -> Any:
        """As `Deployment._submit_for`, with the class for `await`."""
        async with self._submitting:
            steps = submit(submission, self._deadline_s, self._transport.controller)
            view = await self._transport.run(steps)
        return ASYNC_FUTURES[future](self._transport, view, submission.decoder, *samples)


class AsyncTrainDeployment(AsyncDeployment):
    """Like `TrainDeployment`, for `async` controllers."""

    forward = submitting(TrainDeployment.forward)
    forward_backward = submitting(TrainDeployment.forward_backward)
    optim_step = submitting(TrainDeployment.optim_step)
    zero_grad = submitting(TrainDeployment.zero_grad)
    publish = submitting(TrainDeployment.publish)
    save_checkpoint = submitting(TrainDeployment.save_checkpoint)


class AsyncReferenceDeployment(AsyncDeployment):
    """Like `ReferenceDeployment`, for `async` controllers."""

    _sync: ReferenceDeployment

    forward = submitting(ReferenceDeployment.forward)

    async def sync_weights(
        self,
        source: AsyncTrainDeployment,
        *,
        delta: bool | Literal["auto"] = "auto",
        digest: bool = False,
    ) -> AsyncFuture[SyncReport]:
        """As `ReferenceDeployment.sync_weights`."""
        submission = requests.sync_weights(self.deployment, source, delta=delta, digest=digest)
        return await self._submit(submission)

    judge = in_thread(ReferenceDeployment.judge)


class AsyncRewardDeployment(AsyncDeployment):
    """Like `RewardDeployment`, for `async` controllers."""

    _sync: RewardDeployment

    score = submitting(RewardDeployment.score)
    judge = in_thread(RewardDeployment.judge)


class AsyncRolloutDeployment(AsyncDeployment):
    """Like `RolloutDeployment`, for `async` controllers."""

    _sync: RolloutDeployment

    generate = submitting(RolloutDeployment.generate)

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
        published: bool = False,
    ) -> AsyncFuture[SyncReport]:
        """As `RolloutDeployment.sync_weights`."""
        submission = requests.sync_weights(
            self.deployment,
            source,
            delta=delta,
            digest=digest,
            in_flight=in_flight,
            recompute_kv=recompute_kv,
            published=published,
        )
        return await self._submit(submission)

    set_parallelism = in_thread(RolloutDeployment.set_parallelism)
    judge = in_thread(RolloutDeployment.judge)
    openai = in_thread(RolloutDeployment.openai)
    captured = in_thread(RolloutDeployment.captured)
    pause = in_thread(RolloutDeployment.pause)
    resume = in_thread(RolloutDeployment.resume)
    switch_tp = in_thread(RolloutDeployment.switch_tp)
    profile_decoding = in_thread(RolloutDeployment.profile_decoding)
