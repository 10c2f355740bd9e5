"""A simulated trajectory: what it will generate, and who has generated what so far."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SimulatedSegment:
    """One stretch of decoding on one instance with one model version."""

    instance: int
    version: int
    start_s: float
    end_s: float
    tokens: int


@dataclass(slots=True, kw_only=True, eq=False)
class SimulatedTrajectory:
    """One response. The simulator knows its length, the systems do not."""

    number: int
    group: int
    """Index of its prompt."""
    prompt_tokens: int
    response_tokens: int
    done_tokens: int = 0
    version: int | None = None
    """The oldest version that may generate it; absent before its first routing."""
    segments: list[SimulatedSegment] = field(default_factory=list)
    reported: int = 0
    """Number of segments that the coordinator knows."""
    prefill_tokens: int = 0
    """Tokens whose KV cache was computed by prefill, over all its admissions."""
    admissions: int = 0
    finished_s: float | None = None
    holds_kv: bool = False
    """Its KV cache was on its instance when it was interrupted."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far."""
        return self.prompt_tokens + self.done_tokens
