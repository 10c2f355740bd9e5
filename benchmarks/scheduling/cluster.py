"""Clusters to measure on: nodes of eight GPUs full of residents with the published profiles."""

import random
from dataclasses import dataclass

from plexrl.scheduler.placement.choice.search import fitting
from plexrl.scheduler.placement.cluster import Cluster, Context
from plexrl.scheduler.placement.placement import join, place
from plexrl.scheduler.recovery.nodes import node_joined
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.messages.events import NodeJoined
from plexrl.scheduler.state.records import Deployment, Job

GPUS = 8
GIB = 1 << 30
NODES_OF_A_JOB = (1, 1, 1, 2, 2)
PUBLISHED = ((289.03, 57.5), (284.80, 83.5), (589.71, 111.4))
"""(cycle, seconds on the group) of 7B, 30B and 235B (PlexRL Table 2)."""


def config(**changes: object) -> SchedulerConfig:
    """Settings of the measured cores."""
    fields: dict[str, object] = {
        "listen": ("unix:/-",),
        "journal": "-",
        "operator_key_digest": "0",
        "policy": "spread",
        **changes,
    }
    return SchedulerConfig(**fields)  # type: ignore[arg-type]  # read from a table


def node(index: int) -> NodeJoined:
    """One of the cluster's nodes, 32 to a rack."""
    return NodeJoined(
        node=f"n{index:05}",  # type: ignore[arg-type]
        gpus=GPUS,
        gpu_memory_bytes=80 * GIB,
        host_memory_bytes=2048 * GIB,
        statemanager=f"sm{index}",
        node_type="h",
        block=f"rack{index // 32:04}",
    )


def demand(rng: random.Random) -> DemandTrace:
    """One of the published profiles, a little longer or shorter, in two segments."""
    period_s, busy_s = rng.choice(PUBLISHED)
    scale = rng.uniform(0.9, 1.1)
    log_prob_s, update_s = 0.2 * busy_s * scale, 0.8 * busy_s * scale
    segments = (
        Segment(offset_s=0.0, duration_s=log_prob_s),
        Segment(offset_s=log_prob_s + 6.0, duration_s=update_s),
    )
    return DemandTrace(period_s=period_s * scale, segments=segments, jitter_s=3.0, cycles=3)


@dataclass(slots=True)
class Population:
    """Nodes, and jobs on them, in a context of the scheduler's core."""

    context: Context
    rng: random.Random
    made: int = 0

    def deployment(self) -> Deployment:
        """A warm deployment that is on no group yet."""
        self.made += 1
        name = f"j{self.made}"
        self.context.state.jobs[name] = Job(  # type: ignore[index]
            job=name,  # type: ignore[arg-type]
            tenant="t",  # type: ignore[arg-type]
            name=name,
            controller_timeout_s=1e9,
            reattach_timeout_s=1e9,
            submitted_at=0.0,
            seen_at=0.0,
        )
        deployment = Deployment(
            deployment=f"{name}/actor",  # type: ignore[arg-type]
            job=name,  # type: ignore[arg-type]
            created_at=0.0,
            spec=RequestedSpec(
                kind="train",
                workers=GPUS * self.rng.choice(NODES_OF_A_JOB),
                state_bytes=100 * GIB,
                exclusive=False,
                spec_json="{}",
            ),
            demand=Demand(
                estimates=Estimates(100 * GIB),
                trace=demand(self.rng),
            ),
        )
        self.context.state.deployments[deployment.deployment] = deployment
        return deployment


def populate(nodes: int, residents: int, seed: int) -> Population:
    """A cluster of `nodes` with at most `residents` placed by the spread policy."""
    population = Population(Context(config()), random.Random(seed))
    for index in range(nodes):
        node_joined(population.context, node(index), 0.0)
    placed = 0
    for _ in range(2 * residents):
        if placed == residents:
            break
        deployment = population.deployment()
        if _settle(population.context.cluster, deployment, population.rng.uniform(0, 28_800)):
            placed += 1
        else:
            del population.context.state.deployments[deployment.deployment]
            del population.context.state.jobs[deployment.job]
    return population


def _settle(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """Place as the spread policy does, but for the predicted contention."""
    for choice in fitting(cluster, deployment, now, strict=True)[:1]:
        join(cluster.capacity, deployment, choice, now)
        return True
    return place(cluster, deployment, now, only=(PlacementMode.DEDICATED,)) is not None
