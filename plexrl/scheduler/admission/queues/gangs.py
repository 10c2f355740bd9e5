"""Deployments that get GPUs at once: all deployments of a gang, or a single one."""

from collections.abc import Collection
from typing import Final, NamedTuple

from plexrl.ids import DeploymentId
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.admission.fit.feasibility import gang_of
from plexrl.scheduler.admission.fit.rehearsal import in_placement_order
from plexrl.scheduler.admission.order import is_partial
from plexrl.scheduler.admission.quotas import over_quota
from plexrl.scheduler.context.cluster import Cluster
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.placement import leave, modes, place
from plexrl.scheduler.placement.policies import PlacementMode
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job

_OWN: Final = frozenset({PlacementMode.COLOCATED, PlacementMode.SIBLINGS})

BlockingRequest = tuple[str, int]
"""(node type, workers) of a deployment that blocks the deployments behind it."""


def why_not_yet(cluster: Cluster, deployment: Deployment) -> tuple[str, str] | None:
    """(reason, rule) why `deployment` may not get GPUs even if some are free; None if it may."""
    job = cluster.state.job(deployment.job)
    if job.is_set_aside:
        return "its job has no controller: it gets GPUs again when one attaches the job", "detached"
    if job.gang and len(job.deployments) < job.gang:
        have = len(job.deployments)
        return f"its gang of {job.gang} has {have} deployments so far", "gang"
    gpus = sum(each.workers for each in gang_of(cluster, deployment))
    reason = over_quota(cluster, job, gpus)
    return None if reason is None else (reason, "quota")


def place_all(
    cluster: Cluster,
    gang: list[Deployment],
    allowed: dict[DeploymentId, tuple[PlacementMode, ...]],
    now: float,
) -> bool:
    """Put all deployments on groups by their allowed modes, or none. If that fails, those that may
    take turns with others of the job do so instead of taking GPUs of their own."""
    turning = {name: tuple(sorted(found, key=_is_foreign)) for name, found in allowed.items()}
    if not _place_in_order(cluster, gang, allowed, now) and (
        turning == allowed or not _place_in_order(cluster, gang, turning, now)
    ):
        return False
    for deployment in gang:
        cluster.waiting.remove(deployment.deployment)
        cluster.hold(deployment, +1, now)
    return True


def _is_foreign(mode: PlacementMode) -> bool:
    return mode not in _OWN


def _place_in_order(
    cluster: Cluster,
    gang: list[Deployment],
    allowed: dict[DeploymentId, tuple[PlacementMode, ...]],
    now: float,
) -> bool:
    done: list[Deployment] = []
    for deployment in in_placement_order(gang):
        if place(cluster, deployment, now, only=allowed[deployment.deployment]) is None:
            for each in reversed(done):
                leave(cluster, each, now)
                each.ranks = ()
                each.nodes = ()
                each.placement = None
            return False
        done.append(deployment)
    return True


def allowed_modes(
    cluster: Cluster, gang: list[Deployment], blocking: Collection[BlockingRequest], now: float
) -> dict[DeploymentId, tuple[PlacementMode, ...]]:
    """The placement modes of each deployment that take nothing a blocking request may need: neither
    free GPUs nor a group of the requested size."""
    found = {each.deployment: modes(cluster, each, now) for each in gang}
    if is_partial(cluster.state, cluster.state.job(gang[0].job)):
        return found
    for each in gang:
        rivals = [
            workers for kind, workers in blocking if node_types_compatible(kind, each.node_type)
        ]
        if each.workers in rivals:
            found[each.deployment] = ()
        elif rivals:
            left = [mode for mode in found[each.deployment] if mode != PlacementMode.DEDICATED]
            found[each.deployment] = tuple(left)
    return found


class EquivalenceKey(NamedTuple):
    """Two deployments with equal keys both fit, or both do not."""

    workers: int
    node_type: str
    shares: bool
    state_bytes: int
    memory: DeviceMemory | None
    trace: DemandTrace | None
    slo: float | None
    job: str
    """Empty, unless other deployments of its job decide where it can be."""
    allowed: tuple[PlacementMode, ...]


def equivalence_key(
    deployment: Deployment, job: Job, allowed: tuple[PlacementMode, ...]
) -> EquivalenceKey:
    """The key of a deployment of this `job`."""
    is_alone = deployment.kind != "rollout" and _OWN.isdisjoint(allowed)
    return EquivalenceKey(
        workers=deployment.workers,
        node_type=deployment.node_type,
        shares=deployment.shares,
        state_bytes=deployment.state_bytes,
        memory=deployment.memory,
        trace=deployment.trace,
        slo=job.slo,
        job="" if is_alone else deployment.job,
        allowed=allowed,
    )
