"""What breaks in a simulated cluster, and when: Poisson processes that no policy has a part in.

A node that is up fails after an exponential time and is back a fixed time later. A WPG's processes
fail at instants counted from their job's submission; one that comes while there are none hits
nobody. So of one seed every policy meets the same failures. Pure.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plexrl.sim.workload.counter_rng import exponential, stream, uniform
from plexrl.sim.workload.scenario import Failures


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """One node is away for a time."""

    node: str
    lost_at: float
    back_at: float
    survives: bool
    """What it has in host memory is still there when it is back."""


def node_failures(failures: Failures, seed: int, nodes: Sequence[str]) -> Iterator[NodeFailure]:
    """All failures of the nodes, by `lost_at`; endless, unless nodes never fail."""
    mean_s = failures.node_mtbf_s
    if mean_s <= 0.0:
        return
    # Two numbers of a node's stream for each of its failures: when, and what survives.
    keys = {node: stream(seed, "node", node) for node in nodes}
    coming = [(exponential(key, 0, mean_s), node, 0) for node, key in keys.items()]
    heapq.heapify(coming)
    while coming:
        lost_at, node, number = coming[0]
        back_at = lost_at + failures.repair_s
        following = back_at + exponential(keys[node], 2 * number + 2, mean_s)
        heapq.heapreplace(coming, (following, node, number + 1))
        yield NodeFailure(
            node=node,
            lost_at=lost_at,
            back_at=back_at,
            survives=uniform(keys[node], 2 * number + 1) < failures.state_survives,
        )


def worker_failures(failures: Failures, seed: int, job_id: str) -> Iterator[float]:
    """Seconds from the job's submission at which one of its processes fails; endless, unless they
    never do."""
    mean_s = failures.worker_mtbf_s
    if mean_s <= 0.0:
        return
    key, at_s, number = stream(seed, "worker", job_id), 0.0, 0
    while True:
        at_s += exponential(key, number, mean_s)
        number += 1
        yield at_s
