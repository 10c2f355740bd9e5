"""What a job was told before its submission: start, end and use, with 80 % intervals. Pure."""

from dataclasses import dataclass, fields

from plexrl.errors import InvalidRequestError

QUOTED_MAX = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuote:
    """Seconds count from the submission."""

    start_s: float
    """When it has its first GPUs."""
    start_low_s: float
    start_high_s: float
    end_s: float
    end_low_s: float
    end_high_s: float
    gpu_hours: float
    """GPU time that it is billed for."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # In this form the check also refuses NaN.
            if not 0.0 <= value <= QUOTED_MAX:
                raise InvalidRequestError(
                    f"the quote's {field.name} is {value}: it must be at least 0 and at most "
                    f"{QUOTED_MAX:g}; pass the quote as it was received"
                )
