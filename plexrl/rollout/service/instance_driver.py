"""Carries out the commands of one instance, in their order."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from plexrl.client.data.results import Sample
from plexrl.errors import NotFoundError, PlexRLError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    Event,
    Generated,
    GenerationFailed,
    Interrupt,
    Pull,
    Pulled,
    Route,
    Stopped,
    StoppedTrajectory,
)
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.instances import InstanceCommand, Instances
from plexrl.rollout.service.journal.store import Part, RolloutStore
from plexrl.rollout.service.order import RolloutOrder, deployment_of
from plexrl.rollout.trajectories.record import InstanceId, Segment, TrajectoryId, TrajectoryState

LOG = logging.getLogger(__name__)
ABORTED = "abort"
"""Finish reason of a sample that was cut short."""


class Surroundings(Protocol):
    """The rollout of an instance."""

    order: RolloutOrder
    core: RolloutCoordinator
    store: RolloutStore
    calls: ClusterCalls
    instances: Instances

    def handle(self, event: Event, *, parts: Sequence[Part] = ()) -> None:
        """Take an event."""
        ...

    async def version_of(self, trainer_step: int) -> int:
        """The version with these steps, once the controller has declared it."""
        ...

    async def is_lost(self, instance: InstanceId) -> bool:
        """Whether the instance has ended; the coordinator knows it then."""
        ...

    async def pull_failed(self, instance: InstanceId, operation: str, error: PlexRLError) -> None:
        """Its weights could not be set: it is lost, and this driver is cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class _Generating:
    task: "asyncio.Task[Sample | None]"
    begun: "asyncio.Future[bool]"
    """Whether its operation was submitted."""
    operation: str


class InstanceDriver:
    """One instance. Its generations run concurrently, its other commands one after another."""

    def __init__(self, instance: InstanceId, rollout: Surroundings) -> None:
        """Begins with the commands that an earlier process left."""
        self.instance = instance
        self.deployment = deployment_of(instance)
        self._rollout = rollout
        self._queue: asyncio.Queue[InstanceCommand] = asyncio.Queue()
        self._generating: dict[TrajectoryId, _Generating] = {}
        self._stopping: set[TrajectoryId] = set()
        work = rollout.instances.work[instance]
        self._begun = work.begun()
        for command in work.unanswered:
            self._queue.put_nowait(command)

    def add(self, command: InstanceCommand) -> None:
        """Append a command."""
        self._queue.put_nowait(command)

    async def run(self) -> None:
        """Carry out commands until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._begun:
                self._begin(tasks, each)
            while True:
                match command := await self._queue.get():
                    case Route():
                        for each in command.trajectories:
                            self._begin(tasks, each)
                    case Interrupt() | Abort():
                        await self._stop(command)
                    case Pull():
                        await self._pull(command)

    def operations(self) -> list[str]:
        """Ids of the generations that have not ended."""
        return [each.operation for each in self._generating.values()]

    def operation(self, trajectory: TrajectoryId) -> str:
        """Id of the operation that generates a trajectory here."""
        order = self._rollout.order
        times = self._rollout.instances.work[self.instance].held[trajectory]
        return f"{order.job}:{order.name}/t{trajectory}.{times}"

    def _begin(self, tasks: asyncio.TaskGroup, trajectory: TrajectoryId) -> None:
        work = self._rollout.instances.work.get(self.instance)
        # A trajectory may have failed between two commands, or the instance is lost.
        if work is not None and trajectory in work.held and trajectory not in self._generating:
            begun: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            task = tasks.create_task(self._generate(trajectory, begun))
            operation = self.operation(trajectory)
            self._generating[trajectory] = _Generating(task, begun, operation)

    async def _generate(
        self, trajectory: TrajectoryId, begun: "asyncio.Future[bool]"
    ) -> Sample | None:
        """Generate a trajectory to its end and report it. If it is stopped before, return what
        there is, without a report."""
        rollout = self._rollout
        record = rollout.core.trajectories.get(trajectory)
        if record is None or record.state is TrajectoryState.ABORTING:
            # Its `Abort` follows.
            begun.set_result(False)
            return None
        prompt = rollout.store.prompt(record.group)
        before = rollout.store.response(trajectory).tokens
        sampling = replace(
            rollout.order.sampling,
            max_tokens=rollout.order.sampling.max_tokens - len(before),
            first_sample=trajectory,
            drawn_tokens=len(before),
        )
        tokens = [*prompt.tolist(), *before.tolist()]
        try:
            operation = self._generating[trajectory].operation
            try:
                await rollout.calls.generate(self.deployment, tokens, sampling, operation)
            finally:
                begun.set_result(True)
            sample = await rollout.calls.sample(operation)
        except PlexRLError as error:
            if await rollout.is_lost(self.instance):
                return None
            self._generating.pop(trajectory, None)
            LOG.warning("trajectory %d failed on %s: %s", trajectory, self.instance, error)
            rollout.handle(
                GenerationFailed(
                    trajectory=trajectory, instance=self.instance, reason=error.message
                )
            )
            return None
        is_cut = sample is None or sample.finish_reason == ABORTED
        if is_cut and trajectory in self._stopping:
            return sample
        self._generating.pop(trajectory, None)
        if is_cut or sample is None:
            reason = "its operation was cancelled by another than the rollout service"
            rollout.handle(
                GenerationFailed(trajectory=trajectory, instance=self.instance, reason=reason)
            )
            return None
        segments = await self._segments(sample)
        rollout.handle(
            Generated(trajectory=trajectory, instance=self.instance, segments=segments),
            parts=self._parts(trajectory, sample),
        )
        return None

    async def _stop(self, command: Interrupt | Abort) -> None:
        rollout = self._rollout
        found = [each for each in command.trajectories if each in self._generating]
        self._stopping.update(found)
        await asyncio.gather(*(self._cancel(each) for each in found))
        left = [self._generating[each].task for each in found if each in self._generating]
        await asyncio.gather(*left)
        stopped, parts = [], []
        for each in found:
            generating = self._generating.pop(each, None)
            if generating is None:
                continue  # it ended before, and was reported
            sample = generating.task.result()
            segments: tuple[Segment, ...] = ()
            if sample is not None and self._is_kept(each):
                segments = await self._segments(sample)
                parts += self._parts(each, sample)
            stopped.append(StoppedTrajectory(trajectory=each, segments=segments))
        self._stopping.difference_update(found)
        rollout.handle(Stopped(instance=self.instance, trajectories=tuple(stopped)), parts=parts)

    async def _cancel(self, trajectory: TrajectoryId) -> None:
        generating = self._generating.get(trajectory)
        if generating is None:
            return  # it has ended meanwhile
        # The order to end an operation that is unknown yet would be refused.
        if await asyncio.shield(generating.begun) and trajectory in self._generating:
            with suppress(NotFoundError):
                await self._rollout.calls.cancel(generating.operation)

    async def _pull(self, command: Pull) -> None:
        rollout = self._rollout
        order = rollout.order
        work = rollout.instances.work.get(self.instance)
        if work is None:
            return  # it is lost, and this task is about to end
        number = work.pulls + 1
        operation = f"{order.job}:{order.name}/p{self.instance}.{number}"
        try:
            step = await rollout.calls.pull(self.deployment, order.source, operation)
        except PlexRLError as error:
            await rollout.pull_failed(self.instance, operation, error)
            return
        version = await rollout.version_of(step)
        assert version >= command.version, "a sync gets what was published before it"
        rollout.handle(Pulled(instance=self.instance, version=version))

    async def _segments(self, sample: Sample) -> tuple[Segment, ...]:
        """The sample's tokens by version."""
        ends = [*(each.start for each in sample.weights[1:]), len(sample.tokens)]
        found = []
        for span, end in zip(sample.weights, ends, strict=True):
            if end > span.start:
                version = await self._rollout.version_of(span.trainer_step)
                found.append(
                    Segment(tokens=end - span.start, policy_version=version, kv_version=version)
                )
        return tuple(found)

    def _is_kept(self, trajectory: TrajectoryId) -> bool:
        record = self._rollout.core.trajectories.get(trajectory)
        return record is not None and record.state is not TrajectoryState.ABORTING

    def _parts(self, trajectory: TrajectoryId, sample: Sample) -> list[Part]:
        if not sample.tokens or not self._is_kept(trajectory):
            return []
        tokens = np.array(sample.tokens, dtype=np.int32)
        return [Part(trajectory, tokens, sample.logprobs, sample.finish_reason)]
