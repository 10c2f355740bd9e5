"""Rows of a batch, checked for their shape and packed end to end."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from plexrl.errors import BatchShapeError, TokenRangeError
from plexrl.wire.parameter_checks import short

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def rows_of(what: str, rows: object) -> list[Any]:
    """`rows` as a list.

    Raises:
        BatchShapeError: `rows` is not a list of rows, or is a text.
    """
    if isinstance(rows, Iterable) and not isinstance(rows, str | bytes | dict):
        return list(rows)
    raise BatchShapeError(f"{what}: {short(rows)} is not a list of rows{_hint(rows)}", array=what)


def token_row(row: "Sequence[int]", index: int) -> "npt.NDArray[Any]":
    """A row of token ids. Raises `BatchShapeError`."""
    import numpy as np

    try:
        found = np.asarray(row)
    except (ValueError, TypeError, RuntimeError) as error:
        raise BatchShapeError(f"row {index} is ragged: give a list of token ids") from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise BatchShapeError(
            f"row {index} is {short(row)}, not a list of token ids: give a list of lists of "
            "whole numbers, such as `[tokenizer.encode(text)]`",
            row=index,
        )
    return found


def value_row(what: str, row: object, index: int) -> "npt.NDArray[np.float32]":
    """A row of values, one for each token. Raises `BatchShapeError`."""
    import numpy as np

    try:
        found = np.asarray(row, dtype=np.float32)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise BatchShapeError(
            f"{what}: row {index} is {short(row)}, not a list of numbers: give one number for each "
            "token",
            array=what,
            row=index,
        ) from error
    if found.ndim != 1:
        raise BatchShapeError(
            f"{what}: row {index} has the shape {list(found.shape)}: give a list of numbers, one "
            "for each token",
            array=what,
            row=index,
        )
    return found


def pack_tokens(rows: "Sequence[npt.NDArray[Any]]") -> Any:
    """Concatenate rows of tokens, int32. Raises `TokenRangeError`."""
    import numpy as np

    filled = [row for row in rows if row.size]
    tokens = np.concatenate(filled) if filled else np.empty(0, dtype=np.int32)
    limits = np.iinfo(np.int32)
    if tokens.size and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
        raise TokenRangeError("a token does not fit into 32 bits: is this the model's tokenizer?")
    return tokens.astype(np.int32)


def pack(rows: "Sequence[npt.NDArray[Any]]", dtype: "type[np.generic]") -> Any:
    """Concatenate rows of values."""
    import numpy as np

    return np.concatenate(rows).astype(dtype) if rows else np.empty(0, dtype=dtype)


def check_count(what: str, count: int, other: str, wanted: int) -> None:
    """Raises `BatchShapeError` if `count` is not `wanted`."""
    if count != wanted:
        raise BatchShapeError(f"{count} {what} for {wanted} {other}: one for each is needed")


def _hint(rows: object) -> str:
    """The end of an error message if `rows` is a future or a result, which contains the rows."""
    if hasattr(rows, "result"):
        return ": wait for its result, and give the rows in the result"
    names = [name for name in ("samples", "logprobs") if hasattr(rows, name)]
    return f": give its .{names[0]}" if names else ""


def split_rows(values: Any, lengths: Sequence[int]) -> list[Any]:
    """Split a packed array into rows."""
    import numpy as np

    return np.split(values, np.cumsum(lengths)[:-1]) if len(lengths) else []
