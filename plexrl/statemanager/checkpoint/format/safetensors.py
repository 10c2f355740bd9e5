"""Header of a safetensors file, encoded before any tensor is available. Pure.

    u64 bytes of JSON | JSON, padded with spaces | tensors, end to end

The safetensors library writes whole tensors, so it would need all of a file in memory.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from plexrl.errors import CorruptStateError
from plexrl.statemanager.layout.keys import DTYPE_BYTES

HEADER_BYTES_MAX = 100_000_000
"""The library's limit."""
ALIGNMENT = 8

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Offset in the file, in bytes."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def encode_head(
    tensors: Sequence[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """The header of a file with these `(name, dtype, shape)` tensors, in that order."""
    head: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPE_BYTES[dtype]
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = msgspec.json.encode(head)
    text = text.ljust(-(-len(text) // ALIGNMENT) * ALIGNMENT)
    return _LENGTH.pack(len(text)) + text


def head_bytes(start: bytes) -> int:
    """Size of the header of a file that begins with `start` (8 bytes suffice).

    Raises:
        CorruptStateError: it is not the start of a safetensors file.
    """
    if len(start) < _LENGTH.size:
        raise CorruptStateError(f"it has {len(start)} bytes, too few for a safetensors file")
    length: int = _LENGTH.unpack_from(start)[0]
    if length > HEADER_BYTES_MAX:
        raise CorruptStateError(f"its header claims {length} bytes: it is not a safetensors file")
    return _LENGTH.size + length


def decode_head(head: bytes) -> tuple[FileTensor, ...]:
    """The tensors of a file with this header.

    Raises:
        CorruptStateError: the header is malformed.
    """
    if len(head) < head_bytes(head):
        raise CorruptStateError("its header is truncated")
    try:
        plain = msgspec.json.decode(head[_LENGTH.size :], type=dict[str, dict[str, object]])
        plain.pop("__metadata__", None)
        found = []
        for name, entry in plain.items():
            record = msgspec.convert(entry, _Entry)
            tensor = FileTensor(
                name=name,
                dtype=record.dtype,
                shape=record.shape,
                start=len(head) + record.data_offsets[0],
            )
            if tensor.nbytes != record.data_offsets[1] - record.data_offsets[0]:
                raise CorruptStateError(f"the header's size of {name!r} does not match its shape")
            found.append(tensor)
        return tuple(found)
    except KeyError as error:
        raise CorruptStateError(f"the header names an unknown dtype {error}") from error
    except msgspec.MsgspecError as error:
        raise CorruptStateError(f"the header is damaged ({error})") from error


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
