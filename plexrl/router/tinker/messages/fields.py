"""The number of fields of a protobuf message, from its bytes. Pure.

A parsed field takes far more memory than its bytes: 64 MiB of empty rows are gigabytes. So the
fields are counted before a message is parsed.
"""

from typing import Any

from plexrl.errors import InvalidRequestError

FIELDS_MAX = 1 << 18
"""Fields of one message, those of its parts included. A batch of the SDK has at most 1024 rows,
with some twenty fields each."""
NUMBERS_MAX = 64
"""Bytes of a packed list of numbers, as a shape is."""
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Types of fields on the wire."""


def check_fields(body: bytes, descriptor: Any) -> None:
    """Check the size that a message of this descriptor will have in memory.

    Raises:
        InvalidRequestError: it has too many fields, or is no message.
    """
    count = 0
    parts = [(memoryview(body), descriptor)]
    while parts:
        part, kind = parts.pop()
        at = 0
        while at < len(part):
            count += 1
            if count > FIELDS_MAX:
                raise InvalidRequestError(
                    f"the body has over {FIELDS_MAX} fields: send fewer rows at a time"
                )
            tag, at = _varint(part, at)
            wire = tag & 7
            if wire == VARINT:
                _, at = _varint(part, at)
            elif wire in (FIXED64, FIXED32):
                at += 8 if wire == FIXED64 else 4
            elif wire == BYTES:
                size, at = _varint(part, at)
                if size > len(part) - at:
                    raise _broken()
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((part[at : at + size], field.message_type))
                elif field is not None and field.cpp_type != field.CPPTYPE_STRING:
                    _check_numbers(field.name, size)
                at += size
            else:
                raise _broken()


def _check_numbers(name: str, size: int) -> None:
    if size > NUMBERS_MAX:
        raise InvalidRequestError(f"{name} has {size} bytes: it has at most {NUMBERS_MAX}")


def _varint(part: memoryview, at: int) -> tuple[int, int]:
    """A number and the place after it."""
    value = shift = 0
    while at < len(part) and shift < 70:
        byte = part[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _broken()


def _broken() -> InvalidRequestError:
    return InvalidRequestError("the body is no ForwardBackwardRequest: a field has no end")
