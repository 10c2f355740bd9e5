"""Which tokens of a packed batch count for its loss. Pure: client and router ask the same.

A row's first token is predicted from nothing, so its mask never counts.
"""

import numpy as np

from plexrl.errors import InvalidRequestError, NoTokenCountsError
from plexrl.wire.tensors import Array


def predicted(mask: Array, lengths: Array) -> Array:
    """The mask without the first token of each row, which none predicts."""
    found: Array = mask.copy()
    found[np.cumsum(lengths, dtype=np.int64) - lengths] = 0.0
    return found


def check_mask(mask: Array, lengths: Array) -> None:
    """Refuse a mask that leaves nothing to learn, or that is no weight. Rows that do not count are
    no harm beside one that does.

    Raises:
        NoTokenCountsError: no token of the whole batch counts.
        InvalidRequestError: a weight is negative.
    """
    if len(mask) and float(mask.min()) < 0.0:
        at = int(mask.argmin())
        ends = np.cumsum(lengths, dtype=np.int64)
        row = int(np.searchsorted(ends, at, side="right"))
        position = at - int(ends[row] - lengths[row])
        raise InvalidRequestError(
            f"mask is {mask[at]:g} in row {row} at position {position}: a mask weighs tokens, 0 "
            "drops one, and nothing weighs less; negative weights are for plexrl.losses.custom()",
            row=row,
            position=position,
        )
    if not predicted(mask, lengths).any():
        where = "only on the first token of rows, which none predicts" if mask.any() else "0 on all"
        raise NoTokenCountsError(
            f"no token of the batch counts: its mask is {where}, so there is nothing to learn; set "
            "the mask to 1 on the completions' tokens, or leave this batch out"
        )
