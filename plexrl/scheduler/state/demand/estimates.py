"""Durations of operations and moves: moving averages of a WPG, and a cost model of each path."""

from dataclasses import dataclass, field
from typing import Final

from plexrl.wire.operations import OperationKind

WEIGHT: Final = 0.3
"""Weight of the newest measurement."""
KEPT: Final = 1.0 - WEIGHT

MOVE_BYTES_PER_S = 2e9
"""Assumed rate of a state move before the first measurement: a slow host copy."""

SLOWEST_KEPT: Final = 0.98
"""How much of the slowest run's duration is left after another run of its kind."""

LINK_BYTES_PER_S = 5e10
"""Upper bound of one GPU's link to its host (PCIe 5, 16 lanes)."""

LAW_FADING: Final = 0.02
"""Part of the past weight that each new move removes: about the last fifty moves count."""
LAW_KEPT: Final = 1.0 - LAW_FADING

SPREAD_MIN = 0.05
"""Sizes whose relative deviation is smaller count as one size in a cost model."""

OPERATION_S = 1.0
"""What decisions assume of an operation before the first measurement. Nobody is told it
(`operations.deadlines.durations`)."""


@dataclass(slots=True)
class Estimates:
    """Moving averages of one WPG, in seconds."""

    state_bytes: int
    seconds_by_kind: dict[OperationKind, float] = field(default_factory=dict)
    seconds_per_token: dict[OperationKind, float] = field(default_factory=dict)
    slowest_by_kind: dict[OperationKind, float] = field(default_factory=dict)
    """Upper estimate by kind: the slowest run, forgotten slowly; absent: there was none."""
    burst_seconds: float | None = None
    burst_seconds_per_token: float | None = None
    """By tokens of the burst's first operation: all operations of a cycle use the same tokens."""
    gap_seconds: float | None = None
    """From the end of an operation to the arrival of the next one in the same burst."""
    nvme_load_seconds: float | None = None
    """Duration of a load from NVMe; `seconds_by_kind` has loads from host memory."""
    prefetched_part: float = 0.0
    """Part of a load that is copied during the offload before it; 0: none, or unknown."""
    think_seconds: float | None = None
    """From the end of a burst to the arrival of the next one."""
    think_deviation: float = 0.0
    """Usual distance of that time from its average."""
    stored_step_seconds: float | None = None
    """Optimizer step of the stored state (`dispatch.stored_runs`); None: there was none."""
    slowest_stored_step: float = 0.0
    """As `slowest_by_kind`; 0: there was none."""
    pauses_after_steps: float | None = None
    """Part of the optimizer steps after which the controller paused; None: unknown."""

    def resize(self, state_bytes: int) -> None:
        """The state has another size."""
        self.state_bytes = state_bytes

    def observe(self, kind: OperationKind, tokens: int, seconds: float) -> None:
        """Add a completed run."""
        by_kind = self.seconds_by_kind
        old = by_kind.get(kind)
        by_kind[kind] = seconds if old is None else KEPT * old + WEIGHT * seconds
        slowest = self.slowest_by_kind
        faded = SLOWEST_KEPT * slowest.get(kind, 0.0)
        slowest[kind] = seconds if seconds > faded else faded
        if tokens > 0:
            per_token = self.seconds_per_token
            seconds /= tokens
            old = per_token.get(kind)
            per_token[kind] = seconds if old is None else KEPT * old + WEIGHT * seconds

    def observe_stored_step(self, seconds: float) -> None:
        """Add an optimizer step of the stored state."""
        self.stored_step_seconds = _blend(self.stored_step_seconds, seconds)
        self.slowest_stored_step = max(seconds, SLOWEST_KEPT * self.slowest_stored_step)

    def observe_burst(self, seconds: float, tokens: int) -> None:
        """Add a completed burst whose first operation had these `tokens`."""
        self.burst_seconds = _blend(self.burst_seconds, seconds)
        if tokens > 0:
            per_token = seconds / tokens
            self.burst_seconds_per_token = _blend(self.burst_seconds_per_token, per_token)

    def observe_nvme_load(self, seconds: float) -> None:
        """Add a load from NVMe."""
        self.nvme_load_seconds = _blend(self.nvme_load_seconds, seconds)

    def observe_prefetch(self, part: float) -> None:
        """Add a load after an offload, of which this part had been copied before."""
        self.prefetched_part = KEPT * self.prefetched_part + WEIGHT * part

    def observe_gap(self, seconds: float) -> None:
        """Add an idle time of the group inside a burst."""
        self.gap_seconds = _blend(self.gap_seconds, seconds)

    def observe_think(self, seconds: float) -> None:
        """Add a time between two bursts."""
        if self.think_seconds is not None:
            off_s = abs(seconds - self.think_seconds)
            self.think_deviation = KEPT * self.think_deviation + WEIGHT * off_s
        self.think_seconds = _blend(self.think_seconds, seconds)

    def observe_after_step(self, *, paused: bool) -> None:
        """Add what followed an optimizer step: a pause, or more of the same burst."""
        self.pauses_after_steps = _blend(self.pauses_after_steps, float(paused))

    def operation_s(self, kind: OperationKind, tokens: int) -> float:
        """Predicted seconds of an operation, for decisions: they need a number for every kind."""
        if tokens > 0 and kind in self.seconds_per_token:
            return self.seconds_per_token[kind] * tokens
        return self.seconds_by_kind.get(kind, OPERATION_S)

    def known_s(self, kind: OperationKind, tokens: int) -> float | None:
        """Predicted seconds of an operation; None: its kind was not measured."""
        return self.operation_s(kind, tokens) if kind in self.seconds_by_kind else None

    def burst_s(self, tokens: int) -> float:
        """Predicted seconds of a whole burst that begins with these `tokens`; 0 if unknown."""
        if tokens > 0 and self.burst_seconds_per_token is not None:
            return self.burst_seconds_per_token * tokens
        return self.burst_seconds or 0.0


def _blend(old: float | None, new: float) -> float:
    return new if old is None else KEPT * old + WEIGHT * new


@dataclass(slots=True)
class MoveLaw:
    """Cost model of one path: seconds = fixed_s + bytes / rate, by least squares.

    Old moves lose weight, so the model follows a machine that changes. Moves of one size alone do
    not determine both terms: predictions for other sizes are then proportional.
    """

    weight: float = 0.0
    nbytes: float = 0.0
    took_s: float = 0.0
    nbytes_squared: float = 0.0
    nbytes_took: float = 0.0

    def observe(self, nbytes: float, seconds: float) -> None:
        """Add one move."""
        kept = LAW_KEPT
        self.weight = kept * self.weight + 1.0
        self.nbytes = kept * self.nbytes + nbytes
        self.took_s = kept * self.took_s + seconds
        self.nbytes_squared = kept * self.nbytes_squared + nbytes * nbytes
        self.nbytes_took = kept * self.nbytes_took + nbytes * seconds

    def seconds(self, nbytes: float) -> float:
        """Predicted seconds of a move of so many bytes."""
        if self.weight == 0.0:
            return nbytes / MOVE_BYTES_PER_S
        mean, mean_s = self.nbytes / self.weight, self.took_s / self.weight
        spread = self.nbytes_squared / self.weight - mean * mean
        if spread <= (SPREAD_MIN * mean) ** 2:
            # One size alone: the cost of other sizes is proportional.
            return mean_s * nbytes / mean if mean > 0.0 else mean_s
        slope = (self.nbytes_took / self.weight - mean * mean_s) / spread
        slope = max(slope, 0.0)
        return max(0.0, mean_s + slope * (nbytes - mean))
