"""Settings of the switch controller of a rollout."""

from dataclasses import dataclass

from plexrl.client.data.decode_profile import DecodeProfile
from plexrl.errors import InvalidRequestError
from plexrl.rollout.policies.adaptive_tp.predictor import LatencyPredictor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveTpSettings:
    """The engines of all instances are alike.

    Raises:
        InvalidRequestError: the longest response has no token, or the profile lacks points.
    """

    profile: DecodeProfile
    """Profile of the engines."""
    response_tokens_max: int
    """Longest response."""

    def __post_init__(self) -> None:
        if self.response_tokens_max < 1:
            raise InvalidRequestError(
                f"response_tokens_max is {self.response_tokens_max}: set it to 1 or more"
            )
        LatencyPredictor(self.profile)
