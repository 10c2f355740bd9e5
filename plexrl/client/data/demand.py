"""Demand traces: one cycle of a job, as far as the user knows it beforehand."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from plexrl.errors import InvalidRequestError
from plexrl.limits import LIMITS
from plexrl.wire.parameter_checks import short


@dataclass(frozen=True, slots=True)
class Segment:
    """One stretch of a cycle in which the deployment needs its GPUs."""

    offset_s: float
    """Start, in seconds from the start of the cycle."""
    duration_s: float
    """Length, in seconds."""
    slack_s: float = 0.0
    """Seconds by which the segment may start late without lengthening the cycle."""


@dataclass(frozen=True, slots=True)
class DemandTrace:
    """One cycle of a job on its GPUs. Without a trace the cluster profiles the job."""

    period_s: float
    """Seconds from the start of one cycle to the start of the next."""
    segments: Sequence[Segment]
    """Ordered by offset, disjoint, inside the period."""
    jitter_s: float = 0.0
    """Standard deviation of the cycle's length."""


def plain_trace(trace: DemandTrace | Mapping[str, object] | None) -> dict[str, object] | None:
    """`trace` as JSON values.

    Raises:
        InvalidRequestError: `trace` is not a trace, or a number is out of bounds.
    """
    if trace is None:
        return None
    if isinstance(trace, DemandTrace):
        trace = {
            "period_s": trace.period_s,
            "segments": [asdict(segment) for segment in trace.segments],
            "jitter_s": trace.jitter_s,
        }
    if isinstance(trace, Mapping):
        _check("trace", "trace", trace)
        segments = trace.get("segments")
        for number, segment in enumerate(segments if isinstance(segments, list | tuple) else ()):
            if isinstance(segment, Mapping):
                _check("segment", f"trace.segments[{number}]", segment)
        return dict(trace)
    raise InvalidRequestError(
        f"trace is {short(trace)}: give a plexrl.DemandTrace(period_s=…, segments=[…])",
        parameter="trace",
    )


def _check(group: str, where: str, values: Mapping[str, object]) -> None:
    for name, bounds in LIMITS[group].items():
        if name in values:
            bounds.check(f"{where}.{name}", values[name])
