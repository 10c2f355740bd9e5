"""Elements that change their dtype on the way, bit for bit as torch changes them. Pure.

Values are rounded to nearest, ties to even. F8_E4M3 has no infinity: what is beyond 448, infinity
included, becomes 448 there; in F8_E5M2 it becomes infinity (both as torch 2.13 has it; torch 2.11
makes NaN of the former). A scaled tensor saturates in either: its scale brings the largest value to
the format's largest.

An F8 value depends only on the upper half of an F32 and on whether the lower half is zero. So F32
is cut to 16 bits with its last bit set where anything was cut off (rounding to odd, which no later
rounding to fewer bits can tell from the original), and a table of 65 536 bytes says the rest; that
is three times as fast as the conversion it is made from.
"""

from functools import cache

import ml_dtypes
import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError

Array = npt.NDArray[np.generic]

F8_MAX = {"F8_E4M3": 448.0, "F8_E5M2": 57344.0}
"""The largest finite value of each format."""

BLOCK_ITEMS = 64 << 10
"""Elements converted at a time: with what lies between, they stay in the processor's cache."""

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Of the dtypes that casts know."""


def cast(source: Array, target: Array, cast_dtypes: tuple[str, str], scale: float = 1.0) -> None:
    """Write every element of `source` to its place in `target`, divided by `scale`.

    Both are [rows, columns] of any strides, in the numpy dtypes of `cast_dtypes`.

    Raises:
        InvalidRequestError: no rule casts these dtypes.
    """
    rows, columns = source.shape
    columns_max = min(columns, BLOCK_ITEMS) or 1
    rows_max = max(1, BLOCK_ITEMS // columns_max)
    for row in range(0, rows, rows_max):
        for column in range(0, columns, columns_max):
            window = np.s_[row : row + rows_max, column : column + columns_max]
            _cast_block(source[window], target[window], cast_dtypes, scale)


def scale_of(amax: float, dtype: str) -> float:
    """What to divide a tensor by whose largest magnitude is `amax`, so that it just fits an F8
    format; the values are to be multiplied by it again where they are used."""
    scale = float(np.float32(amax) / np.float32(F8_MAX[dtype]))
    return scale if np.isfinite(scale) and scale > 0 else 1.0


def amax_of(source: Array) -> float:
    """The largest magnitude in an F32 or BF16 array; 0 of an empty one."""
    largest = 0.0
    for block in _blocks(source):
        wide = block.astype(np.float32, copy=False)
        largest = max(largest, float(wide.max(initial=0.0)), -float(wide.min(initial=0.0)))
    return largest


def _blocks(source: Array) -> list[Array]:
    flat = source.reshape(-1)
    return [flat[at : at + BLOCK_ITEMS] for at in range(0, flat.size, BLOCK_ITEMS)]


def _cast_block(source: Array, target: Array, dtypes: tuple[str, str], scale: float) -> None:
    match dtypes:
        case ("F32" | "BF16", "F8_E4M3" | "F8_E5M2"):
            if scale != 1.0:
                scaled = source.astype(np.float32) / np.float32(scale)
                limit = F8_MAX[dtypes[1]]
                # The division may round to just above the limit.
                source = np.clip(scaled, -limit, limit)
                dtypes = ("F32", dtypes[1])
            _to_f8(source, target, dtypes)
        case ("F32", "BF16") | ("BF16", "F32") | ("F32", "F16"):
            if scale != 1.0:
                raise InvalidRequestError(f"only F8 formats are scaled, not {dtypes[1]}")
            # Overflow to infinity is what torch does as well.
            with np.errstate(over="ignore", invalid="ignore"):
                np.copyto(target, source, casting="unsafe")
        case _:
            raise InvalidRequestError(f"no rule casts {dtypes[0]} to {dtypes[1]}")


def _to_f8(source: Array, target: Array, dtypes: tuple[str, str]) -> None:
    table = _f8_table(dtypes[1])
    if dtypes[0] == "BF16":
        short = source.view(np.uint16)
    else:
        wide = np.ascontiguousarray(source).view(np.uint16).reshape(*source.shape, 2)
        short = wide[..., 1] | (wide[..., 0] != 0)
    target.view(np.uint8)[...] = table[short]


@cache
def _f8_table(dtype: str) -> npt.NDArray[np.uint8]:
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    values = every.astype(np.float32)
    if dtype == "F8_E4M3":
        values = np.clip(values, -F8_MAX[dtype], F8_MAX[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        table = values.astype(NUMPY_DTYPES[dtype]).view(np.uint8)
    # A table shared by all threads is not to be written to.
    table.setflags(write=False)
    return np.asarray(table, dtype=np.uint8)
