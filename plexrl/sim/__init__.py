"""The simulator: the scheduler's own core on a virtual clock."""

from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.engine.simulate import Progress, simulate
from plexrl.sim.profiles import PUBLISHED, Cycle, JobProfile, published
from plexrl.sim.results.result import SimResult
from plexrl.sim.slowdown import CycleRecord, JobReport, RunReport, Summary, summarise
from plexrl.sim.virtual_cluster import JobPlan, VirtualCluster
from plexrl.sim.workload.prices import Prices
from plexrl.sim.workload.scenario import Behaviour, Failures, JobSource, NodeType, Pool, Scenario

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
