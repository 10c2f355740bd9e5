"""Adds and removes instances, so that generation takes as long as training (StreamRL §4.2).

A change is an event first. Once that is durable, its deployment is created or ended, and both may
be repeated: a process that ends in between leaves no deployment over, and makes none twice. A name
is used once.

An instance that is removed gets nothing more and returns what it has before its deployment ends. An
added one takes part once it has weights; the round does not wait for it. If the cluster refuses its
deployment, it is given up.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from plexrl.errors import (
    CapacityError,
    ConflictError,
    InvalidRequestError,
    JobEndedError,
    ModelDoesNotFitError,
    NotFoundError,
    PermissionDeniedError,
    PlexRLError,
    QuotaExceededError,
    UnknownDeploymentError,
)
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import InstanceLost, InstancesChosen
from plexrl.rollout.policies.elastic import (
    InstanceBounds,
    InstanceChange,
    InstanceDecision,
    StageBalance,
    StepTimes,
    StepWorkload,
    generation_s,
)
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.instances.membership import RolloutMember
from plexrl.rollout.service.instances.work import Instances
from plexrl.rollout.service.journal.progress import RolloutProgress
from plexrl.rollout.service.order import RolloutOrder
from plexrl.rollout.trajectories.record import InstanceId

LOG = logging.getLogger(__name__)

RETRY_S = 1.0
"""Pause before a call is repeated that failed for a reason that may pass."""
REFUSALS = (
    *(CapacityError, ConflictError, InvalidRequestError, ModelDoesNotFitError),
    *(NotFoundError, PermissionDeniedError, QuotaExceededError),
)
"""A deployment is not created, and no repetition would change that."""


class Balanced(Protocol):
    """The rollout whose instances change."""

    order: RolloutOrder
    calls: ClusterCalls
    core: RolloutCoordinator
    instances: Instances
    progress: RolloutProgress
    members: list[RolloutMember]

    def handle(self, event: InstancesChosen) -> None:
        """Takes the event."""
        ...

    def lost(self, event: InstanceLost) -> None:
        """Takes the event, and forgets the driver."""
        ...

    def make_member(self, name: str) -> RolloutMember:
        """A further deployment of the rollout."""
        ...

    async def settled(self) -> None:
        """Wait until what was decided before is durable."""
        ...

    async def wait_for(self, is_done: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until `is_done()`, or `wait_s` seconds are over."""
        ...


class InstanceCount:
    """Runs the members of a rollout, and decides after each step how many there are."""

    def __init__(self, rollout: Balanced) -> None:
        self._rollout = rollout
        self._balance = StageBalance()
        self._joined: frozenset[InstanceId] = frozenset()
        """Instances that took part when the present step began."""
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._creating: dict[str, asyncio.Future[None]] = {}
        """The latest request that creates each added deployment."""

    async def run(self) -> None:
        """Run all members until cancelled. Raises as `RolloutMember.run`."""
        progress, members = self._rollout.progress, list(self._rollout.members)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for member in members:
                    is_ending = member.name in progress.ending
                    if not is_ending or member.instance is not None:
                        self._start(member)
                    if is_ending:
                        self._tasks.create_task(self._end(member))
                await asyncio.Event().wait()
        finally:
            for creating in self._creating.values():
                creating.cancel()

    def step_ended(self, times: StepTimes) -> None:
        """A step of the trainer took these times."""
        rollout, joined = self._rollout, self._generating()
        if joined != self._joined:
            self._joined = joined
            self._balance.restart()
            return
        lengths = rollout.core.trajectories.lengths.recent
        if self._tasks is None or rollout.order.bounds is None or not joined or not lengths:
            return
        budget = min(rollout.instances.work[instance].kv_budget for instance in joined)
        groups = rollout.core.trajectories.groups.values()
        work = StepWorkload(
            samples=rollout.order.prompts * rollout.order.samples,
            prompt_tokens=sum(group.prompt_tokens for group in groups) / max(1, len(groups)),
            lengths=lengths,
        )
        model = rollout.core.cost_model
        decision = self._balance.decide(
            times,
            len(joined),
            rollout.order.bounds,
            lambda count: generation_s(model, work, count, budget),
        )
        if decision is not None:
            self._apply(decision, rollout.order.bounds)

    def _apply(self, decision: InstanceDecision, bounds: InstanceBounds) -> None:
        names = self._rollout.progress.names(self._rollout.order)
        absent = {m.name for m in self._rollout.members if m.instance is None}
        # Those that wait for GPUs from their beginning.
        unborn = [name for name in names if name in absent and self._is_unborn(name)]
        if decision.change is InstanceChange.ADD:
            if not absent & set(names) and len(names) < bounds.most:
                self._add(names, _reason(decision))
        elif unborn:
            self._remove(names, unborn[-1], "it has not begun, and is needed no longer")
        elif decision.change is InstanceChange.REMOVE and len(names) > bounds.least:
            lost = [name for name in names if name in absent]
            self._remove(names, (lost or names)[-1], _reason(decision))

    def _is_unborn(self, name: str) -> bool:
        progress, order = self._rollout.progress, self._rollout.order
        return name not in order.instances and name not in progress.joins

    def _generating(self) -> frozenset[InstanceId]:
        """Joined instances that are to stay."""
        ending = self._rollout.progress.ending
        return frozenset(
            member.instance
            for member in self._rollout.members
            if member.instance is not None and member.name not in ending
        )

    def _add(self, names: tuple[str, ...], reason: str) -> None:
        rollout = self._rollout
        order, number = rollout.order, len(rollout.order.instances) + rollout.progress.added
        name = f"{order.name}-{number}"
        self._choose((*names, name), rollout.progress.ending, change=1, reason=f"{name}: {reason}")
        member = rollout.make_member(name)
        rollout.members.append(member)
        self._start(member)

    def _remove(self, names: tuple[str, ...], name: str, reason: str) -> None:
        (member,) = (candidate for candidate in self._rollout.members if candidate.name == name)
        drained = () if member.instance is None else (member.instance,)
        rest = tuple(other for other in names if other != name)
        ending = [*self._rollout.progress.ending, name]
        self._choose(rest, ending, change=-1, reason=f"{name}: {reason}", drained=drained)
        assert self._tasks is not None
        self._tasks.create_task(self._end(member))

    def _choose(
        self,
        names: tuple[str, ...],
        ending: list[str],
        *,
        change: int,
        reason: str = "",
        drained: tuple[InstanceId, ...] = (),
    ) -> None:
        if reason:
            LOG.info("rollout %s: %d instances; %s", self._rollout.order.name, len(names), reason)
        self._rollout.handle(
            InstancesChosen(
                deployments=names,
                ending=tuple(ending),
                drained=drained,
                change=change,
                reason=reason,
            )
        )

    def _start(self, member: RolloutMember) -> None:
        assert self._tasks is not None
        self._running[member.name] = self._tasks.create_task(self._keep(member))

    async def _keep(self, member: RolloutMember) -> None:
        if not self._is_unborn(member.name) or await self._is_created(member):
            await member.run()

    async def _is_created(self, member: RolloutMember) -> bool:
        """Create its deployment, if there is none. False: it was refused, and is given up."""
        rollout = self._rollout
        await rollout.settled()
        while True:
            like = rollout.order.instances[0]
            creating = asyncio.ensure_future(rollout.calls.ensure_copy(like, member.name))
            self._creating[member.name] = creating
            try:
                # A request under way is not cancelled: it could take effect after that to end it.
                await asyncio.shield(creating)
            except REFUSALS as error:
                if member.name in rollout.progress.ending:
                    return False
                rollout.members.remove(member)
                names = rollout.progress.names(rollout.order)
                rest = tuple(name for name in names if name != member.name)
                reason = f"{member.name}: the cluster refused it: {error.message}"
                self._choose(rest, rollout.progress.ending, change=0, reason=reason)
                self._balance.refused()
                return False
            except PlexRLError as error:
                LOG.warning("%s is not created: %s; trying again", member.name, error)
                await asyncio.sleep(RETRY_S)
            else:
                return member.name not in rollout.progress.ending

    async def _end(self, member: RolloutMember) -> None:
        """End its deployment, once its instance has returned what it had."""
        rollout = self._rollout
        await rollout.wait_for(lambda: self._is_empty(member), None)
        if (task := self._running.pop(member.name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        creating = self._creating.pop(member.name, None)
        if creating is None and self._is_unborn(member.name):
            # Whose deployment has the name is known only after asking for it.
            like = rollout.order.instances[0]
            creating = asyncio.ensure_future(rollout.calls.ensure_copy(like, member.name))
        created: list[BaseException | None] = []
        if creating is not None:
            created += await asyncio.gather(creating, return_exceptions=True)
        if member.instance is not None:
            rollout.lost(InstanceLost(instance=member.instance))
        await rollout.settled()
        # After a conflict the name is that of another deployment.
        if not any(isinstance(outcome, ConflictError) for outcome in created):
            await self._end_deployment(member.name)
        rollout.members.remove(member)
        ending = [
            ending_name for ending_name in rollout.progress.ending if ending_name != member.name
        ]
        self._choose(rollout.progress.names(rollout.order), ending, change=0)

    async def _end_deployment(self, name: str) -> None:
        while True:
            try:
                await self._rollout.calls.end(name)
            except (UnknownDeploymentError, JobEndedError):
                return
            except PlexRLError as error:
                LOG.warning("%s is not ended: %s; trying again", name, error)
                await asyncio.sleep(RETRY_S)
            else:
                return

    def _is_empty(self, member: RolloutMember) -> bool:
        if member.instance is None:
            return True
        work = self._rollout.instances.work.get(member.instance)
        return work is None or not (work.held or work.unanswered)


def _reason(decision: InstanceDecision) -> str:
    """Why the number changes, for operators."""
    return (
        f"generation takes {decision.generation_s:.3g} s of a step and training "
        f"{decision.training_s:.3g} s; after the change generation is expected to take "
        f"{decision.predicted_s:.3g} s"
    )
