"""Policies of `Job.rollout`: which weights may draw what is trained."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class BoundedStaleness:
    """Generation may run ahead of training, within a bound (StaleFlow §4).

    Raises:
        InvalidRequestError: `staleness` is negative.
    """

    staleness: int = 0
    """η: no trained token was drawn with weights that are more than so many batches older than
    those that it trains. 0: synchronous training."""

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise InvalidRequestError(
                f"a staleness of {self.staleness} does not exist: set it to 0 or more batches"
            )


RolloutPolicy = BoundedStaleness
"""Any policy."""
SYNCHRONOUS = BoundedStaleness(0)
