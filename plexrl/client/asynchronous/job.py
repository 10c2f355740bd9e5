"""A job, for an `async` controller."""

import asyncio
from collections.abc import Mapping
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from plexrl.client.asynchronous.deployment_kinds import (
    AsyncReferenceDeployment,
    AsyncRewardDeployment,
    AsyncRolloutDeployment,
    AsyncTrainDeployment,
)
from plexrl.client.blocking.job import Dtype, Job, Outcome
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.data.demand import DemandTrace
from plexrl.client.display.cluster_location import Place
from plexrl.client.display.leaving import is_interrupt, is_success, leave_interrupted_async
from plexrl.client.futures.futures import wait_final_async
from plexrl.model.parallelism import Parallelism

if TYPE_CHECKING:
    from plexrl.model.lora import LoraSpec
    from plexrl.model.spec import ModelSpec

Plain = dict[str, Any]


class AsyncJob:
    """A job of this controller; `async with` ends it when the block does."""

    def __init__(self, transport: AsyncTransport, job: Job) -> None:
        self._transport = transport.of(job.controller)
        self._sync = job

    def __repr__(self) -> str:
        return repr(self._sync).replace("<Job", "<AsyncJob", 1)

    @property
    def job(self) -> str:
        """The job's id."""
        return self._sync.job

    @property
    def name(self) -> str:
        """As `Job.name`."""
        return self._sync.name

    @property
    def place(self) -> Place:
        """As `Job.place`."""
        return self._sync.place

    @property
    def left(self) -> Event:
        """As `Job.left`."""
        return self._sync.left

    @property
    def controller(self) -> Controller | None:
        """As `Job.controller`."""
        return self._sync.controller

    async def train_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int | None = None,
        parallelism: Parallelism | None = None,
        exclusive: bool = False,
        backend: str | None = None,
        optimizer: Literal["device", "host"] = "device",
        lora: "LoraSpec | None" = None,
        compute_dtype: Dtype = "float32",
        activation_checkpointing: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> AsyncTrainDeployment:
        """As `Job.train_deployment`."""
        made = await asyncio.to_thread(
            self._sync.train_deployment,
            name,
            model,
            workers=workers,
            parallelism=parallelism,
            exclusive=exclusive,
            backend=backend,
            optimizer=optimizer,
            lora=lora,
            compute_dtype=compute_dtype,
            activation_checkpointing=activation_checkpointing,
            max_sequence_tokens=max_sequence_tokens,
            node_type=node_type,
            trace=trace,
        )
        return AsyncTrainDeployment(self._transport, made)

    async def rollout_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        backend: str | None = None,
        dtype: Dtype = "float32",
        max_sequence_tokens: int = 512,
        max_concurrent_samples: int = 256,
        kv_cache_bytes: int | None = None,
        lora: "LoraSpec | None" = None,
        parallelism: Parallelism | None = None,
        node_type: str = "",
    ) -> AsyncRolloutDeployment:
        """As `Job.rollout_deployment`."""
        made = await asyncio.to_thread(
            self._sync.rollout_deployment,
            name,
            model,
            backend=backend,
            dtype=dtype,
            max_sequence_tokens=max_sequence_tokens,
            max_concurrent_samples=max_concurrent_samples,
            kv_cache_bytes=kv_cache_bytes,
            lora=lora,
            parallelism=parallelism,
            node_type=node_type,
        )
        return AsyncRolloutDeployment(self._transport, made)

    async def reference_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int = 1,
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> AsyncReferenceDeployment:
        """As `Job.reference_deployment`."""
        made = await asyncio.to_thread(
            self._sync.reference_deployment,
            name,
            model,
            workers=workers,
            dtype=dtype,
            exclusive=exclusive,
            max_sequence_tokens=max_sequence_tokens,
            node_type=node_type,
            trace=trace,
        )
        return AsyncReferenceDeployment(self._transport, made)

    async def reward_deployment(
        self,
        name: str,
        model: "ModelSpec",
        *,
        workers: int = 1,
        dtype: Dtype = "float32",
        exclusive: bool = False,
        max_sequence_tokens: int = 512,
        node_type: str = "",
        trace: DemandTrace | Mapping[str, object] | None = None,
    ) -> AsyncRewardDeployment:
        """As `Job.reward_deployment`."""
        made = await asyncio.to_thread(
            self._sync.reward_deployment,
            name,
            model,
            workers=workers,
            dtype=dtype,
            exclusive=exclusive,
            max_sequence_tokens=max_sequence_tokens,
            node_type=node_type,
            trace=trace,
        )
        return AsyncRewardDeployment(self._transport, made)

    @property
    def gradients_found(self) -> dict[str, int]:
        """As `Job.gradients_found`."""
        return self._sync.gradients_found

    async def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """As `Job.log`."""
        await asyncio.to_thread(self._sync.log, step, values)

    async def metrics(self, *, after: int = 0) -> list[Plain]:
        """As `Job.metrics`."""
        return await asyncio.to_thread(self._sync.metrics, after=after)

    async def status(self) -> Plain:
        """As `Job.status`."""
        return await asyncio.to_thread(self._sync.status)

    async def deployment_status(self, deployment: str) -> Plain:
        """As `Job.deployment_status`."""
        return await asyncio.to_thread(self._sync.deployment_status, deployment)

    async def operations(self, *, after: int = 0, limit: int = 1000) -> list[Plain]:
        """As `Job.operations`."""
        return await asyncio.to_thread(self._sync.operations, after=after, limit=limit)

    async def checkpoints(self) -> list[Plain]:
        """As `Job.checkpoints`."""
        return await asyncio.to_thread(self._sync.checkpoints)

    async def delete_checkpoint(self, name: str) -> None:
        """As `Job.delete_checkpoint`."""
        await asyncio.to_thread(self._sync.delete_checkpoint, name)

    async def explain(self) -> Plain:
        """As `Job.explain`."""
        return await asyncio.to_thread(self._sync.explain)

    async def logs(self, deployment: str | None = None, *, lines: int = 100) -> list[Plain]:
        """As `Job.logs`."""
        return await asyncio.to_thread(self._sync.logs, deployment, lines=lines)

    async def read_logs(self, deployment: str | None = None, *, lines: int = 100) -> Plain:
        """As `Job.read_logs`."""
        return await asyncio.to_thread(self._sync.read_logs, deployment, lines=lines)

    async def finish(self, outcome: Outcome = "completed", reason: str = "") -> None:
        """As `Job.finish`."""
        if outcome == "completed":
            await self._last_operations_end()
        await asyncio.to_thread(self._sync.finish, outcome, reason)

    async def cancel(self, reason: str = "") -> None:
        """As `Job.cancel`."""
        await asyncio.to_thread(self._sync.cancel, reason)

    async def detach(self) -> None:
        """As `Job.detach`."""
        await asyncio.to_thread(self._sync.detach)

    async def __aenter__(self) -> "AsyncJob":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if is_success(error) and not self._sync.left.is_set():
            await self._wait_for_last_operations()
        elif error is not None and is_interrupt(error):
            await leave_interrupted_async(self._sync)
            return
        await asyncio.to_thread(self._sync.__exit__, kind, error, trace)

    async def _last_operations_end(self) -> None:
        """Waited for here, because a thread that waits for them could not be interrupted."""
        controller = self._transport.controller
        for operation in [] if controller is None else controller.last_operations():
            await wait_final_async(self._transport, operation)

    async def _wait_for_last_operations(self) -> None:
        try:
            await self._last_operations_end()
        except asyncio.CancelledError as error:
            if is_interrupt(error):
                await leave_interrupted_async(self._sync)
            else:
                # Whoever cancels the wait for the last operations does not want them.
                await asyncio.to_thread(self._sync.cancel, "CancelledError")
            raise
