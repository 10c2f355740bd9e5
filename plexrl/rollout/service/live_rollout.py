"""One asynchronous rollout of a job, live: events in, the coordinator's commands out.

An event takes effect in this order: the coordinator decides, the event is stored, its commands run
and the caller is answered. A process that ends in between loses nothing that was answered: the next
one restores the stored state, and runs the commands that no event has answered.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plexrl.client.data.results import SyncReport
from plexrl.errors import (
    ConflictError,
    InvalidRequestError,
    PlexRLError,
    RolloutFailedError,
    UnknownJobError,
)
from plexrl.rollout.coordinator.messages import (
    BatchRequested,
    Generated,
    GroupAdded,
    GroupFiltered,
    InstanceJoined,
    InstanceLost,
    ParametersPushed,
    PolicyChanged,
    PromptsEnded,
    Rewarded,
    RolloutEvent,
    SnapshotTaken,
    StepMeasured,
    StepsMeasured,
    TrainedTrajectory,
)
from plexrl.rollout.policies.elastic import StageClock
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.config import RolloutConfig
from plexrl.rollout.service.instances.balancing import InstanceCount
from plexrl.rollout.service.instances.driver import InstanceDriver
from plexrl.rollout.service.instances.membership import RolloutMember, check_members
from plexrl.rollout.service.instances.planning import plan_parallelism
from plexrl.rollout.service.instances.work import InstanceCommand
from plexrl.rollout.service.journal.state import RolloutState
from plexrl.rollout.service.journal.store import STEPS_KEPT, GeneratedPart, RolloutStore
from plexrl.rollout.service.journal.writer import JournalWriter
from plexrl.rollout.service.length_learning import learn_lengths
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.trajectories.record import (
    InstanceId,
    SampleGroupId,
    TrajectoryId,
    group_of,
)
from plexrl.rollout.trajectories.reward_waits import RewardWaits
from plexrl.wire.tensors import Array

if TYPE_CHECKING:
    from plexrl.rollout.instances.snapshot import InstanceSnapshot
    from plexrl.rollout.policies.length_ranker import LengthRanker

LOG = logging.getLogger(__name__)

JOB_CHECK_S = 5.0
"""Interval at which the service asks whether the job has ended."""
RATE_S = 60.0
CYCLE_S_MIN = 0.05
"""Least interval of snapshots."""
FINAL = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
FIT_S = 10.0
"""Least interval of fits of the cost model."""
FIT_STEPS_MAX = 64
"""Most measurements of one fit: the latest ones."""


@dataclass(slots=True)
class PullTimes:
    """Durations of an instance's pulls."""

    count: int = 0
    pause_s: float = 0.0
    """As in `SyncReport`, of all together, like `transfer_s`."""
    transfer_s: float = 0.0


class LiveRollout:
    """One rollout. `run` drives it; the other methods answer its controller."""

    def __init__(
        self, order: RolloutOrder, store: RolloutStore, calls: ClusterCalls, config: RolloutConfig
    ) -> None:
        """Continues from what is in `store`.

        Raises:
            CorruptStateError: the store cannot be read.
        """
        self.order = order
        self.store = store
        self.calls = calls
        self.writer = JournalWriter(store)
        store.keeps_examples = order.length_aware
        self.ranker: LengthRanker | None = None
        """It has learned from the latest batches."""
        self.failure: PlexRLError | None = None
        """Why it cannot go on."""
        self.steps = store.steps()
        """The trainer's step of each version."""
        self._state = state = RolloutState.stored(order, store)
        self.core = state.core
        self.instances = state.instances
        self.progress = state.progress
        self.loads: dict[InstanceId, InstanceSnapshot] = {}
        """The latest snapshot of each instance."""
        self.pulls: dict[str, PullTimes] = {}
        """By deployment, as far as this process has seen."""
        self.preemptions = 0
        """Preemptions of all instances, as far as this process has seen."""
        self.lone_step_s: float | None = None
        """Seconds of the latest measured decode step of a sample that runs alone."""
        self._rate: deque[tuple[float, int]] = deque()
        """Times, and tokens generated until then, of the last `RATE_S` seconds."""
        self._steps: deque[StepMeasured] = deque(maxlen=FIT_STEPS_MAX)
        """Measured since the latest fit."""
        self._fit_at = 0.0
        """Time of the next fit, on the loop's clock."""
        self._cycle_s = config.cycle_s
        self._changed = asyncio.Event()
        """Set, and replaced, at each change."""
        self._drivers = {
            instance: InstanceDriver(instance, self) for instance in self.instances.work
        }
        self._lost_s = config.instance_lost_s
        self.members = [
            self.make_member(each) for each in (*self.progress.names(order), *self.progress.ending)
        ]
        self.stages = StageClock()
        """When generation and training are busy."""
        self.reward_waits = RewardWaits(asyncio.get_running_loop().time())
        self.count = InstanceCount(self)
        """Runs the members, and decides how many there are."""

    def make_member(self, name: str) -> RolloutMember:
        """The deployment of this name, with its instance if that has joined."""
        found = [each for each in self._drivers.values() if each.deployment == name]
        driver = found[0] if found else None
        return RolloutMember(name, self, driver, self._lost_s, self._notify)

    @property
    def is_joined(self) -> bool:
        """Whether an instance has joined, and each other one of the order has too or is known to be
        lost; nobody waits for those that were added later."""
        present = [member for member in self.members if member.absence is None]
        joined = [each for each in present if each.instance is not None]
        expected = [each for each in present if each.name in self.order.instances]
        return bool(joined) and all(each.instance is not None for each in expected)

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
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.count.run())
            tasks.create_task(self._check_health())
            tasks.create_task(plan_parallelism(self))
            tasks.create_task(learn_lengths(self))
            while True:
                await asyncio.sleep(CYCLE_S_MIN)
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._cycle_s - CYCLE_S_MIN):
                        await self._wait_for_work()
                self._note_rate()
                await self._cycle()

    async def _wait_for_work(self) -> None:
        changed = self._changed
        while not self._is_work_waiting() or self._changed is changed:
            await self._changed.wait()

    async def _check_health(self) -> None:
        """Raises RolloutFailedError: no instance is left, or nothing but failures comes."""
        while True:
            check_members(self.order, self.members)
            self._check_failures()
            await self._changed.wait()

    def _check_failures(self) -> None:
        progress, limit = self.progress, self.order.failed_prompts_limit
        for count, what in (
            (progress.failed_groups, "generations"),
            (progress.groups_without_reward, "rewards"),
        ):
            if count >= limit:
                raise RolloutFailedError(
                    f"rollout {self.order.name!r} has dropped {count} prompts one after another "
                    f"because their {what} failed, the last one because: "
                    f"{progress.dropped_reason}: mend the cause, and call job.rollout "
                    "again with the same arguments to continue",
                    rollout=self.order.name,
                    dropped=count,
                    reason=progress.dropped_reason,
                )

    async def job_end(self) -> None:
        """Return once the job has ended."""
        while True:
            try:
                if await self.calls.job_state() in FINAL:
                    return
            except UnknownJobError:
                return
            except PlexRLError as error:
                LOG.warning("the state of job %s is not known now: %s", self.order.job, error)
            await asyncio.sleep(JOB_CHECK_S)

    def handle(
        self,
        event: RolloutEvent,
        *,
        parts: Sequence[GeneratedPart] = (),
        prompt: tuple[SampleGroupId, Array] | None = None,
        step: tuple[int, int] | None = None,
        order: RolloutOrder | None = None,
    ) -> None:
        """Take an event: its commands run once it is durable. Raises as
        `RolloutCoordinator.handle`; nothing has changed then."""
        taken = self._state.take(
            event, self.store, parts=parts, prompt=prompt, step=step, order=order
        )
        # What waits for newer weights keeps nobody busy.
        busy = any(work.held or work.unanswered for work in self.instances.work.values())
        now = asyncio.get_running_loop().time()
        self.stages.note(now, generates=busy)
        if isinstance(event, Generated):
            self.reward_waits.generated(event.trajectory, self.progress.unrewarded, now)
        if taken is not None:
            entry, orders = taken
            self.writer.add(entry, lambda: self._release(orders))

    def store_state(self) -> None:
        """Replace the stored events by the state, when nothing is left to write. Raises as
        `RolloutStore.write`."""
        if self.store.tail_events:
            self.store.write_snapshot(self._state.seq, self._state.plain())

    async def settled(self) -> None:
        """Wait until what was decided before is durable."""
        await self.writer.settled()

    def _release(self, orders: Sequence[InstanceCommand]) -> None:
        """An event is durable: its commands run, and who waits for it goes on."""
        for command in orders:
            if command.instance in self._drivers:
                self._drivers[command.instance].add(command)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def joined(self, event: InstanceJoined, trainer_step: int) -> InstanceDriver:
        """An instance has weights with so many steps of the trainer."""
        first = self.order.first_batch
        is_first = not self.steps
        self.steps.setdefault(first, trainer_step)
        self.handle(event, step=(first, trainer_step) if is_first else None)
        driver = self._drivers[event.instance] = InstanceDriver(event.instance, self)
        return driver

    def lost(self, event: InstanceLost) -> None:
        """An instance has ended."""
        self._drivers.pop(event.instance, None)
        self.handle(event)

    async def is_lost(self, instance: InstanceId) -> bool:
        """Whether the instance has ended; the coordinator knows it then."""
        member = self._member(instance)
        return member is None or await member.is_gone()

    def pulled(self, deployment: str, report: SyncReport) -> None:
        """The weights of an instance were set."""
        times = self.pulls.setdefault(deployment, PullTimes())
        times.count += 1
        times.pause_s += report["pause_s"]
        times.transfer_s += report["transfer_s"]

    async def pull_failed(self, instance: InstanceId, operation: str, error: PlexRLError) -> None:
        """The weights of an instance could not be set."""
        if (member := self._member(instance)) is not None:
            await member.pull_failed(operation, error)

    def _member(self, instance: InstanceId) -> RolloutMember | None:
        return next((member for member in self.members if member.instance == instance), None)

    def _is_work_waiting(self) -> bool:
        lags = any(w.version < self.core.newest_version for w in self.instances.work.values())
        return bool(self.instances.work) and (lags or bool(self.core.trajectories.waiting))

    def tokens_per_s(self) -> float:
        """Generated tokens of the last `RATE_S` seconds, by second; less soon after a start."""
        before = self._rate[0][1] if self._rate else self.progress.generated.tokens
        return (self.progress.generated.tokens - before) / RATE_S

    def _note_rate(self) -> None:
        now = asyncio.get_running_loop().time()
        self._rate.append((now, self.progress.generated.tokens))
        while self._rate[0][0] < now - RATE_S:
            self._rate.popleft()

    async def _cycle(self) -> None:
        """Take a snapshot, if there is work."""
        holds = any(work.held for work in self.instances.work.values())
        if not self._is_work_waiting() and not holds:
            return
        drivers = list(self._drivers.values())
        found = await asyncio.gather(*(self.calls.engines(each.deployment) for each in drivers))
        for driver, engines in zip(drivers, found, strict=True):
            self.preemptions += driver.preempted(engines)
        # All at one moment: a snapshot with the end of a trajectory in one instance only is void.
        loads = [
            driver.load(engines)
            for driver, engines in zip(drivers, found, strict=True)
            if driver.instance in self.instances.work
        ]
        snapshots = [each for each, _ in loads]
        steps = [step for _, measured in loads for step in measured]
        self.loads = {snapshot.instance: snapshot for snapshot in snapshots}
        self._measured(steps)
        self.handle(SnapshotTaken(instances=tuple(snapshots)))

    def _measured(self, steps: Sequence[StepMeasured]) -> None:
        """Fit the cost model to what decode steps take, once in a while: each fit is an event."""
        self._steps.extend(steps)
        for step in steps:
            if step.running == 1:
                self.lone_step_s = step.seconds
        now = asyncio.get_running_loop().time()
        if self._steps and now >= self._fit_at:
            self._fit_at = now + FIT_S
            self.handle(StepsMeasured(steps=tuple(self._steps)))
            self._steps.clear()

    async def version_of(self, trainer_step: int) -> int:
        """The version with these steps, once the controller has declared it; weights between two
        versions count as the older one."""
        while self.steps:
            if trainer_step <= max(self.steps.values()):
                older = [each for each, step in self.steps.items() if step <= trainer_step]
                return max(older, default=min(self.steps))
            await self._changed.wait()
        # The first weights of all.
        return self.order.first_batch

    def check(self) -> None:
        """Raises the error because of which the rollout cannot go on."""
        if self.failure is not None:
            raise self.failure

    def add_prompt(self, group: int, tokens: Array) -> bool:
        """Adds the prompt of a group. False: it is known, or there is no room for it now."""
        if group < self.progress.next_group or not self.core.groups_wanted:
            return False
        expected = 0
        if self.order.length_aware and self.ranker is not None:
            expected = self.ranker.reliable_tokens(tokens)
        added = GroupAdded(
            group=SampleGroupId(group), prompt_tokens=len(tokens), expected_tokens=expected
        )
        self.handle(added, prompt=(SampleGroupId(group), tokens))
        return True

    def end_prompts(self) -> None:
        """The controller has no more prompts."""
        if not self.core.rounds.held.is_ended:
            self.handle(PromptsEnded())

    def change_policy(self, order: RolloutOrder) -> None:
        """Go on with the policy of an order that is equal otherwise. Raises InvalidRequestError:
        the rollout cannot have it."""
        settings = order.settings()
        changed = PolicyChanged(
            bound=settings.staleness,
            routing=settings.routing,
            scale_down=settings.scale_down,
            adaptive_tp=settings.adaptive_tp,
            fixed_over_launch=settings.fixed_over_launch,
        )
        self.handle(changed, order=order)
        self.store.keeps_examples = order.length_aware
        self.order = order

    def reward(self, trajectory: int, event: int, reward: float | None, reason: str) -> None:
        """Takes the reward of a trajectory whose generation ended with the event of this number;
        without a reward its group is dropped. No effect on a trajectory that has a reward or has
        ended, also if it was generated anew."""
        each = TrajectoryId(trajectory)
        if self.progress.unrewarded.get(each) != event:
            return
        if reward is None:
            group = group_of(each, self.progress.group_size)
            self.handle(GroupFiltered(group=group, reason=reason or "no reward"))
        else:
            self.handle(Rewarded(trajectory=each, reward=reward))

    def check_batch(self, version: int, trainer_step: int) -> None:
        """Check that a batch may be requested when the trainer has made so many steps.

        Raises:
            InvalidRequestError: that version is not the next one, or the trainer made no step.
            ConflictError: the trainer is not at the step at which it was, or no instance has
                joined.
        """
        if not self.steps:
            raise ConflictError(
                f"no instance of rollout {self.order.name!r} has joined yet: repeat its creation, "
                "which waits for them"
            )
        if version in self.steps and self.steps[version] != trainer_step:
            raise ConflictError(
                f"the trainer is at step {trainer_step}, and at batch {version} of rollout "
                f"{self.order.name!r} it was at step {self.steps[version]}: for a model that was "
                "set to other weights, create a rollout of another name"
            )
        if version == self.progress.requested:
            return
        following = self.core.manager.buffers.next_version
        if version != following:
            raise InvalidRequestError(
                f"batch {version} was requested; the next batch of rollout {self.order.name!r} is "
                f"{following}: request batches in order"
            )
        if version not in self.steps and trainer_step <= (before := max(self.steps.values())):
            raise InvalidRequestError(
                f"batch {version} was requested at trainer step {trainer_step}, and the batch "
                f"before it at step {before}: make an optimizer step with each batch"
            )

    def request_batch(self, version: int, trainer_step: int) -> None:
        """The model has trained all batches before `version`, and `trainer_step` steps. Raises as
        `check_batch`."""
        self.check_batch(version, trainer_step)
        if version == self.progress.requested:
            return
        times = self.stages.begin_step(asyncio.get_running_loop().time())
        if times is not None:
            self.count.step_ended(times)
        if version not in self.steps:
            self.steps[version] = trainer_step
            self.steps.pop(version - STEPS_KEPT, None)
            pushed = ParametersPushed(version=version)
            self.handle(pushed, step=(version, trainer_step))
        self.handle(BatchRequested())

    def is_complete(self, version: int) -> bool:
        """Whether the latest batch has this version."""
        batch = self.progress.batch
        return batch is not None and batch.version == version

    def complete_samples(self, version: int) -> list[TrainedTrajectory]:
        """The samples of the groups of a requested batch that are complete; by group."""
        batch = self.progress.batch
        if batch is not None and batch.version == version:
            return list(batch.batch)
        records = [
            self.core.trajectories.get(member)
            for members in self.core.manager.complete_groups().values()
            for member in members
        ]
        return [TrainedTrajectory.of(record) for record in records if record is not None]

    async def wait_for(self, is_done: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until `is_done()`, or for `wait_s` seconds if given. What led to that may not be
        durable yet. Raises as `check`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not is_done() and self.failure is None:
                    await self._changed.wait()
        self.check()
