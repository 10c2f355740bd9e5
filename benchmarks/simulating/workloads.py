"""Workloads for measuring speed and memory on a full cluster."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plexrl.sim.workload.scenario import GIB, NodeType, Pool, Scenario
from plexrl.traces import MODEL_CLASSES, TraceJob

DAY_S = 86_400.0
GROUPS = 64
RESIDENTS = 4
GROUP_GPUS = 32
TENANTS = 5000
"""Number of tenants of passing jobs."""

MODEL = "7B"
"""Class of every job; four of them fill a group with contention from jitter only."""

DEMAND = MODEL_CLASSES[MODEL].demand()
NODE_GPUS = 8
NODE = NodeType(
    gpus=NODE_GPUS,
    host_memory_bytes=RESIDENTS * DEMAND["state_bytes"] * NODE_GPUS // GROUP_GPUS + GIB,
    nvme_bytes=0,
)
"""Host memory for the states of `RESIDENTS` jobs only, so no group takes a fifth job."""
POOL = Pool(nodes=GROUPS * GROUP_GPUS // NODE_GPUS, node_type=NODE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residents:
    """As many jobs as the groups take, from the first day to the last."""

    days: float

    def jobs(self) -> Iterator[TraceJob]:
        """All within the first cycle, one after the other."""
        for index in range(GROUPS * RESIDENTS):
            yield TraceJob(
                job_id=f"job{index}",
                submit_s=float(index),
                gpus=GROUP_GPUS,
                tenant=f"tenant{index % 8}",
                cycles=max(1, round(self.days * DAY_S / DEMAND["period_s"])),
                **DEMAND,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Passers:
    """Thousands of short jobs."""

    count: int
    cycles: int = 5
    gap_s: float = 12.0

    def jobs(self) -> Iterator[TraceJob]:
        """Jobs at a constant rate that the cluster sustains."""
        for index in range(self.count):
            yield TraceJob(
                job_id=f"job{index}",
                submit_s=index * self.gap_s,
                gpus=GROUP_GPUS,
                tenant=f"tenant{index % TENANTS}",
                cycles=self.cycles,
                **DEMAND,
            )


def residents(days: float, policy: str) -> Scenario:
    """`GROUPS` groups of `RESIDENTS` jobs: 2 048 GPUs."""
    return Scenario(source=Residents(days=days), pools=(POOL,), policy=policy, switch_s=8.0)


def passers(count: int) -> Scenario:
    """The same cluster with short jobs."""
    plain = residents(1.0, "spread+backfill")
    return replace(plain, source=Passers(count=count))
