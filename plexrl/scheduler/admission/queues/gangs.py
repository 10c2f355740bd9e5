"""Deployments that get GPUs at once: all deployments of a gang, or a single one."""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from plexrl.ids import DeploymentId, GroupId
from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.accounting.quotas import over_quota
from plexrl.scheduler.admission.order import is_partial
from plexrl.scheduler.admission.queues.expected_ends import expected_end
from plexrl.scheduler.admission.queues.reservations import ReservedCapacity
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.needs import node_types_compatible
from plexrl.scheduler.placement.cluster import Cluster, hold
from plexrl.scheduler.placement.contention.colocation import spans_later
from plexrl.scheduler.placement.fit.feasibility import gang_of
from plexrl.scheduler.placement.fit.rehearsal import in_placement_order
from plexrl.scheduler.placement.placement import leave, modes, place
from plexrl.scheduler.rules.policies import PlacementMode
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.records import Deployment, Job

_OWN: Final = frozenset({PlacementMode.COLOCATED, PlacementMode.SPANNING, PlacementMode.SIBLINGS})
_FREE: Final = frozenset({PlacementMode.DEDICATED, PlacementMode.SPANNING})
"""Modes that may take free GPUs."""

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
    gpus = sum(each.spec.workers for each in gang_of(cluster.queues, deployment))
    reason = over_quota(cluster.holdings, job, gpus)
    return None if reason is None else (reason, "quota")


def place_all(
    cluster: Cluster,
    gang: list[Deployment],
    allowed: dict[DeploymentId, tuple[PlacementMode, ...]],
    reservations: Sequence[ReservedCapacity],
    now: float,
) -> bool:
    """Put all deployments on groups by their allowed modes, or none; also none if that delays a
    reservation. If it fails, those that may take turns with others of the job do so instead of
    taking GPUs of their own."""
    job = cluster.state.job(gang[0].job)
    turning = {name: tuple(sorted(found, key=_is_foreign)) for name, found in allowed.items()}
    if not _place_in_order(cluster, gang, allowed, reservations, now) and (
        turning == allowed or not _place_in_order(cluster, gang, turning, reservations, now)
    ):
        return False
    for deployment in gang:
        cluster.queues.stop_waiting(deployment.deployment)
        hold(cluster, deployment, +1, now)
    if job.placed_at is None:
        job.placed_at = now
    return True


def _is_foreign(mode: PlacementMode) -> bool:
    return mode not in _OWN


def _place_in_order(
    cluster: Cluster,
    gang: list[Deployment],
    allowed: dict[DeploymentId, tuple[PlacementMode, ...]],
    reservations: Sequence[ReservedCapacity],
    now: float,
) -> bool:
    done: list[tuple[Deployment, dict[GroupId, float]]] = []
    """Each with its groups, and since when these had one member."""
    for deployment in _rollouts_first(cluster, in_placement_order(gang)):
        group = place(cluster, deployment, now, only=allowed[deployment.deployment])
        if group is None:
            _undo(cluster.capacity, done, now)
            return False
        groups = cluster.state.groups_of(deployment)
        done.append((deployment, {group.group: group.alone_since for group in groups}))
    ends_at = expected_end(cluster.state, cluster.state.job(gang[0].job), now)
    left = [reservation.left_after(gang, ends_at, now) for reservation in reservations]
    for found in left:
        if found is None:
            _undo(cluster.capacity, done, now)
            return False
    for each, found in zip(reservations, left, strict=True):
        assert found is not None, "checked before"
        each.count(found)
    return True


def _rollouts_first(situation: Situation, gang: list[Deployment]) -> list[Deployment]:
    """First the rollouts on whose GPUs a larger deployment of the gang can be, too."""
    if not situation.settings.divides_groups:
        return gang
    first = {name.deployment: None for each in gang for name in spans_later(situation, each)}
    return sorted(gang, key=lambda each: each.deployment not in first)


def _undo(
    capacity: Capacity, done: list[tuple[Deployment, dict[GroupId, float]]], now: float
) -> None:
    for deployment, alone_since in reversed(done):
        leave(capacity, deployment, now, alone_since)
        deployment.placement.clear()


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
            workers
            for kind, workers in blocking
            if node_types_compatible(kind, each.spec.node_type)
        ]
        if each.spec.workers in rivals:
            found[each.deployment] = ()
        elif rivals:
            left = [mode for mode in found[each.deployment] if mode not in _FREE]
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
    passes: int
    """Number of reservations by whose time it has not ended."""


def equivalence_key(
    deployment: Deployment, job: Job, allowed: tuple[PlacementMode, ...], *, passes: int
) -> EquivalenceKey:
    """The key of a deployment of this `job`."""
    is_alone = deployment.spec.kind != "rollout" and _OWN.isdisjoint(allowed)
    return EquivalenceKey(
        workers=deployment.spec.workers,
        node_type=deployment.spec.node_type,
        shares=deployment.spec.shares,
        state_bytes=deployment.spec.state_bytes,
        memory=deployment.demand.memory,
        trace=deployment.demand.trace,
        slo=job.slo,
        job="" if is_alone else deployment.job,
        allowed=allowed,
        passes=passes,
    )
