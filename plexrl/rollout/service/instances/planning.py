"""Divides the instances' GPUs anew between rounds, as the parallelism planner says (Flexes §4.2).

A size has effect while the batch of the round before is trained: the workers start again, which
takes as long as a start. That costs more than a round of the other kind could gain, so the size
follows the short rounds, and the long ones have it, too.

Sizes and preemptions are counted in this process: after a restart the planner begins anew, with the
size that the instances have.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import Protocol

from plexrl.errors import InvalidRequestError, PlexRLError
from plexrl.model.deployment_spec import deployment_spec_from_json
from plexrl.model.layout import with_layout
from plexrl.model.parallelism import Parallelism
from plexrl.rollout.policies.parallelism import ParallelismPlanner
from plexrl.rollout.policies.tail_batching.rounds import RoundKind
from plexrl.rollout.service.cluster_calls import ClusterCalls
from plexrl.rollout.service.instances.membership import RolloutMember
from plexrl.rollout.service.journal.progress import RolloutProgress
from plexrl.rollout.service.order import RolloutOrder
from plexrl.wire.messages.views import DeploymentView

LOG = logging.getLogger(__name__)

RETRY_S = 1.0


class PlannedRollout(Protocol):
    """The rollout whose instances are divided."""

    order: RolloutOrder
    calls: ClusterCalls
    progress: RolloutProgress
    members: list[RolloutMember]
    preemptions: int
    """Preemptions of all instances, as far as this process has seen."""
    lone_step_s: float | None
    """Seconds of the latest measured decode step of a sample that runs alone."""

    async def wait_for(self, is_done: Callable[[], bool], wait_s: float | None) -> None:
        """Wait until `is_done()`, or `wait_s` seconds are over."""
        ...


async def plan_parallelism(rollout: PlannedRollout) -> None:
    """Runs until cancelled, or until it is known that there is nothing to choose."""
    await rollout.wait_for(lambda: rollout.order.plans_parallelism, None)
    views = [await _view(rollout, member.name) for member in rollout.members]
    layouts = tensor_layouts(views)
    sizes = {deployment_spec_from_json(view["spec_json"]).layout.tp for view in views}
    if len(layouts) < 2 or not sizes <= layouts.keys():
        LOG.info("rollout %s: its instances have one layout only", rollout.order.name)
        return
    size = min(sizes)
    profile: dict[int, float] = {}
    planner = ParallelismPlanner(sorted(layouts), size, profile=profile)
    counted = rollout.preemptions
    while True:
        await _next_batch(rollout)
        preemptions, counted = rollout.preemptions - counted, rollout.preemptions
        if rollout.lone_step_s is not None:
            profile[size] = rollout.lone_step_s
        is_long = rollout.progress.batches[-1].round is RoundKind.LONG
        if is_long or not rollout.order.plans_parallelism:
            continue
        wanted = planner.observe(RoundKind.SHORT, preemptions)
        if wanted != size or len(sizes) > 1:
            LOG.info(
                "rollout %s: %d preemptions in a round, so tp is %d in place of %d",
                *(rollout.order.name, preemptions, wanted, size),
            )
            for member in rollout.members:
                member.divide(layouts[wanted])
            size, sizes, rollout.lone_step_s = wanted, {wanted}, None


async def _next_batch(rollout: PlannedRollout) -> None:
    trained = rollout.progress.trained.samples
    await rollout.wait_for(lambda: rollout.progress.trained.samples > trained, None)


async def _view(rollout: PlannedRollout, name: str) -> DeploymentView:
    """The deployment's view, once it has GPUs."""
    while True:
        try:
            view = await rollout.calls.deployment(name)
            if view["ranks"]:
                return view
        except PlexRLError as error:
            LOG.info("the layout of %s is not known: %s", name, error)
        await asyncio.sleep(RETRY_S)


def tensor_layouts(views: Sequence[DeploymentView]) -> Mapping[int, Parallelism]:
    """Layouts that all of these deployments could have on their GPUs, by their `tp`, each twice the
    one before: no group of tensor ranks is on two nodes, and each has room for the weights and the
    longest sequence."""
    found: dict[int, Parallelism] = {}
    specs = [deployment_spec_from_json(view["spec_json"]) for view in views]
    on_nodes = [Counter(rank["node"] for rank in view["ranks"]).values() for view in views]
    most, tp = gcd(*(count for counts in on_nodes for count in counts)), 1
    while most % tp == 0 and len({spec.workers for spec in specs}) == 1:
        layout = Parallelism(tp=tp, dp=specs[0].workers // tp)
        try:
            for spec in specs:
                with_layout(spec, layout)
            found[tp] = layout
        except InvalidRequestError:
            if found:
                break
        tp *= 2
    return found
