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

    def burst_s(self, tokens: int) -> float:
        """Predicted seconds for which it holds its groups from the start of a burst with these
        `tokens` on; 0 if unknown. A burst that was cut is cut again."""
        return self.burst.part_s if self.burst.cut_s else self.estimates.burst_s(tokens)

    def know(self, trace: DemandTrace | None) -> None:
        """The demand was measured, now or for an earlier deployment of the job's name; None: it is
        unknown."""
        self.trace = trace
        self.has_prior = False

    def suppose(self, prior: DemandTrace | None) -> None:
        """The demand is planned by this prior; None: it is unknown."""
        self.trace = prior
        self.has_prior = prior is not None

    def meter(self, now: float) -> float | None:
        """Count GPU time from now on. Returns since when it was not counted yet."""
        since = self.metered_at
        self.metered_at = now
        return since

    def relayout(self, memory: DeviceMemory | None, state_bytes: int) -> None:
        """It has another layout, with other needs."""
        self.memory = memory
        self.peak_bytes = 0
        self.estimates.resize(state_bytes)

    def need(self, memory: DeviceMemory) -> None:
        """It needs this memory on each GPU, as measured."""
        self.memory = memory

    def observe_peak(self, nbytes: int) -> None:
        """A run reported the peak of torch's allocator."""
        if nbytes > self.peak_bytes:
            self.peak_bytes = nbytes
