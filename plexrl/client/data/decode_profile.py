"""The profile of a rollout engine: measured decode and prefill times by size of its tensor-parallel
groups, rows and context (PAT §4.2, Offline Profiler).

All groups of a size have the same load while a point is measured, and its numbers are those of one
group. A profile belongs to a model and to hardware, not to a data set.
"""

import math
from dataclasses import dataclass, fields

import msgspec

from plexrl.errors import InvalidRequestError
from plexrl.limits import check_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSubject:
    """The engine that was profiled; a profile serves only engines that are equal in all of this."""

    model: str
    """Architecture and sizes."""
    dtype: str
    """Type of the weights."""
    device: str
    """Name of the processor of each rank."""
    tp_sizes: tuple[int, ...]
    """As in `DeploymentSpec`; the last one is the number of ranks of an engine."""
    kv_token_bytes: int
    """KV cache of one token, of all ranks together."""

    def check_serves(self, wanted: "ProfileSubject") -> None:
        """Raises InvalidRequestError: an engine of `wanted` has other times."""
        for field in fields(self):
            own, other = getattr(self, field.name), getattr(wanted, field.name)
            if own != other:
                raise InvalidRequestError(
                    f"the profile was measured with {field.name} {own!r}, and the engine has "
                    f"{other!r}: profile the rollout that is to use it into a file of its own",
                    parameter=field.name,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """Times of one group with `rows` rows of equal length."""

    tp: int
    """Ranks of the group."""
    rows: int
    """B: rows of the group that decode at the same time."""
    prompt_tokens: int
    """L: tokens of each row before the first decode step."""
    kv_tokens: float
    """T: tokens in the KV cache of all rows of the group, the mean over the measured steps."""
    step_s: float
    """Seconds of one decode step."""
    prefill_s: float
    """Seconds to compute the KV cache of all prompts of the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeProfile:
    """Measured points, and the cost of a switch.

    Raises:
        InvalidRequestError: a number is out of range, or a point is of another group size.
    """

    subject: ProfileSubject
    """The engine that was profiled."""
    points: tuple[ProfilePoint, ...] = ()
    """In the order in which they were measured."""
    switch_s: float = 0.0
    """Seconds of a switch in which no KV cache moves."""
    kv_bytes_per_s: float | None = None
    """One-way bandwidth of each rank in a switch that moves KV cache. Absent: moving it took no
    longer than moving none."""

    def __post_init__(self) -> None:
        for point in self.points:
            if point.tp not in self.subject.tp_sizes:
                raise InvalidRequestError(
                    f"the profile has a point of tp {point.tp}, and its sizes are "
                    f"{list(self.subject.tp_sizes)}: measure it again"
                )
            numbers = (
                point.rows,
                point.prompt_tokens,
                point.kv_tokens,
                point.step_s,
                point.prefill_s,
            )
            if not all(0 < number < math.inf for number in numbers):
                raise InvalidRequestError(
                    f"the profile has the point {point}: all its numbers must be finite and above 0"
                )
        own = {"switch_s": self.switch_s, "kv_bytes_per_s": self.kv_bytes_per_s}
        check_numbers("profile", own)

    def to_json(self) -> str:
        """The text of its file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode()


def profile_from_json(text: str | bytes) -> DecodeProfile:
    """The profile that `to_json` encoded. Raises `InvalidRequestError` for other text."""
    try:
        return msgspec.json.decode(text, type=DecodeProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"this is no profile of a rollout engine: {error}; write one with "
            "`rollout.profile_decoding`"
        ) from error
