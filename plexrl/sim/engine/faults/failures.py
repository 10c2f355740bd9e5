"""Draws failure times of nodes and workers as Poisson processes, independent of the policy. Pure.

A running node fails after an exponential time and rejoins a fixed time later. Times of worker
failures count from the job's submission; a failure at a time without processes has no effect. One
seed gives every policy the same failures.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from plexrl.sim.workload.counter_rng import exponential, stream, uniform
from plexrl.sim.workload.scenario import Failures


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailure:
    """One outage of one node."""

    node: str
    lost_at: float
    back_at: float
    survives: bool
    """Whether the node rejoins with the contents of its host memory."""


def node_failures(failures: Failures, seed: int, nodes: Sequence[str]) -> Iterator[NodeFailure]:
    """All failures of the nodes, by `lost_at`: endless, or empty if nodes never fail."""
    mean_s = failures.node_mtbf_s
    if mean_s <= 0.0:
        return
    # Each failure uses two numbers of its node's stream: the time, and whether memory survives.
    keys = {node: stream(seed, "node", node) for node in nodes}
    upcoming = [(exponential(key, 0, mean_s), node, 0) for node, key in keys.items()]
    heapq.heapify(upcoming)
    while upcoming:
        lost_at, node, number = upcoming[0]
        back_at = lost_at + failures.repair_s
        following = back_at + exponential(keys[node], 2 * number + 2, mean_s)
        heapq.heapreplace(upcoming, (following, node, number + 1))
        yield NodeFailure(
            node=node,
            lost_at=lost_at,
            back_at=back_at,
            survives=uniform(keys[node], 2 * number + 1) < failures.state_survives,
        )


def worker_failures(failures: Failures, seed: int, job_id: str) -> Iterator[float]:
    """Seconds from the job's submission to each failure of a worker: endless, or empty if workers
    never fail."""
    mean_s = failures.worker_mtbf_s
    if mean_s <= 0.0:
        return
    key, at_s, number = stream(seed, "worker", job_id), 0.0, 0
    while True:
        at_s += exponential(key, number, mean_s)
        number += 1
        yield at_s
