"""What a user can say of a job's demand beforehand: one cycle and the busy stretches in it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plexrl.errors import InvalidRequestError
from plexrl.wire.parameter_checks import short


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a cycle in which the deployment needs its GPUs."""

    offset_s: float
    """From the start of the cycle."""
    duration_s: float
    """Seconds of work."""
    slack_s: float = 0.0
    """How long it can be delayed without making the cycle longer."""


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """One cycle of a job on its GPUs; the cluster measures it where nothing is said."""

    period_s: float
    """Seconds from the start of one cycle to the start of the next."""
    segments: Sequence[Segment]
    """In order of their offsets, disjoint, inside the period."""
    jitter_s: float = 0.0
    """Standard deviation of the cycle's length."""


def plain_trace(trace: DemandTrace | Mapping[str, object] | None) -> dict[str, Any] | None:
    """`trace` as it travels; its numbers are checked by the router.

    Raises:
        InvalidRequestError: it is no trace.
    """
    if trace is None:
        return None
    if isinstance(trace, DemandTrace):
        return {
            "period_s": trace.period_s,
            "segments": [asdict(segment) for segment in trace.segments],
            "jitter_s": trace.jitter_s,
        }
    if isinstance(trace, Mapping):
        return dict(trace)
    raise InvalidRequestError(
        f"trace is {short(trace)}: give a plexrl.DemandTrace(period_s=…, segments=[…])",
        parameter="trace",
    )
