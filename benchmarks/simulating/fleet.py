"""Compares policies on equal fleets of training and rollout GPUs.

The simulated cluster has training GPUs only, and rollout GPUs are unlimited. So the drain time
alone favours a policy that runs more jobs at once, because it also needs more rollout GPUs at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.scenario import JobSource, Pool, Scenario
from plexrl.traces import TraceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class OneFleet:
    """The same jobs, with rollout GPUs taken from the cluster too."""

    source: JobSource

    def jobs(self) -> Iterator[TraceJob]:
        """In their order."""
        for job in self.source.jobs():
            yield replace(job, gpus=job.gpus + job.rollout_gpus, rollout_gpus=0)


def equal_fleet(scenario: Scenario, shared: SimResult, policy: str) -> Scenario:
    """`policy`, one without sharing, on as many GPUs as the run `shared` of `scenario` had in all:
    its training GPUs, and its rollout GPUs when it had most of them."""
    pool = scenario.pools[0]
    gpus = shared.gpus + shared.rollout_gpus_peak
    nodes = -(-gpus // pool.node_type.gpus)
    return replace(
        scenario,
        source=OneFleet(source=scenario.source),
        pools=(Pool(nodes=nodes, node_type=pool.node_type),),
        policy=policy,
    )
