"""Messages to bytes and back: JSON, tagged with the class name.

Journal, replay and the links between processes use the same encoding, so a recorded history is
readable with any JSON tool and can be fed to a core again.
"""

import math
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class Codec(Generic[MessageT]):
    """Encodes and decodes one closed set of frozen structs.

    The tag is the class name under `"type"`; no message may have a field of that name. Unknown
    tags and fields of a wrong type raise `msgspec.ValidationError`.
    """

    def __init__(self, *kinds: type[MessageT]) -> None:
        for kind in kinds:
            assert "type" not in kind.__struct_fields__, f"{kind.__name__} has a field 'type'"
        self._kinds: dict[str, type[MessageT]] = {kind.__name__: kind for kind in kinds}
        self._openings = {kind: f'{{"type":"{kind.__name__}"'.encode() for kind in kinds}
        self._floats = {kind: _float_fields(kind) for kind in kinds}

    def to_plain(self, message: MessageT) -> dict[str, Any]:
        """`message` as JSON values, tagged."""
        plain: dict[str, Any] = msgspec.to_builtins(message)
        return {"type": type(message).__name__, **plain}

    def from_plain(self, plain: dict[str, Any]) -> MessageT:
        """The message that `to_plain` made `plain` from.

        Raises:
            msgspec.ValidationError: an unknown tag, a missing field or a value of a wrong type.
        """
        tag = plain.get("type")
        kind = self._kinds.get(str(tag))
        if kind is None:
            raise msgspec.ValidationError(f"unknown message type {tag!r}")
        fields = {name: value for name, value in plain.items() if name != "type"}
        return msgspec.convert(fields, kind)

    def encode(self, message: MessageT) -> bytes:
        """`message` as one line of JSON. Raises as `check`."""
        self.check(message)
        opening = self._openings[type(message)]
        body = msgspec.json.encode(message)
        # One pass over the message; the tag is spliced in as its first key.
        return opening + (b"}" if body == b"{}" else b"," + body[1:])

    def check(self, message: MessageT) -> None:
        """Refuse what JSON cannot carry: a number that is not finite would come back as null.

        Raises:
            InvalidRequestError: a field is infinite or not a number.
        """
        for name in self._floats[type(message)]:
            value = getattr(message, name)
            if value is not None and not math.isfinite(value):
                raise InvalidRequestError(
                    f"{name} of {type(message).__name__} is {value}: give a finite number"
                )

    def decode(self, line: bytes | str) -> MessageT:
        """The message in `line`. Raises as `from_plain`, and on malformed JSON."""
        return self.from_plain(msgspec.json.decode(line, type=dict[str, Any]))


def _float_fields(kind: type) -> tuple[str, ...]:
    """Fields that may hold a float. Messages keep their numbers at the top, not in containers."""
    hints = get_type_hints(kind)
    return tuple(name for name, hint in hints.items() if hint is float or float in get_args(hint))
