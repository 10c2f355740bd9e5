"""Ranges of all numbers that reach the core from outside.

A request with a number outside its range is refused before anything changes. A report describes
something that has already happened, so its measurements are clipped to their range instead. The
bounds are far above any real cluster, and low enough that no sum in the state exceeds 64 bits, the
integers that a snapshot can hold.
"""

import math
from typing import Final

from msgspec.structs import replace

from plexrl.errors import InvalidRequestError
from plexrl.limits import SPEED_MAX
from plexrl.scheduler.state.messages import events as ev

COUNT_MAX = 1_000_000_000
GPUS_MAX = 1 << 16
"""GPUs of one node, and of one deployment."""
BYTES_MAX = 1 << 50
"""Bytes of one state, one payload and one tier: 1 PiB."""
TOKENS_MAX = 1 << 40
"""Tokens of one operation."""
SECONDS_MAX = 1e15
PRIORITY_MAX = 100
WEIGHT_MAX = 1e6
"""Weight of a tenant."""
PORT_MAX = 65_535
TOTAL_MAX = (1 << 62) - 1
"""Sums saturate here."""

_Range = tuple[str, float, float]

_GPUS: Final = (0, GPUS_MAX)
_BYTES: Final = (0, BYTES_MAX)
_COUNT: Final = (0, COUNT_MAX)
_SECONDS: Final = (0.0, SECONDS_MAX)
_PRIORITY: Final = (-PRIORITY_MAX, PRIORITY_MAX)
_ABOVE_0: Final = math.nextafter(0.0, 1.0)
_BELOW_1: Final = math.nextafter(1.0, 0.0)

RANGES: Final[dict[type[ev.Event], tuple[_Range, ...]]] = {
    ev.NodeJoined: (
        ("gpus", *_GPUS),
        ("gpu_memory_bytes", *_BYTES),
        ("host_memory_bytes", *_BYTES),
        ("nvme_bytes", *_BYTES),
        ("speed", 0.0, SPEED_MAX),
    ),
    ev.TenantConfigured: (
        ("weight", _ABOVE_0, WEIGHT_MAX),
        ("jobs_max", *_COUNT),
        ("gpus_max", *_COUNT),
        ("gpu_seconds_max", *_SECONDS),
        ("live_jobs_max", *_COUNT),
        ("checkpoints_max", *_COUNT),
        ("checkpoint_bytes_max", 0, TOTAL_MAX),
        ("priority_max", *_PRIORITY),
        ("slo", 0.0, _BELOW_1),
    ),
    ev.JobSubmitted: (
        ("priority", *_PRIORITY),
        ("controller_timeout_s", _ABOVE_0, SECONDS_MAX),
        ("reattach_timeout_s", *_SECONDS),
        ("gang", *_COUNT),
        ("expected_s", *_SECONDS),
        ("slo", 0.0, _BELOW_1),
    ),
    ev.DeploymentCreated: (("workers", 1, GPUS_MAX), ("state_bytes", *_BYTES)),
    ev.OperationSubmitted: (("tokens", 0, TOKENS_MAX), ("payload_bytes", *_BYTES)),
}
"""(field, minimum, maximum) of the numbers of each request. A field that is None is not checked."""


def check_numbers(event: ev.Event) -> None:
    """Refuse an event with a number outside its range, or one that is not a number.

    Raises:
        InvalidRequestError: there is one; nothing has changed.
    """
    ranges = RANGES.get(type(event))
    if ranges is None:
        return
    for name, least, most in ranges:
        value = getattr(event, name)
        # Comparisons with NaN are false, so NaN is refused too.
        if value is not None and not least <= value <= most:
            low = "above 0" if least == _ABOVE_0 else f"at least {least:g}"
            high = "below 1" if most == _BELOW_1 else f"at most {most:g}"
            raise InvalidRequestError(f"{name} is {value}: it must be {low} and {high}")
    if isinstance(event, ev.NodeJoined):
        first, last = event.ports
        if not 0 <= first <= last <= PORT_MAX or (last and not first):
            raise InvalidRequestError(
                f"ports of node {event.node!r} are {first} to {last}: give the first and the last "
                f"port of a range within 1 to {PORT_MAX}, or 0 and 0"
            )
    if isinstance(event, ev.DeploymentCreated) and event.trace is not None:
        trace = event.trace
        longest = max(trace.jitter_s, *(segment.slack_s for segment in trace.segments), 0.0)
        if longest > trace.period_s * COUNT_MAX or not 0 <= trace.cycles <= COUNT_MAX:
            raise InvalidRequestError(
                f"the demand trace has a jitter or a slack of {longest:g} s for a period of "
                f"{trace.period_s:g} s, or {trace.cycles} cycles: give the cycle as it was measured"
            )


def within_limits(event: ev.OperationFinished) -> ev.OperationFinished:
    """The report with its measurements clipped to their ranges."""
    moved = event.moved
    if (
        0.0 <= event.compute_s <= SECONDS_MAX
        and 0.0 <= event.transfer_s <= SECONDS_MAX
        and 0 <= event.result_bytes <= BYTES_MAX
        and 0 <= event.peak_bytes <= BYTES_MAX
        and (moved is None or moved == _clipped(moved))
    ):
        return event
    return replace(
        event,
        compute_s=_seconds(event.compute_s),
        transfer_s=_seconds(event.transfer_s),
        result_bytes=bounded_bytes(event.result_bytes),
        peak_bytes=bounded_bytes(event.peak_bytes),
        moved=None if moved is None else _clipped(moved),
    )


def _clipped(moved: ev.StateMoved) -> ev.StateMoved:
    bytes_moved = bounded_bytes(moved.bytes_moved)
    return ev.StateMoved(
        bytes_moved=bytes_moved,
        tier=moved.tier,
        prefetched_bytes=min(bounded_bytes(moved.prefetched_bytes), bytes_moved),
        prefetch_s=_seconds(moved.prefetch_s),
    )


def bounded_bytes(nbytes: int) -> int:
    """A reported size, clipped to its range."""
    return min(max(0, nbytes), BYTES_MAX)


def _seconds(seconds: float) -> float:
    return min(max(0.0, seconds), SECONDS_MAX) if seconds == seconds else 0.0
