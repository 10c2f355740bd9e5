"""Checks the loss mask of a packed batch. Pure; used by client and router.

A row's first token is not predicted, so its mask never counts.
"""

import numpy as np

from plexrl.errors import InvalidRequestError, NoTokenCountsError
from plexrl.wire.tensors import Array


def predicted(mask: Array, lengths: Array) -> Array:
    """The mask with 0 at the first token of each row, which is not predicted."""
    found: Array = mask.copy()
    found[np.cumsum(lengths, dtype=np.int64) - lengths] = 0.0
    return found


def row_of(index: int, lengths: Array) -> tuple[int, int]:
    """The row of the token at `index` in the packed batch, and its position in that row."""
    ends = np.cumsum(lengths, dtype=np.int64)
    row = int(np.searchsorted(ends, index, side="right"))
    return row, index - int(ends[row] - lengths[row])


def check_mask(mask: Array, lengths: Array) -> None:
    """Refuse a mask without any counted token, or with a negative weight. Single rows may have only
    zeros.

    Raises:
        NoTokenCountsError: no token of the whole batch counts.
        InvalidRequestError: a weight is negative.
    """
    if len(mask) and float(mask.min()) < 0.0:
        at = int(mask.argmin())
        row, position = row_of(at, lengths)
        raise InvalidRequestError(
            f"mask is {mask[at]:g} in row {row} at position {position}: mask weights must be at "
            "least 0, and 0 drops a token; use plexrl.losses.custom() for negative weights",
            row=row,
            position=position,
        )
    if not predicted(mask, lengths).any():
        found = "above 0 only on rows' first tokens, which are not predicted"
        raise NoTokenCountsError(
            f"no token of the batch counts: its mask is {found if mask.any() else '0 everywhere'}; "
            "set the mask to 1 on the completions' tokens, or leave this batch out"
        )
