"""The simulator: the scheduler's own core on a virtual clock."""

from plexrl.sim.profiles import PUBLISHED, Cycle, JobProfile, published
from plexrl.sim.shell import virtual_config
from plexrl.sim.slowdown import CycleRecord, JobReport, RunReport, Summary, summarise
from plexrl.sim.virtual_cluster import JobPlan, VirtualCluster

__all__ = [
    "PUBLISHED",
    "Cycle",
    "CycleRecord",
    "JobPlan",
    "JobProfile",
    "JobReport",
    "RunReport",
    "Summary",
    "VirtualCluster",
    "published",
    "summarise",
    "virtual_config",
]
