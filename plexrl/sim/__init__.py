"""The simulator: runs the scheduler's own core on a virtual clock."""

from plexrl.sim.engine.shell import virtual_config
from plexrl.sim.engine.simulate import RunProgress, simulate
from plexrl.sim.results.result import SimResult
from plexrl.sim.workload.prices import Prices
from plexrl.sim.workload.scenario import Behaviour, Failures, JobSource, NodeType, Pool, Scenario

__all__ = [
    "Behaviour",
    "Failures",
    "JobSource",
    "NodeType",
    "Pool",
    "Prices",
    "RunProgress",
    "Scenario",
    "SimResult",
    "simulate",
    "virtual_config",
]
