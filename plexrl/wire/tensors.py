"""Bulk arrays on the wire: safetensors, with the call's parameters in its metadata.

One body is one safetensors file. Arrays travel as raw little-endian bytes; what is small and
structured travels as JSON under the metadata key `plexrl`. Any safetensors reader can open it.
"""

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from plexrl.errors import InvalidRequestError

MEDIA_TYPE = "application/vnd.plexrl.safetensors"

METADATA_KEY = "plexrl"

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

_HEADER_LENGTH = struct.Struct("<Q")
_HEADER_BYTES_MAX = 100 << 20


def encode_body(params: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    """`params` (JSON values) and `arrays` (any numeric dtype, any shape) as one body."""
    contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
    # ascontiguousarray makes a scalar one-dimensional; give it its shape back.
    shaped = {name: array.reshape((arrays or {})[name].shape) for name, array in contiguous.items()}
    return save(shaped, metadata={METADATA_KEY: msgspec.json.encode(params).decode()})


def decode_params(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Only the parameters of `body`; its arrays are not touched. Raises as `decode_body`."""
    view = memoryview(body)
    try:
        (length,) = _HEADER_LENGTH.unpack(view[: _HEADER_LENGTH.size])
        if length > min(_HEADER_BYTES_MAX, view.nbytes):
            raise InvalidRequestError("the body is no safetensors file: its header is cut short")
        header_json = bytes(view[_HEADER_LENGTH.size : _HEADER_LENGTH.size + length])
        header = msgspec.json.decode(header_json, type=dict[str, Any])
        metadata = msgspec.convert(header.get("__metadata__", {}), dict[str, str])
        return msgspec.json.decode(metadata.get(METADATA_KEY, "{}"), type=dict[str, Any])
    except (struct.error, ValueError, RecursionError) as error:
        # msgspec lets bad UTF-8 and deep nesting through as Python's own errors.
        raise InvalidRequestError(f"the body is no safetensors file: {error}") from error


def decode_body(body: bytes | bytearray | memoryview) -> tuple[dict[str, Any], Arrays]:
    """The parameters and arrays of `body`.

    Raises:
        InvalidRequestError: `body` is no safetensors file, or its metadata is no JSON object.
    """
    params = decode_params(body)
    try:
        arrays: Arrays = load(bytes(body))
    except (SafetensorError, ValueError, LookupError, TypeError, ArithmeticError) as error:
        # A dtype that numpy has not, or a shape beyond its bounds.
        raise InvalidRequestError(f"the body is no safetensors file: {error}") from error
    return params, arrays
