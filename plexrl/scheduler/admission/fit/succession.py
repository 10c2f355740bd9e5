"""Whether a waiting gang gets its GPUs as the successor of one running job.

A job that trains on a shared group and generates on other GPUs frees both when it ends: a place in
the group, and those GPUs, or a place in their group. A waiting job of the same sizes needs just
these, and it is considered first if it has waited longest. Free GPUs that were kept for it
meanwhile, until they are enough for a new group, would help nobody, unless there are enough of them
before that job ends: then the gang is reserved GPUs like any other, and does not starve while
others take them one by one.
"""

import math

import numpy as np

from plexrl.ids import DeploymentId, GroupId, JobId
from plexrl.scheduler.admission.queues.expected_ends import expected_end
from plexrl.scheduler.admission.queues.reservations import earliest_start
from plexrl.scheduler.placement.capacity.capacity import Capacity
from plexrl.scheduler.placement.capacity.index import ShapeTable
from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import gang_of
from plexrl.scheduler.rules.settings import Situation
from plexrl.scheduler.state.records import Deployment

LIKE = 1.25
"""Largest ratio of a successor's duty to the mean duty of the group's members."""


def takes_a_place(cluster: Cluster, deployment: Deployment, now: float) -> bool:
    """Whether `deployment` and its gang fit once some running job ends, without a new group for
    those that share, and that job is expected to end before there are GPUs for new groups.

    Only for gangs of several deployments, of which some share. The running job has to have
    deployments of the same kinds and sizes. The duty of each that shares has to be like those of
    the members of its predecessor's group and has to fit once a member of average duty has left,
    and its state has to fit now. Without likeness, members of less duty could take each other's
    places for ever.
    """
    gang = sorted(gang_of(cluster.queues, deployment), key=_size)
    sharing = [each for each in gang if each.spec.shares]
    if len(gang) < 2 or not sharing or not cluster.settings.anybody_shares:
        return False
    places = {each.deployment: _places(cluster.capacity, each) for each in sharing}
    tried: set[JobId] = set()
    ends_at = math.inf
    for name in places[sharing[0].deployment]:
        for member in cluster.state.groups[name].members:
            job = cluster.state.deployment(member).job
            if job not in tried and _succeeds(cluster, gang, job, places):
                ends_at = min(ends_at, expected_end(cluster.state, cluster.state.job(job), now))
            tried.add(job)
    if ends_at == math.inf:
        return False
    at = earliest_start(cluster.capacity, gang, now)
    # There seem to be enough now, and yet they are not where it could take them.
    return at <= now or ends_at <= at


def _places(capacity: Capacity, joining: Deployment) -> dict[GroupId, None]:
    """Groups that can take the deployment once a member of average duty has left."""
    index = capacity.inventory.index
    found: dict[GroupId, None] = {}
    for shape in index.shapes(joining.spec.workers, joining.spec.node_type):
        table = index.table(shape)
        for row in np.flatnonzero(_has_room_later(capacity, table, joining)).tolist():
            name = table.groups[row]
            assert name is not None, "a free row has no members"
            if capacity.state.groups[name].shared:
                found[name] = None
    return found


def _has_room_later(
    capacity: Capacity, table: ShapeTable, joining: Deployment
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Rows whose group can take the deployment once a member of average duty has left."""
    duty = capacity.inventory.duty_when_placed(joining)
    mean = table.load / np.maximum(table.members, 1)
    return (
        (table.members > 0)
        & (table.state_bytes_free >= joining.spec.state_bytes)
        & (duty <= LIKE * mean)
        & (table.load - mean + duty <= capacity.settings.config.load_bound)
    )


def _succeeds(
    situation: Situation,
    gang: list[Deployment],
    job: JobId,
    places: dict[DeploymentId, dict[GroupId, None]],
) -> bool:
    """Whether the deployments of a running job leave a place for each of `gang`, in its order."""
    running = map(situation.state.deployment, situation.state.job(job).deployments)
    held = sorted((each for each in running if each.has_gpus), key=_size)
    if [_size(each) for each in held] != [_size(each) for each in gang]:
        return False
    for joining, leaving in zip(gang, held, strict=True):
        if joining.spec.shares and leaving.placement.group not in places[joining.deployment]:
            return False
    return True


def _size(deployment: Deployment) -> tuple[str, int, str, bool]:
    """What a successor has in common."""
    return (
        deployment.spec.kind,
        deployment.spec.workers,
        deployment.spec.node_type,
        deployment.spec.shares,
    )
