"""Encodes arrays as safetensors, with a call's parameters in the metadata.

One body is one safetensors file. Arrays are raw little-endian bytes; parameters are JSON under the
metadata key `plexrl`. Any safetensors reader can read a body, and files of any safetensors writer
can be decoded.

Nothing is copied: decoded arrays are views of the body, and a body can be sent part by part from
the memory of its arrays.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError, NoTokenCountsError

MEDIA_TYPE = "application/vnd.plexrl.safetensors"

METADATA_KEY = "plexrl"

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Body = bytes | bytearray | memoryview

_HEADER_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100 << 20
_METADATA = "__metadata__"
_ALIGNMENT = 8
"""Alignment of the arrays' bytes in a file."""
_DTYPES = {
    name: np.dtype(code)
    for name, code in (
        *(("BOOL", "?"), ("U8", "<u1"), ("I8", "<i1"), ("U16", "<u2"), ("I16", "<i2")),
        *(("F16", "<f2"), ("U32", "<u4"), ("I32", "<i4"), ("F32", "<f4")),
        *(("U64", "<u8"), ("I64", "<i8"), ("F64", "<f8"), ("C64", "<c8")),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode_parts(
    params: Mapping[str, Any], arrays: Mapping[str, Array] | None = None
) -> list[bytes | memoryview]:
    """`params` (JSON values) and `arrays` (any numeric dtype, any shape) as one body, in parts.

    The first part is the header; the others are views of the arrays. Only arrays that are not
    contiguous are copied.
    """
    named = arrays or {}
    # The widest items first, so that each array is aligned to its item size.
    order = sorted(named, key=lambda name: (-named[name].dtype.itemsize, name))
    header: dict[str, Any] = {_METADATA: {METADATA_KEY: msgspec.json.encode(params).decode()}}
    parts: list[bytes | memoryview] = []
    end = 0
    for name in order:
        array = named[name]
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype.newbyteorder("<")],
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
        if array.nbytes:
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            parts.append(little.reshape(-1).view(np.uint8).data)
    return [_encode_header(header), *parts]


def encode_body(params: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    """As `encode_parts`, in one piece."""
    return b"".join(encode_parts(params, arrays))


def with_params(body: Body, params: Mapping[str, Any]) -> list[bytes | memoryview]:
    """`body` with other parameters, in two parts: a new header, and a view of the arrays' bytes.

    Raises as `decode_params`.
    """
    header, view = _split(body)
    header[_METADATA] = {METADATA_KEY: msgspec.json.encode(params).decode()}
    return [_encode_header(header), view]


def decode_params(body: Body) -> dict[str, Any]:
    """Only the parameters of `body`, without its arrays. Raises as `decode_body`."""
    return _params(_split(body)[0])


def decode_body(body: Body) -> tuple[dict[str, Any], Arrays]:
    """The parameters and arrays of `body`. The arrays are views of `body`, writable if it is.

    Raises:
        InvalidRequestError: `body` is not a safetensors file, or its metadata is not a JSON object.
    """
    header, view = _split(body)
    params = _params(header)
    header.pop(_METADATA, None)
    try:
        entries = {name: msgspec.convert(entry, _Entry) for name, entry in header.items()}
        _check_cover(entries, view.nbytes)
        arrays = {name: _array(entry, view) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        # Includes dtypes that numpy lacks, and shapes beyond numpy's limits.
        raise _not_safetensors(error) from error
    return params, arrays


class _Entry(msgspec.Struct, frozen=True):
    """One array's entry in the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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


def _encode_header(header: Mapping[str, Any]) -> bytes:
    body = msgspec.json.encode(header)
    body += b" " * (-len(body) % _ALIGNMENT)
    return _HEADER_LENGTH.pack(len(body)) + body


def _split(body: Body) -> tuple[dict[str, Any], memoryview]:
    """The header, and a view of the arrays' bytes."""
    view = memoryview(body).cast("B")
    try:
        (length,) = _HEADER_LENGTH.unpack(view[: _HEADER_LENGTH.size])
        if length > min(_HEADER_BYTES_MAX, view.nbytes - _HEADER_LENGTH.size):
            raise _not_safetensors("its header is cut short")
        end = _HEADER_LENGTH.size + length
        header = msgspec.json.decode(view[_HEADER_LENGTH.size : end], type=dict[str, Any])
    except (struct.error, ValueError, RecursionError) as error:
        # For bad UTF-8 and deep nesting msgspec raises Python's own errors.
        raise _not_safetensors(error) from error
    return header, view[end:]


def _not_safetensors(reason: object) -> InvalidRequestError:
    return InvalidRequestError(f"the body is not a valid safetensors file: {reason}")


def _params(header: Mapping[str, Any]) -> dict[str, Any]:
    try:
        metadata = msgspec.convert(header.get(_METADATA, {}), dict[str, str])
        return msgspec.json.decode(metadata.get(METADATA_KEY, "{}"), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise _not_safetensors(error) from error


def _check_cover(entries: Mapping[str, _Entry], data_bytes: int) -> None:
    """Check that arrays neither overlap nor leave gaps, as the format requires."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, last = entry.data_offsets
        if begin != end or last < begin:
            raise ValueError(f"{name} is at {begin} to {last}, the array before it ends at {end}")
        end = last
    if end != data_bytes:
        raise ValueError(f"its header describes {end} bytes of arrays, but it has {data_bytes}")


def _array(entry: _Entry, view: memoryview) -> Array:
    dtype = _DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{entry.dtype}{list(entry.shape)} does not have {end - begin} bytes")
    array = np.frombuffer(view[begin:end], dtype=dtype).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()
