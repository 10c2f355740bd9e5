"""One asynchronous rollout of a job, live: events in, the coordinator's commands out.

An event takes effect in this order: the coordinator decides, the event is stored, its commands run
and the caller is answered. A process that ends in between loses nothing that was answered: the next
one replays the stored events, and runs the commands that no event has answered.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from plexrl.errors import ConflictError, InvalidRequestError, PlexRLError, UnknownJobError
from plexrl.model.kv_cache import BLOCK_TOKENS
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Command,
    Event,
    Generated,
    GroupAdded,
    GroupFiltered,
    InstanceJoined,
    ParametersPushed,
    ReportDroppedGroup,
    Rewarded,
    SnapshotTaken,
    Train,
)
from plexrl.rollout.coordinator.snapshot import InstanceSnapshot
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.instance_driver import InstanceDriver
from plexrl.rollout.service.instances import InstanceCommand, Instances
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.service.store import Part, RolloutStore
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    TrajectoryState,
)
from plexrl.wire.tensors import Array

LOG = logging.getLogger(__name__)

JOB_CHECK_S = 5.0
"""Interval at which the service asks whether the job has ended."""
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
TOKENS_OF_BLOCK = BLOCK_TOKENS["torch"]
Plain = dict[str, Any]


class LiveRollout:
    """One rollout. `run` drives it; the other methods answer its controller."""

    def __init__(
        self, order: RolloutOrder, store: RolloutStore, calls: ClusterCalls, cycle_s: float
    ) -> None:
        """Continues from the events in `store`."""
        self.order = order
        self.store = store
        self.calls = calls
        self.core = RolloutCoordinator(order.settings())
        self.instances = Instances()
        self.failure: PlexRLError | None = None
        """Why it cannot go on."""
        self.batch: Train | None = None
        """The latest batch."""
        self.dropped = 0
        """Groups that were not trained."""
        self.dropped_reason = ""
        """The latest reason."""
        self.next_group = SampleGroupId(0)
        self.unrewarded: dict[TrajectoryId, int] = {}
        """Generated trajectories without a reward, by the number of the event."""
        self._cycle_s = cycle_s
        self._requested = -1
        """Version of the latest batch that the trainer asked for."""
        self.steps = store.steps()
        """The trainer's step of each version."""
        self._drivers: dict[InstanceId, InstanceDriver] = {}
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""
        for seq, event in store.events():
            self._apply(seq, event, self.core.handle(event))

    @property
    def is_joined(self) -> bool:
        """Whether all instances have the weights of version 0 or later."""
        return len(self.instances.work) == len(self.order.instances)

    async def run(self) -> None:
        """Run until the job has ended, or the rollout fails."""
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self.job_end())
                rest = tasks.create_task(self._drive())
                await watch
                rest.cancel()
        except* PlexRLError as group:
            found = group.exceptions[0]
            while isinstance(found, BaseExceptionGroup):
                found = found.exceptions[0]
            assert isinstance(found, PlexRLError)
            LOG.error("rollout %s of job %s failed: %s", self.order.name, self.order.job, found)
            self.failure = found
            self._notify()

    async def _drive(self) -> None:
        for name in self.order.instances:
            if InstanceId(name) not in self.instances.work:
                await self._join(name)
        async with asyncio.TaskGroup() as tasks:
            for each in self.instances.work:
                self._drivers[each] = driver = InstanceDriver(each, self)
                tasks.create_task(driver.run())
            self._notify()
            while True:
                await asyncio.sleep(self._cycle_s)
                await self._cycle()

    async def _join(self, name: str) -> None:
        operation = f"{self.order.job}:{self.order.name}/p{name}.0"
        step = await self.calls.pull(name, self.order.source, operation)
        first = None if self.steps else (0, step)
        self.steps.setdefault(0, step)
        version = await self.version_of(step)
        engine = None
        while engine is None:
            # It has just loaded weights, and answers soon.
            await asyncio.sleep(self._cycle_s)
            engine = await self.calls.engine(name)
        budget = float(engine["blocks"] * TOKENS_OF_BLOCK)
        joined = InstanceJoined(instance=InstanceId(name), version=version, kv_budget=budget)
        self.handle(joined, step=first)

    async def job_end(self) -> None:
        """Return once the job has ended."""
        while True:
            try:
                if await self.calls.job_state() in FINAL:
                    return
            except UnknownJobError:
                return
            await asyncio.sleep(JOB_CHECK_S)

    def handle(
        self,
        event: Event,
        *,
        parts: Sequence[Part] = (),
        prompt: tuple[SampleGroupId, Array] | None = None,
        step: tuple[int, int] | None = None,
    ) -> None:
        """Take an event. Raises as `RolloutCoordinator.handle`; nothing has changed then."""
        commands = self.core.handle(event)
        if isinstance(event, SnapshotTaken) and not commands:
            return
        try:
            seq = self.store.append(event, parts=parts, prompt=prompt, step=step)
        except sqlite3.Error as error:
            # The coordinator is ahead of the store: the next process begins from the store.
            LOG.critical("%s cannot be written: %s; ending", self.store.path, error)
            os._exit(1)
        for command in self._apply(seq, event, commands):
            if command.instance in self._drivers:
                self._drivers[command.instance].add(command)
        self._forget(event, commands)
        self._notify()

    def _apply(self, seq: int, event: Event, commands: Sequence[Command]) -> list[InstanceCommand]:
        """What follows from an event in memory, also when it is replayed."""
        match event:
            case Generated():
                record = self.core.trajectories.get(event.trajectory)
                if record is not None and record.state is TrajectoryState.GENERATED:
                    self.unrewarded[event.trajectory] = seq
            case Rewarded():
                self.unrewarded.pop(event.trajectory, None)
            case GroupAdded():
                self.next_group = SampleGroupId(event.group + 1)
            case BatchRequested():
                self._requested = self.core.manager.buffers.next_version
            case _:
                pass
        for command in commands:
            if isinstance(command, Train):
                self.batch, self._requested = command, command.version
            elif isinstance(command, ReportDroppedGroup):
                self.dropped += 1
                self.dropped_reason = command.reason
                for each in self._members(command.group):
                    self.unrewarded.pop(each, None)
        return self.instances.note(event, commands)

    def _forget(self, event: Event, commands: Sequence[Command]) -> None:
        """Deletes the tokens of groups that were trained or dropped."""
        groups = [each.group for each in commands if isinstance(each, ReportDroppedGroup)]
        if isinstance(event, ParametersPushed) and self.batch is not None:
            groups += sorted({each.group for each in self.batch.batch})
        for group in groups:
            self.store.forget(group, self._members(group))
            self.instances.forget(self._members(group))

    def _members(self, group: SampleGroupId) -> list[TrajectoryId]:
        samples = self.order.settings().staleness.samples
        return [TrajectoryId(group * samples + index) for index in range(samples)]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _cycle(self) -> None:
        """Take a snapshot, if there is work."""
        lags = any(w.version < self.core.newest_version for w in self.instances.work.values())
        holds = any(work.held for work in self.instances.work.values())
        if not self.core.trajectories.waiting and not lags and not holds:
            return
        names = list(self.instances.work)
        engines = await asyncio.gather(*(self.calls.engine(each) for each in names))
        snapshots = [self._snapshot(*each) for each in zip(names, engines, strict=True)]
        self.handle(SnapshotTaken(instances=tuple(snapshots)))

    def _snapshot(self, instance: InstanceId, engine: Plain | None) -> InstanceSnapshot:
        """The load of an instance. The engine tells how many samples wait, and the blocks in use:
        the running trajectories share the tokens that the service has not seen yet."""
        work = self.instances.work[instance]
        held = list(work.held)
        records = [self.core.trajectories.get(each) for each in held]
        lengths = [0 if each is None else each.length for each in records]
        waits = 0 if engine is None else min(int(engine["waiting"]), len(held))
        runs = len(held) - waits
        if engine is not None and runs:
            unseen = engine["blocks_held"] * TOKENS_OF_BLOCK - sum(lengths[:runs])
            lengths[:runs] = [each + max(0, unseen) // runs for each in lengths[:runs]]
        return InstanceSnapshot(
            instance=instance,
            version=work.version,
            kv_cache=float(sum(lengths[:runs])),
            running=tuple(held[:runs]),
            running_tokens=tuple(lengths[:runs]),
            waiting=tuple(held[runs:]),
            waiting_tokens=tuple(lengths[runs:]),
            completed=work.completed,
        )

    async def version_of(self, trainer_step: int) -> int:
        """The version with these steps, once the controller has declared it."""
        while True:
            for version, step in self.steps.items():
                if step == trainer_step:
                    return version
            await self._changed.wait()

    def check(self) -> None:
        """Raises the error because of which the rollout cannot go on."""
        if self.failure is not None:
            raise self.failure

    def add_prompt(self, group: int, tokens: Array) -> bool:
        """Adds the prompt of a group. False: it is known, or there is no room for it now."""
        if group < self.next_group or not self.core.groups_wanted:
            return False
        added = GroupAdded(group=SampleGroupId(group), prompt_tokens=len(tokens))
        self.handle(added, prompt=(SampleGroupId(group), tokens))
        return True

    def reward(self, trajectory: int, reward: float | None, reason: str) -> None:
        """Takes the reward of a generated trajectory; without one its group is dropped. No effect
        on a trajectory that has a reward or has ended."""
        each = TrajectoryId(trajectory)
        if each not in self.unrewarded:
            return
        if reward is None:
            samples = self.order.settings().staleness.samples
            group = SampleGroupId(each // samples)
            self.handle(GroupFiltered(group=group, reason=reason or "no reward"))
        else:
            self.handle(Rewarded(trajectory=each, reward=reward))

    def request_batch(self, version: int, trainer_step: int) -> None:
        """The model has trained batches 0 to `version` - 1, and `trainer_step` steps.

        Raises:
            InvalidRequestError: that version is not the next one, or the step was declared for
                another version.
        """
        if version == self._requested:
            return
        following = self.core.manager.buffers.next_version
        if version != following:
            raise InvalidRequestError(
                f"batch {version} was requested; the next batch of rollout {self.order.name!r} is "
                f"{following}: request batches in order"
            )
        if version == 0 and trainer_step != self.steps[0]:
            raise ConflictError(
                f"the trainer is at step {trainer_step}, and the rollout began at step "
                f"{self.steps[0]}: create the rollout after the steps before it"
            )
        if version > 0 and version not in self.steps:
            if trainer_step in self.steps.values():
                raise InvalidRequestError(
                    f"batch {version} was requested at trainer step {trainer_step}, as an earlier "
                    "one: make an optimizer step with each batch"
                )
            self.steps[version] = trainer_step
            pushed = ParametersPushed(version=version)
            self.handle(pushed, step=(version, trainer_step))
        self.handle(BatchRequested())

    async def wait_for(self, is_done: Callable[[], bool], wait_s: float) -> None:
        """Wait until `is_done()`, or `wait_s` seconds are over. Raises as `check`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not is_done() and self.failure is None:
                    await self._changed.wait()
        self.check()
