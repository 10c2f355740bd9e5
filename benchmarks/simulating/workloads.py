"""Jobs for measuring speed and memory: a cluster that is full all the time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from plexrl.sim.workload.scenario import GIB, NodeType, Pool, Scenario
from plexrl.traces import MODEL_CLASSES, TraceJob

DAY_S = 86_400.0
GROUPS = 64
RESIDENTS = 4
GROUP_GPUS = 32
TENANTS = 5000
"""Of jobs that pass: they come again and again."""

MODEL = "7B"
"""Of every job: four of them fill a group's time without more contention than jitter makes."""

DEMAND = MODEL_CLASSES[MODEL].demand()
NODE_GPUS = 8
NODE = NodeType(
    gpus=NODE_GPUS,
    host_memory_bytes=RESIDENTS * DEMAND["state_bytes"] * NODE_GPUS // GROUP_GPUS + GIB,
    nvme_bytes=0,
)
"""Room for the states of `RESIDENTS` jobs and no more: no policy puts a fifth on a group."""
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
    """Jobs that come, run a few cycles and go, by the thousand."""

    count: int
    cycles: int = 5
    gap_s: float = 12.0

    def jobs(self) -> Iterator[TraceJob]:
        """At a steady pace that the cluster keeps up with."""
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
    """The same cluster with jobs that do not stay."""
    plain = residents(1.0, "spread+backfill")
    return replace(plain, source=Passers(count=count))
