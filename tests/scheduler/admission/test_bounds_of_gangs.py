"""No bound says no to what fits: gangs that are placed on small clusters, and what each bound said.

The placement itself is the oracle: it tries all modes on the real groups, and is undone.
"""

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from plexrl.ids import DeploymentId, JobId
from plexrl.scheduler.admission.fit.fit_bounds import FitBounds
from plexrl.scheduler.admission.fit.size_check import check_it_can_fit
from plexrl.scheduler.admission.queues.gangs import allowed_modes, place_all
from plexrl.scheduler.admission.queues.reservations import ReservedCapacity, reserve
from plexrl.scheduler.placement.placement import leave
from plexrl.scheduler.placement.waiting.units import Sizes, size_of
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace, Segment
from plexrl.scheduler.state.deployment.demand import Demand
from plexrl.scheduler.state.deployment.spec import RequestedSpec
from plexrl.scheduler.state.records import Deployment
from tests.examples import examples
from tests.scheduler.placement.choice.small_clusters import SmallCluster, add_job

NOW = 50.0


class Gangs:
    """Makes gangs of jobs without GPUs on a small cluster."""

    def __init__(self, seed: int, *node_types: str) -> None:
        """`node_types`: those of the three nodes, which deployments then ask for at random."""
        self.rng, self._types = random.Random(seed), random.Random(seed)
        self.asked = ("", *node_types)
        first, second, third = node_types or ("h", "h", "h")
        self.small = SmallCluster(self.rng, (first, second, third))
        self.cluster = self.small.context.cluster

    def make(self, name: str) -> list[Deployment]:
        """One to four deployments, most of them a training and its rollouts that work in turns."""
        rng = self.rng
        job = add_job(self.small.context, name)
        rollouts = rng.choice((0, 0, 1, 1, 1, 2, 3))
        kinds = ["train"] * rng.choice((1, 1, 1, 2)) + ["rollout"] * rollouts
        found = [self._deployment(job, f"{name}.{at}", kind) for at, kind in enumerate(kinds)]
        self.small.context.state.jobs[job].gang = len(found)
        return found

    def _deployment(self, job: JobId, name: str, kind: str) -> Deployment:
        rng, period = self.rng, 24.0
        busy = rng.choice((2.0, 4.0, 6.0) if kind == "train" else (6.0, 12.0, 16.0))
        at = 0.0 if kind == "rollout" else 16.0
        segment = Segment(offset_s=at, duration_s=busy)
        trace = DemandTrace(period_s=period, segments=(segment,), cycles=3)
        workers = rng.choice((1, 2, 2, 3, 4, 5))
        found = Deployment(
            deployment=DeploymentId(name),
            job=job,
            created_at=0.0,
            serial=1000 + len(self.small.context.state.deployments),
            spec=RequestedSpec(
                kind=kind,
                workers=workers,
                state_bytes=1 << 20,
                exclusive=rng.random() < 0.2,
                spec_json="{}",
                node_type=self._types.choice(self.asked),
            ),
            demand=Demand(
                estimates=Estimates(1 << 20),
                trace=trace if rng.random() < 0.85 else None,
            ),
        )
        self.small.context.state.deployments[found.deployment] = found
        self.small.context.state.jobs[found.job].deployments.append(found.deployment)
        return found

    def may_fit_alone(self, bounds: FitBounds, one: Deployment) -> bool:
        """What the bounds of free GPUs and of groups, unions included, say of one deployment."""
        found = bounds.groups(size_of(one))
        duty = self.cluster.capacity.inventory.duty_when_placed(one)
        wanted = np.array([duty]), np.array([one.spec.state_bytes])
        may_join = found is not None and bool(found.may_join(*wanted)[0])
        return may_join or one.spec.state_bytes <= bounds.free_state_bytes(size_of(one))

    def place(self, gang: Sequence[Deployment]) -> bool:
        """Whether the gang is placed by all modes."""
        allowed = allowed_modes(self.cluster, list(gang), (), NOW)
        return place_all(self.cluster, list(gang), allowed, (), NOW)


def sizes_of(gang: Sequence[Deployment]) -> Sizes:
    return tuple(sorted(size_of(each) for each in gang))


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 30))
@example(279)
@example(582)
def test_what_fits_is_neither_left_out_nor_refused(seed: int) -> None:
    gangs = Gangs(seed)
    cluster, other, gang = gangs.cluster, gangs.make("other"), gangs.make("gang")
    for each in other:
        cluster.queues.wait(each)
    reserve(cluster, other[0], NOW)
    coming = (
        ReservedCapacity(cluster, other[0].deployment, NOW) if cluster.state.reservations else None
    )
    sizes, bounds = sizes_of(gang), FitBounds(cluster.capacity)
    may_fit = (
        gangs.may_fit_alone(bounds, gang[0])
        if len(gang) == 1
        else bounds.gang_may_fit(sizes, (True,) * len(sizes))
    )
    may_join = bounds.gang_may_fit(sizes, (False,) * len(sizes))
    is_kept = coming is None or coming.is_kept_beside(sizes)
    was_free = cluster.capacity.inventory.pool.free_gpus()
    if not gangs.place(gang):
        return
    assert may_fit, f"{sizes} fit"
    is_late = coming is None or coming.left_after(gang, float("inf"), NOW) is not None
    took_free = was_free - cluster.capacity.inventory.pool.free_gpus()
    assert took_free or may_join or len(sizes) == 1, f"{sizes} fit without free GPUs"
    assert not is_late or is_kept or not took_free, f"{sizes} delay no reservation"


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from([(), ("h", "o", "h"), ("o", "h", "o")]))
@example(31, ())
@example(480, ())
def test_what_fits_an_empty_cluster_is_accepted(seed: int, node_types: tuple[str, ...]) -> None:
    gangs = Gangs(seed, *node_types)
    cluster, state = gangs.cluster, gangs.small.context.state
    for name in [name for name in state.deployments if state.deployments[name].placement.groups]:
        leave(cluster.capacity, state.deployments[name], NOW)
    gang = gangs.make("gang")
    if not gangs.place(gang):
        return
    job = state.jobs[gang[0].job]
    for each in gang:
        job.deployments = [other.deployment for other in gang if other is not each]
        check_it_can_fit(cluster.capacity, job, each)
