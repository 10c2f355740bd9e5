"""What operations and switches of a WPG have taken, as moving averages."""

from dataclasses import dataclass, field

from plexrl.wire.operations import OperationKind

WEIGHT = 0.3
"""Of the newest measurement."""

MOVE_BYTES_PER_S = 2e9
"""Of a state move that nothing is known about yet: a slow host copy."""

OPERATION_S = 1.0
"""Of an operation that nothing is known about yet."""


@dataclass(slots=True)
class Estimates:
    """Moving averages of one WPG, in seconds."""

    state_bytes: int
    seconds_by_kind: dict[OperationKind, float] = field(default_factory=dict)
    seconds_per_token: dict[OperationKind, float] = field(default_factory=dict)
    burst_seconds: float | None = None
    burst_seconds_per_token: float | None = None
    """Of the burst's first operation: one cycle's operations all work on the same tokens."""
    gap_seconds: float | None = None
    """Between the end of an operation and the arrival of the burst's next."""
    think_seconds: float | None = None
    """Between the end of a burst and the arrival of the next one."""

    def observe(self, kind: OperationKind, tokens: int, seconds: float) -> None:
        """Take in a completed run."""
        by_kind = self.seconds_by_kind
        by_kind[kind] = _blend(by_kind.get(kind), seconds)
        if tokens > 0:
            per_token = self.seconds_per_token
            per_token[kind] = _blend(per_token.get(kind), seconds / tokens)

    def observe_burst(self, seconds: float, tokens: int) -> None:
        """Take in a completed burst whose first operation had these `tokens`."""
        self.burst_seconds = _blend(self.burst_seconds, seconds)
        if tokens > 0:
            per_token = seconds / tokens
            self.burst_seconds_per_token = _blend(self.burst_seconds_per_token, per_token)

    def observe_gap(self, seconds: float) -> None:
        """Take in how long the group lay idle inside a burst."""
        self.gap_seconds = _blend(self.gap_seconds, seconds)

    def observe_think(self, seconds: float) -> None:
        """Take in how long the WPG needed nothing between two bursts."""
        self.think_seconds = _blend(self.think_seconds, seconds)

    def operation_s(self, kind: OperationKind, tokens: int) -> float:
        """Predicted seconds of an operation."""
        if tokens > 0 and kind in self.seconds_per_token:
            return self.seconds_per_token[kind] * tokens
        return self.seconds_by_kind.get(kind, OPERATION_S)

    def burst_s(self, tokens: int) -> float:
        """Predicted seconds of a whole burst that begins with these `tokens`; 0 if unknown."""
        if tokens > 0 and self.burst_seconds_per_token is not None:
            return self.burst_seconds_per_token * tokens
        return self.burst_seconds or 0.0

    def move_s(self, kind: OperationKind) -> float:
        """Predicted seconds of an offload or load."""
        return self.seconds_by_kind.get(kind, self.state_bytes / MOVE_BYTES_PER_S)


def _blend(old: float | None, new: float) -> float:
    return new if old is None else (1.0 - WEIGHT) * old + WEIGHT * new
