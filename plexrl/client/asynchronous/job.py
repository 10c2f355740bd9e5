"""A job, for an `async` controller."""

import asyncio
from threading import Event
from types import TracebackType

from plexrl.client.asynchronous.bounded_rollout import AsyncBoundedRollout
from plexrl.client.asynchronous.deployment_kinds import (
    AsyncReferenceDeployment,
    AsyncRewardDeployment,
    AsyncRolloutDeployment,
    AsyncTrainDeployment,
)
from plexrl.client.asynchronous.from_blocking import in_thread, wrapped_in_thread
from plexrl.client.blocking.job import Job, Outcome
from plexrl.client.blocking.job_reader import SettingT
from plexrl.client.calls.controller import Controller
from plexrl.client.calls.job_exit import detach_interrupted_async, is_interrupt, is_success
from plexrl.client.calls.transport import AsyncTransport
from plexrl.client.display.cluster_location import ClusterLocation
from plexrl.client.futures.futures import wait_final
from plexrl.wire.messages.run_views import ForkView


class AsyncJob:
    """A job of this controller. As an async context manager it ends the job with the block. The
    methods are those of `Job`."""

    def __init__(self, transport: AsyncTransport, job: Job) -> None:
        self._transport = transport.for_controller(job.controller)
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
    def fork(self) -> ForkView | None:
        """As `Job.fork`."""
        return self._sync.fork

    def setting(self, name: str, default: SettingT) -> SettingT:
        """As `Job.setting`."""
        return self._sync.setting(name, default)

    @property
    def place(self) -> ClusterLocation:
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

    train_deployment = wrapped_in_thread(Job.train_deployment, AsyncTrainDeployment)
    rollout_deployment = wrapped_in_thread(Job.rollout_deployment, AsyncRolloutDeployment)
    rollout = wrapped_in_thread(Job.rollout, AsyncBoundedRollout)
    reference_deployment = wrapped_in_thread(Job.reference_deployment, AsyncReferenceDeployment)
    reward_deployment = wrapped_in_thread(Job.reward_deployment, AsyncRewardDeployment)

    @property
    def gradients_found(self) -> dict[str, int]:
        """As `Job.gradients_found`."""
        return self._sync.gradients_found

    log = in_thread(Job.log)
    log_samples = in_thread(Job.log_samples)
    resume_step = in_thread(Job.resume_step)
    rewind = in_thread(Job.rewind)
    samples = in_thread(Job.samples)
    sampled_steps = in_thread(Job.sampled_steps)
    metrics = in_thread(Job.metrics)
    status = in_thread(Job.status)
    deployment_status = in_thread(Job.deployment_status)
    operations = in_thread(Job.operations)
    rollout_profile = in_thread(Job.rollout_profile)
    checkpoints = in_thread(Job.checkpoints)
    checkpoint_files = in_thread(Job.checkpoint_files)
    delete_checkpoint = in_thread(Job.delete_checkpoint)
    download_checkpoint = in_thread(Job.download_checkpoint)
    explain = in_thread(Job.explain)
    logs = in_thread(Job.logs)
    read_logs = in_thread(Job.read_logs)

    async def finish(self, outcome: Outcome = "completed", reason: str = "") -> None:
        """As `Job.finish`."""
        if outcome == "completed":
            await self._await_last_operations()
        await asyncio.to_thread(self._sync.finish, outcome, reason)

    quote = in_thread(Job.quote)
    cancel = in_thread(Job.cancel)
    detach = in_thread(Job.detach)

    async def __aenter__(self) -> "AsyncJob":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sync._is_inherited:
            return
        if is_success(error) and not self._sync.left.is_set():
            await self._await_or_detach()
        elif error is not None and is_interrupt(error):
            await detach_interrupted_async(self._sync)
            return
        await asyncio.to_thread(self._sync.__exit__, kind, error, trace)

    async def _await_last_operations(self) -> None:
        """Wait on the event loop, because a thread that waits cannot be interrupted."""
        controller = self._transport.controller
        for operation in [] if controller is None else controller.last_operations():
            await self._transport.run(wait_final(operation))

    async def _await_or_detach(self) -> None:
        try:
            await self._await_last_operations()
        except asyncio.CancelledError as error:
            if is_interrupt(error):
                await detach_interrupted_async(self._sync)
            else:
                # A cancelled wait means that the last operations are not wanted.
                await asyncio.to_thread(self._sync.cancel, "CancelledError")
            raise
