"""Random small clusters: groups of several sizes, parts of them, and trainings that span them."""

import random
from dataclasses import dataclass, field
from typing import Literal

from plexrl.ids import DeploymentId, JobId, NodeId, TenantId
from plexrl.scheduler.placement.choice.search import fitting
from plexrl.scheduler.placement.cluster import Context
from plexrl.scheduler.placement.placement import join, leave, place
from plexrl.scheduler.recovery.nodes import node_joined
from plexrl.scheduler.rules.config import SchedulerConfig
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.messages.events import NodeJoined
from plexrl.scheduler.state.records import Deployment, Job

HORIZON = 48
GIB = 1 << 30
UNITS_MAX = 8
SIZES = (1, 1, 2, 2, 2, 3, 4, 4, 6)
PERIODS = (8, 12, 16, 24, 24, 48, 48)


def demand(rng: random.Random) -> DemandTrace:
    """One to three segments in a period that divides the ring; edges at halves of a slot."""
    period = rng.choice(PERIODS)
    segments, at = list[Segment](), 0.0
    for _ in range(rng.choice((1, 1, 2, 3))):
        at += rng.randint(0, period) / 4
        length = rng.randint(1, max(1, period // 3)) / 2
        if at + length > period:
            break
        slack = rng.choice((0.0, 2 * length))
        segments.append(Segment(offset_s=at, duration_s=length, slack_s=slack))
        # The next one starts in a slot of its own.
        at = float(int(at + length) + 1)
    if not segments:
        segments = [Segment(offset_s=0.0, duration_s=1.0)]
    return DemandTrace(
        period_s=float(period),
        segments=tuple(segments),
        jitter_s=float(rng.choice((0, 0, 0, 1, 2))),
        cycles=3,
    )


def add_job(context: Context, name: str) -> JobId:
    """A job that never times out."""
    job = JobId(name)
    context.state.jobs[job] = Job(
        job=job,
        tenant=TenantId("t"),
        name=name,
        controller_timeout_s=1e9,
        reattach_timeout_s=1e9,
        submitted_at=0.0,
        seen_at=0.0,
    )
    return job


@dataclass(slots=True)
class SmallCluster:
    """At most eight GPUs on one to three nodes, and what a random history left on them."""

    rng: random.Random
    node_types: tuple[str, str, str] = ("h", "h", "h")
    context: Context = field(init=False)
    made: int = 0

    def __post_init__(self) -> None:
        rng = self.rng
        config = SchedulerConfig(
            listen=("unix:/-",),
            journal="-",
            operator_key_digest="0",
            policy="spread",
            horizon_slots=HORIZON,
            period_tolerance=0.0,
            load_max=rng.choice((0.9, 1.0, 1.5)),
            residents_max=rng.choice((3, 8)),
            waiting_part_max=1.0,
        )
        self.context = Context(config)
        left = rng.choice((4, 6, UNITS_MAX))
        for number in range(3):
            gpus = left if number == 2 else rng.randint(1, left)
            node = NodeJoined(
                node=NodeId(f"n{number}"),
                gpus=gpus,
                gpu_memory_bytes=80 * GIB,
                host_memory_bytes=rng.choice((4, 64, 64)) * GIB * gpus,
                nvme_bytes=rng.choice((4, 64, 64)) * GIB * gpus,
                statemanager=f"sm{number}",
                node_type=self.node_types[number],
            )
            node_joined(self.context, node, 0.0)
            left -= gpus
            if not left:
                break
        for _ in range(rng.randint(2, 12)):
            self._change()

    def newcomer(self) -> Deployment:
        """A deployment of a new job, or the training of a job whose rollout has GPUs."""
        names = list(self.context.state.deployments)
        if names and self.rng.random() < 0.6:
            other = self.context.state.deployments[self.rng.choice(names)]
            if other.spec.kind == "rollout":
                workers = min(UNITS_MAX, other.spec.workers + self.rng.randint(1, 3))
                return self._deployment(other.job, "train", workers)
        self.made += 1
        job = add_job(self.context, f"j{self.made}")
        kind: Literal["train", "rollout"] = "rollout" if self.rng.random() < 0.4 else "train"
        return self._deployment(job, kind, self.rng.choice(SIZES))

    def _deployment(
        self, job: JobId, kind: Literal["train", "rollout"], workers: int
    ) -> Deployment:
        self.made += 1
        state_bytes = self.rng.choice((1 << 20, 1 << 20, 3 * GIB)) * workers
        found = Deployment(
            deployment=DeploymentId(f"d{self.made}"),
            job=job,
            created_at=0.0,
            spec=RequestedSpec(
                kind=kind,
                workers=workers,
                state_bytes=state_bytes,
                exclusive=False,
                spec_json="{}",
            ),
            demand=Demand(
                estimates=Estimates(state_bytes),
                trace=demand(self.rng),
            ),
        )
        self.context.state.deployments[found.deployment] = found
        self.context.state.jobs[job].deployments.append(found.deployment)
        return found

    def _change(self) -> None:
        cluster, rng = self.context.cluster, self.rng
        now = float(rng.randint(0, 100))
        names = list(cluster.state.deployments)
        if names and rng.random() < 0.1:
            gone = cluster.state.deployments[rng.choice(names)]
            leave(cluster.capacity, gone, now)
            self._forget(gone)
            return
        deployment = self.newcomer()
        if place(cluster, deployment, now, (PlacementMode.SPANNING,)) is not None:
            return
        found = fitting(cluster, deployment, now, strict=rng.random() < 0.8, count=3)
        if found and rng.random() < 0.5:
            join(cluster.capacity, deployment, rng.choice(found), now)
        elif place(cluster, deployment, now, (PlacementMode.DEDICATED,)) is None:
            self._forget(deployment)

    def _forget(self, deployment: Deployment) -> None:
        del self.context.state.deployments[deployment.deployment]
        self.context.state.jobs[deployment.job].deployments.remove(deployment.deployment)
