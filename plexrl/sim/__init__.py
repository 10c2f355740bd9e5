"""The simulator: the scheduler's own core on a virtual clock."""

from plexrl.sim.prices import Prices
from plexrl.sim.profiles import PUBLISHED, Cycle, JobProfile, published
from plexrl.sim.replay import Progress, simulate
from plexrl.sim.result import SimResult
from plexrl.sim.scenario import Behaviour, Failures, JobSource, NodeType, Pool, Scenario
from plexrl.sim.shell import virtual_config
from plexrl.sim.slowdown import CycleRecord, JobReport, RunReport, Summary, summarise
from plexrl.sim.virtual_cluster import JobPlan, VirtualCluster

__all__ = [
    "PUBLISHED",
    "Behaviour",
    "Cycle",
    "CycleRecord",
    "Failures",
    "JobPlan",
    "JobProfile",
    "JobReport",
    "JobSource",
    "NodeType",
    "Pool",
    "Prices",
    "Progress",
    "RunReport",
    "Scenario",
    "SimResult",
    "Summary",
    "VirtualCluster",
    "published",
    "simulate",
    "summarise",
    "virtual_config",
]
