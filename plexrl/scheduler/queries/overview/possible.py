"""Which of all that waits could ever get GPUs: asked once for equal needs."""

import numpy as np
from numpy.typing import NDArray

from plexrl.scheduler.placement.cluster import Cluster
from plexrl.scheduler.placement.fit.feasibility import (
    expects_nodes,
    is_possible,
    possible_alike,
)


def can_get_gpus(cluster: Cluster) -> NDArray[np.bool_]:
    """Whether the nodes in service could hold each row's unit; asked once for each kind."""
    table, state = cluster.queues.waiting.table, cluster.state
    found = np.ones(len(table.units), bool)
    if expects_nodes(state):
        return found
    rows = np.flatnonzero(table.is_used)
    kinds, firsts = np.unique(table.kind[rows], return_index=True)
    never, known = [], dict[object, bool]()
    for kind, first in zip(kinds.tolist(), rows[firsts].tolist(), strict=True):
        unit = table.units[first]
        if unit is None:
            continue
        # Kinds differ in expected lengths, too, which do not matter here.
        key = possible_alike(unit)
        if key not in known:
            known[key] = is_possible(cluster, state.deployment(unit.head.name))
        if not known[key]:
            never.append(kind)
    found[np.isin(table.kind, never)] = False
    return found
