"""Carries out the commands of one instance, in their order.

The trajectories of one `Route` are the rows of one `generate` operation, whose rows are read one by
one as they end. A stop ends some rows of it, and the others go on. A row that is repeated, because
the instance or this process was restarted, is not reported twice.
"""

import asyncio
import logging
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Protocol

import numpy as np

from plexrl.client.data.results import Sample, SyncReport
from plexrl.errors import ExecutionError, NotFoundError, PlexRLError, RolloutFailedError
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    Abort,
    Generated,
    GenerationFailed,
    Interrupt,
    Pull,
    Pulled,
    RolloutEvent,
    Route,
    StepMeasured,
    Stopped,
    StoppedTrajectory,
    SwitchTp,
    TpSwitched,
)
from plexrl.rollout.instances.snapshot import InstanceSnapshot
from plexrl.rollout.service.cluster_calls import ClusterCalls, RowRequest
from plexrl.rollout.service.instances.work import InstanceCommand, Instances, InstanceWork
from plexrl.rollout.service.journal.store import ABORTED, GeneratedPart, RolloutStore
from plexrl.rollout.service.order import RolloutOrder, deployment_of
from plexrl.rollout.trajectories.record import (
    InstanceId,
    TrajectoryId,
    TrajectorySegment,
    TrajectoryState,
)
from plexrl.wire.messages.workers import EngineLoadView

LOG = logging.getLogger(__name__)
SWITCH_TIMEOUT_S = 30.0
"""An engine that restarts meanwhile begins in its smallest groups anyway."""


class Surroundings(Protocol):
    """The rollout of an instance."""

    order: RolloutOrder
    core: RolloutCoordinator
    store: RolloutStore
    calls: ClusterCalls
    instances: Instances

    def handle(self, event: RolloutEvent, *, parts: Sequence[GeneratedPart] = ()) -> None:
        """Take an event."""
        ...

    async def settled(self) -> None:
        """Wait until what was decided before is durable."""
        ...

    async def version_of(self, trainer_step: int) -> int:
        """The version with these steps, once the controller has declared it; weights between two
        versions count as the older one."""
        ...

    async def is_lost(self, instance: InstanceId) -> bool:
        """Whether the instance has ended; the coordinator knows it then."""
        ...

    def pulled(self, deployment: str, report: SyncReport) -> None:
        """The weights of an instance were set."""
        ...

    async def pull_failed(self, instance: InstanceId, operation: str, error: PlexRLError) -> None:
        """Its weights could not be set: it is lost, and this driver is cancelled."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Generation:
    """The operation of one `Route`."""

    operation: str
    trajectories: tuple[TrajectoryId, ...]
    """By row."""
    running: set[TrajectoryId]
    """Trajectories that have not ended."""
    stopping: set[TrajectoryId] = field(default_factory=set)
    stopped: dict[TrajectoryId, Sample | None] = field(default_factory=dict)
    """The samples of stopped trajectories as far as they are kept; None: none of their tokens
    is."""
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the cluster has the operation, or will not get it."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, when a trajectory has ended."""

    def rows(self, trajectories: Collection[TrajectoryId]) -> list[int]:
        """Their rows, ascending."""
        return [row for row, each in enumerate(self.trajectories) if each in trajectories]

    def end(self, trajectory: TrajectoryId) -> None:
        """A trajectory has ended."""
        self.running.discard(trajectory)
        self.changed.set()
        self.changed = asyncio.Event()

    def stop(self, trajectory: TrajectoryId, sample: Sample | None) -> None:
        """A trajectory has ended because it was stopped."""
        self.stopped[trajectory] = sample
        self.end(trajectory)


class InstanceDriver:
    """One instance. Its generations run concurrently, its other commands one after another."""

    def __init__(self, instance: InstanceId, rollout: Surroundings) -> None:
        """Begins with the commands that an earlier process left."""
        self.instance = instance
        self.deployment = deployment_of(instance)
        self._rollout = rollout
        self._queue: asyncio.Queue[InstanceCommand] = asyncio.Queue()
        self._at: dict[TrajectoryId, _Generation] = {}
        """The generation of each trajectory that is not reported as ended."""
        work = rollout.instances.work[instance]
        self._begun = work.begun
        """Number of the latest `Route` that is begun."""
        self._left = [number for number in work.routes if number <= self._begun]
        self._steps_seen: dict[int, int] = {}
        """Number of the latest measured steps, by replica."""
        self._preempted: list[int] = []
        """Preemptions that each replica has counted."""
        for command in work.unanswered:
            self._queue.put_nowait(command)
        self._following: InstanceCommand | None = None
        """The next command, if it was looked at already."""

    def add(self, command: InstanceCommand) -> None:
        """Append a command."""
        self._queue.put_nowait(command)

    def operations(self) -> list[str]:
        """Ids of the generations that have not ended."""
        return sorted({generation.operation for generation in self._at.values()})

    async def run(self) -> None:
        """Carry out commands until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in self._left:
                self._begin(tasks, number, is_repeated=True)
            while True:
                command, self._following = self._following or await self._queue.get(), None
                match command:
                    case Route():
                        self._begun += 1
                        self._begin(tasks, self._begun, is_repeated=False)
                    case Interrupt() | Abort():
                        await self._fetch_before_pull()
                        await self._stop(command)
                    case Pull():
                        await self._pull(command)
                    case SwitchTp():
                        await self._switch_tp(command)

    def _begin(self, tasks: asyncio.TaskGroup, number: int, *, is_repeated: bool) -> None:
        order, work = self._rollout.order, self._rollout.instances.work.get(self.instance)
        if work is None or number not in work.routes:
            return  # the instance is lost, or all trajectories have ended
        trajectories = work.routes[number]
        generation = _Generation(
            operation=self._rollout.store.operation(order, f"g{self.instance}.{number}"),
            trajectories=trajectories,
            running={
                trajectory for trajectory in trajectories if work.held.get(trajectory) == number
            },
        )
        self._at.update(dict.fromkeys(generation.running, generation))
        tasks.create_task(self._generate(generation, is_repeated=is_repeated))

    async def _generate(self, generation: _Generation, *, is_repeated: bool) -> None:
        """Generate the trajectories of a `Route` to their ends and report each one that was not
        stopped."""
        calls, operation = self._rollout.calls, generation.operation
        try:
            is_known = is_repeated and await calls.is_known(operation)
            # The request is the same after a restart: it depends on nothing that may be lost.
            await self._rollout.settled()
            for each in [
                trajectory
                for trajectory in generation.trajectories
                if trajectory in generation.running
            ]:
                if not self._is_kept(each):
                    generation.stop(each, None)  # its `Abort` follows
            if generation.running:
                if not is_known:
                    await calls.generate(
                        self.deployment,
                        self._requests(generation),
                        self._rollout.order.sampling,
                        operation,
                    )
                generation.submitted.set()
                await self._read(generation)
        except PlexRLError as error:
            if await self._rollout.is_lost(self.instance):
                return
            LOG.warning("%s failed on %s: %s", operation, self.instance, error)
            self._fail(generation, generation.running, error.message)
        finally:
            generation.submitted.set()

    async def _read(self, generation: _Generation) -> None:
        """Take the rows of an operation until all have ended."""
        calls = self._rollout.calls
        async for rows in calls.rows(generation.operation):
            if rows is None:
                # The operation runs again from its start; what has ended is not repeated.
                ended = set(generation.trajectories) - generation.running
                if ended:
                    await calls.stop_rows(generation.operation, generation.rows(ended))
                continue
            for row, sample in rows:
                trajectory = generation.trajectories[row]
                if trajectory in generation.running:
                    await self._take(generation, trajectory, sample)
            if not generation.running:
                return
        raise ExecutionError(f"{generation.operation} ended without all of its rows")

    async def _take(
        self, generation: _Generation, trajectory: TrajectoryId, sample: Sample
    ) -> None:
        """A row has ended."""
        if sample.finish_reason != ABORTED:
            segments = await self._segments(sample)
            if trajectory not in generation.running:
                return
            self._report(
                generation,
                Generated(trajectory=trajectory, instance=self.instance, segments=segments),
                self._parts(trajectory, sample),
            )
        elif trajectory in generation.stopping:
            generation.stop(trajectory, sample)
        else:
            reason = "it was cancelled by another than the rollout service"
            self._fail(generation, {trajectory}, reason)

    def _fail(
        self, generation: _Generation, trajectories: Collection[TrajectoryId], reason: str
    ) -> None:
        """Trajectories could not be generated. Nothing is known of those that are to be stopped."""
        for each in [
            trajectory for trajectory in generation.trajectories if trajectory in trajectories
        ]:
            if each in generation.stopping:
                generation.stop(each, None)
            else:
                failed = GenerationFailed(trajectory=each, instance=self.instance, reason=reason)
                self._report(generation, failed)

    def _report(
        self,
        generation: _Generation,
        event: Generated | GenerationFailed,
        parts: Sequence[GeneratedPart] = (),
    ) -> None:
        del self._at[event.trajectory]
        self._rollout.handle(event, parts=parts)
        generation.end(event.trajectory)

    async def _stop(self, command: Interrupt | Abort) -> None:
        found: dict[_Generation, list[TrajectoryId]] = {}
        for trajectory in command.trajectories:
            if (generation := self._at.get(trajectory)) is not None:
                found.setdefault(generation, []).append(trajectory)
        for generation, trajectories in found.items():
            generation.stopping.update(trajectories)
        await asyncio.gather(*(self._stop_rows(*each) for each in found.items()))
        stopped, parts = [], []
        for trajectory in command.trajectories:
            # Otherwise it ended before, and was reported.
            if (generation := self._at.pop(trajectory, None)) is not None:
                sample = generation.stopped.pop(trajectory)
                segments: tuple[TrajectorySegment, ...] = ()
                if sample is not None and self._is_kept(trajectory):
                    segments = await self._segments(sample)
                    parts += self._parts(trajectory, sample)
                stopped.append(StoppedTrajectory(trajectory=trajectory, segments=segments))
        event = Stopped(instance=self.instance, trajectories=tuple(stopped))
        self._rollout.handle(event, parts=parts)

    async def _stop_rows(
        self, generation: _Generation, trajectories: Collection[TrajectoryId]
    ) -> None:
        """Stop trajectories, and wait until they have ended."""
        # The order to end rows of an operation that is unknown yet would be refused.
        await generation.submitted.wait()
        if rows := generation.rows(generation.running.intersection(trajectories)):
            is_pending = False
            with suppress(NotFoundError):
                is_pending = await self._rollout.calls.stop_rows(generation.operation, rows)
            if is_pending:
                for trajectory in generation.running.intersection(trajectories):
                    generation.stop(trajectory, None)
        while generation.running.intersection(trajectories):
            await generation.changed.wait()

    async def _fetch_before_pull(self) -> None:
        """If a pull follows: begin it, and wait until what it needs from other nodes is here. Until
        then the generations that the pull waits for go on (StreamRL §4.1)."""
        with suppress(asyncio.QueueEmpty):
            self._following = self._queue.get_nowait()
        work = self._rollout.instances.work.get(self.instance)
        if not isinstance(self._following, Pull) or work is None:
            return
        calls, order = self._rollout.calls, self._rollout.order
        operation = self._pull_operation(work)
        try:
            # What was to be drawn with the former weights comes first.
            await asyncio.gather(
                *(generation.submitted.wait() for generation in {*self._at.values()})
            )
            await calls.pushed(self._rollout.store.operation(order, f"v{self._following.version}"))
            await calls.begin_pull(self.deployment, order.source, operation, published=True)
            await calls.arrived(self.deployment, operation)
        except PlexRLError as error:
            LOG.info("%s is not fetched ahead: %s", operation, error)

    def _pull_operation(self, work: InstanceWork) -> str:
        name = f"p{self.instance}.{work.pulls + 1}"
        return self._rollout.store.operation(self._rollout.order, name)

    async def _pull(self, command: Pull) -> None:
        rollout = self._rollout
        order = rollout.order
        work = rollout.instances.work.get(self.instance)
        if work is None:
            return  # it is lost, and this task is about to end
        operation = self._pull_operation(work)
        try:
            await rollout.calls.pushed(rollout.store.operation(order, f"v{command.version}"))
            report = await rollout.calls.pull(
                self.deployment, order.source, operation, published=True
            )
        except PlexRLError as error:
            await rollout.pull_failed(self.instance, operation, error)
            return
        version = await rollout.version_of(int(report["trainer_step"]))
        if version < command.version:
            raise RolloutFailedError(
                f"instance {self.instance} got the weights of version {version}, and version "
                f"{command.version} was published: the trainer was set to other weights; create a "
                "rollout of another name",
                rollout=order.name,
            )
        rollout.pulled(self.deployment, report)
        rollout.handle(Pulled(instance=self.instance, version=version))

    async def _switch_tp(self, command: SwitchTp) -> None:
        """A switch only saves time: an engine that cannot make it now goes on as it is."""
        has_switched = True
        try:
            async with asyncio.timeout(SWITCH_TIMEOUT_S):
                await self._rollout.calls.switch_tp(self.deployment, command.tp, command.kv)
        except (TimeoutError, PlexRLError) as error:
            LOG.warning("%s stays in its groups: %s", self.instance, error)
            has_switched = False
        self._rollout.handle(TpSwitched(instance=self.instance, has_switched=has_switched))

    def _requests(self, generation: _Generation) -> list[RowRequest]:
        """The requests of a generation, by row. A row that has ended, or whose tokens are not kept,
        draws one token in its place, which nobody reads: so a row keeps its number."""
        rollout, found = self._rollout, []
        for trajectory in generation.trajectories:
            record = rollout.core.trajectories.get(trajectory)
            if trajectory not in generation.running or record is None:
                found.append(RowRequest(tokens=[0], max_tokens=1, number=trajectory, drawn=0))
                continue
            before = rollout.store.response(trajectory).tokens
            tokens = [*rollout.store.prompt(record.group).tolist(), *before.tolist()]
            most = rollout.order.sampling.max_tokens - len(before)
            found.append(
                RowRequest(tokens=tokens, max_tokens=most, number=trajectory, drawn=len(before))
            )
        return found

    async def _segments(self, sample: Sample) -> tuple[TrajectorySegment, ...]:
        """The sample's tokens by version."""
        ends = [*(weight.start for weight in sample.weights[1:]), len(sample.tokens)]
        found = []
        for span, end in zip(sample.weights, ends, strict=True):
            if end > span.start:
                version = await self._rollout.version_of(span.trainer_step)
                found.append(
                    TrajectorySegment(
                        tokens=end - span.start, policy_version=version, kv_version=version
                    )
                )
        return tuple(found)

    def _is_kept(self, trajectory: TrajectoryId) -> bool:
        record = self._rollout.core.trajectories.get(trajectory)
        return record is not None and record.state is not TrajectoryState.ABORTING

    def _parts(self, trajectory: TrajectoryId, sample: Sample) -> list[GeneratedPart]:
        if not sample.tokens or not self._is_kept(trajectory):
            return []
        tokens = np.array(sample.tokens, dtype=np.int32)
        drawn_by = sample.sampling_logprobs
        return [GeneratedPart(trajectory, tokens, sample.logprobs, sample.finish_reason, drawn_by)]

    def load(
        self, engines: Sequence[EngineLoadView]
    ) -> tuple[InstanceSnapshot, tuple[StepMeasured, ...]]:
        """The instance's load, from that of its engines, and the decode steps that were measured
        since the last call. It is not lost.

        A trajectory that no engine knows has just ended, or is about to begin: it counts as running
        with the tokens known before. While the instance is offloaded, it waits.
        """
        work = self._rollout.instances.work[self.instance]
        generations = {each.operation: each for each in self._at.values()}
        running, waiting = dict[TrajectoryId, int](), dict[TrajectoryId, int]()
        groups: dict[TrajectoryId, int] = {}
        for engine in engines:
            places = engine.get("groups") or repeat(0)
            for (operation, row, tokens, runs), group in zip(engine["rows"], places, strict=False):
                if (generation := generations.get(operation)) is not None:
                    trajectory = generation.trajectories[row]
                    if trajectory in work.held:
                        (running if runs else waiting)[trajectory] = tokens
                        groups[trajectory] = group
        for each in [t for t in work.held if t not in running and t not in waiting]:
            record = self._rollout.core.trajectories.get(each)
            (running if engines else waiting)[each] = 0 if record is None else record.length
        snapshot = InstanceSnapshot(
            instance=self.instance,
            version=work.version,
            kv_cache=float(sum(running.values())),
            running=tuple(running),
            running_tokens=tuple(running.values()),
            waiting=tuple(waiting),
            waiting_tokens=tuple(waiting.values()),
            completed=work.completed,
            # One that was offloaded and holds nothing is loaded again only if it gets work.
            serves=bool(engines) or not work.held,
            tp=engines[0].get("tp", 0) if len(engines) == 1 else 0,
            groups=tuple(groups.get(each, 0) for each in running),
        )
        return snapshot, self._measured(engines)

    def preempted(self, engines: Sequence[EngineLoadView]) -> int:
        """Preemptions since the last call, from the load of its engines."""
        before, self._preempted = self._preempted, [engine["preemptions"] for engine in engines]
        if len(before) != len(engines):
            return 0  # they were not known before
        pairs = zip(self._preempted, before, strict=True)
        # An engine that was restarted counts from 0.
        return sum(now - last if now >= last else now for now, last in pairs)

    def _measured(self, engines: Sequence[EngineLoadView]) -> tuple[StepMeasured, ...]:
        found = []
        for replica, engine in enumerate(engines):
            seen = self._steps_seen.get(replica, 0)
            steps = engine["steps"]
            if steps and steps[-1][0] < seen:
                seen = 0  # the engine was restarted
            # Samples are routed to engines that have their smallest groups.
            smallest = next(iter(engine.get("tp_sizes", ())), None)
            for number, running, kv_tokens, seconds, tp, _ in steps:
                if number > seen and smallest in (None, tp):
                    found.append(StepMeasured(kv_cache=kv_tokens, running=running, seconds=seconds))
            if steps:
                self._steps_seen[replica] = steps[-1][0]
        return tuple(found)
