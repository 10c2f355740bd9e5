"""Whether a waiting gang gets its GPUs as the successor of one running job.

A job that trains on a shared group and generates on GPUs of its own frees both when it ends: a
place in the group, and those GPUs. A waiting job of the same sizes needs just these, and it is
considered first if it has waited longest. Free GPUs that were kept for it meanwhile, until they are
enough for a new group, would help nobody.
"""

import numpy as np

from plexrl.scheduler.admission.fit.feasibility import gang_of
from plexrl.scheduler.context.cluster import Cluster
from plexrl.scheduler.placement.capacity.index import ShapeTable
from plexrl.scheduler.state.records import Deployment, Group

LIKE = 1.25
"""Largest ratio of a successor's duty to the mean duty of the group's members."""


def takes_a_place(cluster: Cluster, deployment: Deployment) -> bool:
    """Whether `deployment` and its gang fit once some running job ends, without a new group for
    those that share.

    Only for gangs of one deployment that shares and others that do not. Its duty has to be like
    those of the group's members and has to fit once a member of average duty has left, and its
    state has to fit now. Without likeness, members of less duty could take each other's places for
    ever.
    """
    gang = gang_of(cluster, deployment)
    sharing = [each for each in gang if each.shares]
    if len(sharing) != 1 or not cluster.settings.anybody_shares:
        return False
    (joining,) = sharing
    own = sorted((each.workers, each.node_type) for each in gang if each is not joining)
    if not own:
        return False
    index = cluster.inventory.index
    for shape in index.shapes(joining.workers, joining.node_type):
        table = index.table(shape)
        for row in np.flatnonzero(_has_room_later(cluster, table, joining)).tolist():
            name = table.groups[row]
            assert name is not None, "a free row has no members"
            group = cluster.state.groups[name]
            if group.shared and _frees(cluster, group, own):
                return True
    return False


def _has_room_later(
    cluster: Cluster, table: ShapeTable, joining: Deployment
) -> "np.ndarray[tuple[int], np.dtype[np.bool_]]":
    """Rows whose group can take the deployment once a member of average duty has left."""
    duty = cluster.inventory.duty_when_placed(joining)
    mean = table.load / np.maximum(table.members, 1)
    return (
        (table.members > 0)
        & (table.state_bytes_free >= joining.state_bytes)
        & (duty <= LIKE * mean)
        & (table.load - mean + duty <= cluster.settings.config.load_bound)
    )


def _frees(cluster: Cluster, group: Group, own: list[tuple[int, str]]) -> bool:
    """Whether a job with a member there has deployments of these sizes besides."""
    for name in group.members:
        job = cluster.state.job(cluster.state.deployment(name).job)
        besides = map(cluster.state.deployment, job.deployments)
        held = sorted(
            (each.workers, each.node_type)
            for each in besides
            if each.group is not None and each.deployment != name and not each.shares
        )
        if held == own:
            return True
    return False
