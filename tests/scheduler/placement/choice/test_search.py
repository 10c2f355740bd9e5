"""Which of several groups a search finds."""

from plexrl.ids import DeploymentId, NodeId
from plexrl.scheduler.placement.capacity.index import CANDIDATES_PER_PASS
from plexrl.scheduler.placement.choice.search import fitting
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.placement.placement import place
from plexrl.scheduler.recovery.nodes import node_joined
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.messages.events import NodeJoined
from plexrl.scheduler.state.records import Deployment
from tests.scheduler.placement.choice.small_clusters import add_job

HORIZON = 48


def cluster_of(gpus: int, overlap_max: float = 0.0) -> Context:
    context = Context(
        SchedulerConfig(
            listen=("unix:/-",),
            journal="-",
            operator_key_digest="0",
            policy="spread",
            horizon_slots=HORIZON,
            overlap_max=overlap_max,
        )
    )
    node = NodeJoined(
        node=NodeId("n"),
        gpus=gpus,
        gpu_memory_bytes=1 << 36,
        host_memory_bytes=1 << 40,
        statemanager="sm",
    )
    node_joined(context, node, 0.0)
    return context


def add(context: Context, name: str, workers: int, *segments: tuple[float, float]) -> Deployment:
    """A deployment of a job of its own, with these (offset, duration) in each cycle."""
    job = add_job(context, name)
    found = Deployment(
        deployment=DeploymentId(f"{name}/actor"),
        job=job,
        created_at=0.0,
        spec=RequestedSpec(
            kind="train",
            workers=workers,
            state_bytes=workers,
            exclusive=False,
            spec_json="{}",
        ),
        demand=Demand(
            estimates=Estimates(workers),
            trace=DemandTrace(
                period_s=float(HORIZON),
                segments=tuple(Segment(offset_s=at, duration_s=length) for at, length in segments),
            ),
        ),
    )
    context.state.deployments[found.deployment] = found
    return found


def place_alone(context: Context, deployment: Deployment) -> str:
    group = place(context.cluster, deployment, 0.0, (PlacementMode.DEDICATED,))
    assert group is not None, "the node has free GPUs"
    return group.group


def test_of_parts_that_cost_the_same_that_of_the_smaller_group_is_first() -> None:
    context = cluster_of(6)
    older = place_alone(context, add(context, "large", 4, (0.0, 8.0)))
    newer = place_alone(context, add(context, "small", 2, (0.0, 8.0)))
    found = fitting(context.cluster, add(context, "new", 1, (0.0, 8.0)), 0.0, strict=True)
    assert [choice.group for choice in found] == [newer, older]
    assert found[0].cost == found[1].cost


def test_a_group_without_overlap_is_found_behind_many_with_too_much() -> None:
    """All groups of the first pass are emptier, and busy too often for a long segment."""
    context = cluster_of(CANDIDATES_PER_PASS + 1)
    often = [(float(at), 1.0) for at in range(0, HORIZON, 8)]
    for number in range(CANDIDATES_PER_PASS):
        place_alone(context, add(context, f"often{number}", 1, *often))
    once = place_alone(context, add(context, "once", 1, (0.0, 12.0)))
    new = add(context, "new", 1, (0.0, 20.0))
    for strict in (True, False):
        (found,) = fitting(context.cluster, new, 0.0, strict=strict)
        assert (found.group, found.overlap_s) == (once, 0.0)
