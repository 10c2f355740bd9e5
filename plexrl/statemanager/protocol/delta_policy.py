"""Whether and how a pull of a version transfers only changes."""

from dataclasses import dataclass

from plexrl.errors import InvalidRequestError

STRIDE_BYTES = 64
"""Compared blocks are multiples of this: eight words of eight bytes, whose results of a byte each
form one word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaPolicy:
    """Whether and how a pull transfers only changes."""

    block_bytes: int = 128
    """Size of a compared block; a multiple of 64."""
    changed_max: float = 0.8
    """Maximum size of a delta, as a fraction of all bytes; a larger one is not used."""
    only_where_quicker: bool = False
    """Use no delta within a machine, where comparing takes two to four times as long as copying,
    nor over a network on which recent full pulls were quicker."""

    def __post_init__(self) -> None:
        if self.block_bytes < STRIDE_BYTES or self.block_bytes % STRIDE_BYTES:
            raise InvalidRequestError(f"block_bytes must be a multiple of {STRIDE_BYTES}")
        if not 0 <= self.changed_max <= 1:
            raise InvalidRequestError("changed_max must be between 0 and 1")
