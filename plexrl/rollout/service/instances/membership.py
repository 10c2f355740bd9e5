"""Instances that join a rollout, are lost, and join again.

The scheduler starts a lost worker again, and repeats what it ran: nothing is to be done here. An
instance is *lost* when its weights could not be set, when its deployment is gone, or when it has
been out of service for `instance_lost_s`. Then its work goes to the others. It joins again, under a
new id, once its deployment serves and has taken new weights.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from plexrl.errors import (
    InvalidRequestError,
    NotFoundError,
    PlexRLError,
    RolloutFailedError,
    UnknownDeploymentError,
)
from plexrl.model.parallelism import Parallelism
from plexrl.rollout.coordinator.coordinator import RolloutCoordinator
from plexrl.rollout.coordinator.messages import (
    InstanceJoined,
    InstanceLost,
    RolloutEvent,
    SharingChanged,
)
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.instances.driver import InstanceDriver
from plexrl.rollout.service.instances.switching import check_engines
from plexrl.rollout.service.instances.work import Instances
from plexrl.rollout.service.journal.progress import RolloutProgress
from plexrl.rollout.service.journal.store import RolloutStore
from plexrl.rollout.service.order import RolloutOrder, instance_id

LOG = logging.getLogger(__name__)

WATCH_S = 2.0
"""Longest interval at which a deployment's state is read, and failed pulls are repeated."""
JOIN_S = 0.2
"""Interval at which an engine that has just taken weights is asked for its cache."""
ATTEMPTS_MAX = 3
"""Failed pulls one after another after which an instance counts as failed."""
RETRY_S = 30.0
"""Interval at which an instance that counts as failed tries again."""
SERVING = "ready"
STOPPED = "stopped"
ENDED = "its deployment has ended"


class JoiningInstance(Protocol):
    """The rollout that instances join."""

    order: RolloutOrder
    store: RolloutStore
    calls: ClusterCalls
    core: RolloutCoordinator
    instances: Instances
    progress: RolloutProgress

    def handle(self, event: RolloutEvent) -> None:
        """Takes another event."""
        ...

    def joined(self, event: InstanceJoined, trainer_step: int) -> InstanceDriver:
        """Takes the event, and makes the driver of the instance."""
        ...

    def lost(self, event: InstanceLost) -> None:
        """Takes the event, and forgets the driver."""
        ...

    async def version_of(self, trainer_step: int) -> int:
        """The version with these steps, once the controller has declared it."""
        ...


@dataclass(slots=True)
class Absence:
    """Why an instance is not in the rollout."""

    reason: str
    has_failed: bool
    """Whether it would need a repair; otherwise it is expected back."""


class RolloutMember:
    """One deployment of the rollout."""

    def __init__(
        self,
        name: str,
        rollout: JoiningInstance,
        driver: InstanceDriver | None,
        lost_s: float,
        changed: Callable[[], None],
    ) -> None:
        """`driver` is that of its instance, which joined before the service restarted, or None.
        `changed` is called when `absence` has changed."""
        self.name = name
        self.instance = None if driver is None else driver.instance
        """Its id in the rollout while it is joined."""
        self.absence: Absence | None = None
        self._rollout = rollout
        self._driver = driver
        self._lost_s = lost_s
        self._pause_s = min(WATCH_S, lost_s / 4)
        self._changed = changed
        self._attempts = 0
        """Failed pulls since the latest success."""
        self._layout: Parallelism | None = None
        """Layout that its deployment is to have; None: the one that it has."""
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Run until cancelled.

        Raises:
            PlexRLError: its driver failed for a reason that is not the instance's own.
        """
        while True:
            while self._driver is None:
                self._driver = await self._join()
            self._lost.clear()
            async with asyncio.TaskGroup() as tasks:
                drives = tasks.create_task(self._driver.run())
                watches = tasks.create_task(self._watch())
                await self._lost.wait()
                drives.cancel()
                watches.cancel()
            operations, self._driver = self._driver.operations(), None
            # The scheduler would run them once the deployment is back.
            for operation in operations:
                with suppress(PlexRLError):
                    await self._rollout.calls.cancel(operation)

    async def _join(self) -> InstanceDriver | None:
        """Pull weights and join. None: the pull failed."""
        rollout, order = self._rollout, self._rollout.order
        instance = instance_id(self.name, rollout.progress.joins.get(self.name, 0))
        operation = rollout.store.operation(order, f"p{instance}.0")
        if self._layout is not None and not await self._divided(self._layout):
            return None
        if self._attempts:
            # A failed operation stays failed.
            operation += f".{self._attempts}"
        try:
            view = await rollout.calls.deployment(self.name)
            trainer = await rollout.calls.deployment(order.source)
            report = await rollout.calls.pull(self.name, order.source, operation)
            step = int(report["trainer_step"])
        except PlexRLError as error:
            self._attempts += 1
            has_failed = self._attempts >= ATTEMPTS_MAX or isinstance(error, NotFoundError)
            self._absent(f"its weights could not be set: {error.message}", has_failed)
            await self._acknowledge(operation)
            await asyncio.sleep(RETRY_S if has_failed else self._pause_s)
            return None
        self._attempts = 0
        engines = await rollout.calls.engines(self.name)
        while not engines:
            # It has just loaded weights, and answers soon.
            await asyncio.sleep(JOIN_S)
            engines = await rollout.calls.engines(self.name)
        try:
            check_engines(order.adaptive_tp, self.name, view, engines)
        except InvalidRequestError as error:
            if not rollout.progress.joins:
                # The rollout has not begun, and its policy is refused.
                raise
            self._absent(f"the profile is not of its engines: {error.message}", has_failed=True)
            await asyncio.sleep(RETRY_S)
            return None
        # Last, so that the first instance to join decides which weights are the first version.
        version = await rollout.version_of(step)
        if self.name in rollout.progress.ending:
            return None
        budget = float(sum(engine["blocks"] * engine["block_tokens"] for engine in engines))
        self.instance, self.absence = instance, None
        joined = InstanceJoined(
            instance=instance,
            version=version,
            kv_budget=budget,
            gpus=int(view["workers"]),
            is_with_trainer=_share_gpus(view, trainer),
        )
        return rollout.joined(joined, step)

    async def _divided(self, layout: Parallelism) -> bool:
        """Whether its deployment has the layout now."""
        try:
            await self._rollout.calls.set_parallelism(self.name, layout)
        except PlexRLError as error:
            self._absent(f"its layout could not be set: {error.message}", has_failed=False)
            await asyncio.sleep(self._pause_s)
            return False
        self._layout = None
        return True

    async def _acknowledge(self, operation: str) -> None:
        """Let the deployment, which the failed operation halted, take others."""
        with suppress(PlexRLError):
            await self._rollout.calls.acknowledge(operation)

    async def _watch(self) -> None:
        out_since: float | None = None
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._pause_s)
            view = await self._view()
            if view is None:
                continue
            state = str(view["state"])
            if state == SERVING:
                out_since = None
                await self._note_sharing(view)
                continue
            out_since = clock() if out_since is None else out_since
            if state == STOPPED:
                self._leave(ENDED, has_failed=True)
            elif clock() - out_since >= self._lost_s:
                self._leave(f"it has been {state} for {self._lost_s:g} s", has_failed=False)

    async def _note_sharing(self, view: Mapping[str, Any]) -> None:
        """Tells the coordinator if the trainer has moved to GPUs of the instance, or away from
        them."""
        rollout = self._rollout
        try:
            trainer = await rollout.calls.deployment(rollout.order.source)
        except PlexRLError as error:
            LOG.warning("the GPUs of %s are not known: %s", rollout.order.source, error)
            return
        held = rollout.core.assignments.instances
        if self.instance not in held or not view["groups"] or not trainer["groups"]:
            return  # it is lost, or one of them has no GPUs now
        is_with_trainer = _share_gpus(view, trainer)
        if held[self.instance].is_with_trainer != is_with_trainer:
            rollout.handle(SharingChanged(instance=self.instance, is_with_trainer=is_with_trainer))

    async def _view(self) -> Mapping[str, Any] | None:
        """The deployment's view, in which its state is; None: it is not known now."""
        try:
            return await self._rollout.calls.deployment(self.name)
        except UnknownDeploymentError:
            return {"state": STOPPED}
        except PlexRLError as error:
            LOG.warning("the state of %s is not known: %s", self.name, error)
            return None

    def divide(self, layout: Parallelism) -> None:
        """Leave the rollout, and join it again with this layout."""
        self._layout = layout
        self._leave("its GPUs are divided in another way", has_failed=False)

    async def is_gone(self) -> bool:
        """Whether the deployment has ended, as far as is known; it is lost then."""
        view = None if self.instance is None else await self._view()
        if view is not None and view["state"] == STOPPED:
            self._leave(ENDED, has_failed=True)
        return self.instance is None

    async def pull_failed(self, operation: str, error: PlexRLError) -> None:
        """Its driver could not set its weights: it is lost."""
        # This task ends with the driver: the rest comes first.
        await self._acknowledge(operation)
        self._leave(f"its weights could not be set: {error.message}", has_failed=False)

    def _leave(self, reason: str, *, has_failed: bool) -> None:
        if self.instance is None:
            return  # another task has found it
        instance, self.instance = self.instance, None
        self._rollout.lost(InstanceLost(instance=instance))
        self._absent(reason, has_failed)
        self._lost.set()

    def _absent(self, reason: str, has_failed: bool) -> None:
        LOG.warning("instance %s is not in the rollout: %s", self.name, reason)
        self.absence = Absence(reason, has_failed)
        self._changed()


def _share_gpus(view: Mapping[str, Any], trainer: Mapping[str, Any]) -> bool:
    return not set(view["groups"]).isdisjoint(trainer["groups"])


def check_members(order: RolloutOrder, members: list[RolloutMember]) -> None:
    """Raises RolloutFailedError: no instance is left."""
    absences = [member.absence for member in members]
    if any(absence is None or not absence.has_failed for absence in absences):
        return
    reasons = "; ".join(f"{m.name}: {m.absence.reason}" for m in members if m.absence is not None)
    raise RolloutFailedError(
        f"rollout {order.name!r} has no instance left ({reasons}): mend the cause, and call "
        "job.rollout again with the same arguments to continue",
        rollout=order.name,
        instances={m.name: m.absence.reason for m in members if m.absence is not None},
    )
