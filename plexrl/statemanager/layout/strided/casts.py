"""Casts of elements between dtypes, bit for bit as torch casts them. Pure.

Values are rounded to nearest, ties to even; what overflows becomes infinity.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError

Array = npt.NDArray[np.generic]

CAST_RULES = frozenset({("F32", "BF16"), ("F32", "F16"), ("BF16", "F32"), ("F16", "F32")})
"""The supported (source dtype, target dtype) pairs."""

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The numpy dtype of each dtype that a cast reads or writes."""


def cast(source: Array, target: Array, dtypes: tuple[str, str]) -> None:
    """Write every element of `source` to its position in `target`.

    Both arrays are [rows, columns] with any strides, in the numpy dtypes of `dtypes`.

    Raises:
        InvalidRequestError: the cast is not supported.
    """
    if dtypes not in CAST_RULES:
        raise InvalidRequestError(f"a cast from {dtypes[0]} to {dtypes[1]} is not supported")
    # torch overflows to infinity as well.
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(target, source, casting="unsafe")
