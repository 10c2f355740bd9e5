"""Bulk arrays on the wire: safetensors, with the call's parameters in its metadata.

One body is one safetensors file. Arrays travel as raw little-endian bytes; what is small and
structured travels as JSON under the metadata key `plexrl`. Any safetensors reader can open it, and
files of any safetensors writer are read.

Nothing is copied: arrays are views of the body that they came in, and a body can be written part by
part from where its arrays lie.
"""

import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plexrl.errors import InvalidRequestError

MEDIA_TYPE = "application/vnd.plexrl.safetensors"

METADATA_KEY = "plexrl"

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
Body = bytes | bytearray | memoryview

_HEADER_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100 << 20
_METADATA = "__metadata__"
_ALIGNMENT = 8
"""Of the arrays' bytes in a file."""
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

    The first part is the header; the others are the arrays where they lie, a copy only of one whose
    bytes do not follow each other.
    """
    named = arrays or {}
    # The widest first, so that each begins at a multiple of its items' size.
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
    """`body` with other parameters, in two parts: a header, and the arrays' bytes where they lie.

    Raises as `decode_params`.
    """
    header, view = _split(body)
    header[_METADATA] = {METADATA_KEY: msgspec.json.encode(params).decode()}
    return [_encode_header(header), view]


def decode_params(body: Body) -> dict[str, Any]:
    """Only the parameters of `body`; its arrays are not touched. Raises as `decode_body`."""
    return _params(_split(body)[0])


def decode_body(body: Body) -> tuple[dict[str, Any], Arrays]:
    """The parameters and arrays of `body`. The arrays are views of it, and can be written to where
    it can.

    Raises:
        InvalidRequestError: `body` is no safetensors file, or its metadata is no JSON object.
    """
    header, view = _split(body)
    params = _params(header)
    header.pop(_METADATA, None)
    try:
        entries = {name: msgspec.convert(entry, _Entry) for name, entry in header.items()}
        _check_cover(entries, view.nbytes)
        arrays = {name: _array(entry, view) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError) as error:
        # A dtype that numpy has not, or a shape beyond its bounds.
        raise InvalidRequestError(f"the body is no safetensors file: {error}") from error
    return params, arrays


class _Entry(msgspec.Struct, frozen=True):
    """What a header says of one array."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


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
            raise InvalidRequestError("the body is no safetensors file: its header is cut short")
        end = _HEADER_LENGTH.size + length
        header = msgspec.json.decode(view[_HEADER_LENGTH.size : end], type=dict[str, Any])
    except (struct.error, ValueError, RecursionError) as error:
        # msgspec lets bad UTF-8 and deep nesting through as Python's own errors.
        raise InvalidRequestError(f"the body is no safetensors file: {error}") from error
    return header, view[end:]


def _params(header: Mapping[str, Any]) -> dict[str, Any]:
    try:
        metadata = msgspec.convert(header.get(_METADATA, {}), dict[str, str])
        return msgspec.json.decode(metadata.get(METADATA_KEY, "{}"), type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no safetensors file: {error}") from error


def _check_cover(entries: Mapping[str, _Entry], data_bytes: int) -> None:
    """Every byte belongs to one array: neither overlaps nor holes, as the format has it."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, until = entry.data_offsets
        if begin != end or until < begin:
            raise ValueError(f"{name} is at {begin} to {until}, the array before it ends at {end}")
        end = until
    if end != data_bytes:
        raise ValueError(f"its arrays have {end} bytes, {data_bytes} are there")


def _array(entry: _Entry, view: memoryview) -> Array:
    dtype = _DTYPES[entry.dtype]
    begin, end = entry.data_offsets
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{entry.dtype}{list(entry.shape)} does not have {end - begin} bytes")
    array = np.frombuffer(view[begin:end], dtype=dtype).reshape(entry.shape)
    return array if array.flags.aligned else array.copy()
