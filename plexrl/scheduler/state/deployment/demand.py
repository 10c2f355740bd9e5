"""The GPU time and memory that a deployment needs, as measured or declared."""

from dataclasses import dataclass, field

from plexrl.model.memory.device_memory import DeviceMemory
from plexrl.scheduler.state.demand.estimates import Estimates
from plexrl.scheduler.state.demand.trace import DemandTrace
from plexrl.scheduler.state.deployment.burst import Burst
from plexrl.scheduler.state.deployment.cycles import Cycles
from plexrl.scheduler.state.deployment.switch_times import SwitchTimes


@dataclass(slots=True, kw_only=True)
class Demand:
    """What a deployment needs, and the measurements that tell."""

    estimates: Estimates
    trace: DemandTrace | None = None
    """Its demand, measured or declared by the user; None: unknown."""
    has_prior: bool = False
    """`trace` is that of earlier deployments like it (`accounting.earlier_jobs`), until its own
    profile is complete."""
    cycles: Cycles = field(default_factory=Cycles)
    burst: Burst = field(default_factory=Burst)
    switch_times: SwitchTimes = field(default_factory=SwitchTimes)
    metered_at: float | None = None
    """Time up to which the GPU time of its runs is counted."""
    memory: DeviceMemory | None = None
    """What it needs on each GPU; None: unknown, its state only."""
    peak_bytes: int = 0
    """The largest reported peak of torch's allocator on one of its GPUs; 0: none was reported."""

    @property
    def has_own_trace(self) -> bool:
        """Whether its demand was measured or declared."""
        return self.trace is not None and not self.has_prior
