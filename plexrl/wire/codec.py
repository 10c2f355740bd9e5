"""Encodes messages as JSON, tagged with the class name.

The journal, replay and the links between processes use the same encoding. So any JSON tool can read
a recorded history, and a core can replay it.
"""

import ast
import math
import sys
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from plexrl.errors import InvalidRequestError

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class Codec(Generic[MessageT]):
    """Encodes and decodes a fixed set of frozen structs.

    The tag is the class name under the key `"type"`; no message may have a field of that name.
    """

    def __init__(self, *kinds: type[MessageT]) -> None:
        for kind in kinds:
            assert "type" not in kind.__struct_fields__, f"{kind.__name__} has a field 'type'"
        self._kinds: dict[str, type[MessageT]] = {kind.__name__: kind for kind in kinds}
        self._openings = {kind: f'{{"type":"{kind.__name__}"'.encode() for kind in kinds}
        self._floats = {kind: _float_fields(kind) for kind in kinds}

    def to_plain(self, message: MessageT) -> dict[str, Any]:
        """`message` as JSON values, with its tag."""
        plain: dict[str, Any] = msgspec.to_builtins(message)
        return {"type": type(message).__name__, **plain}

    def from_plain(self, plain: dict[str, Any]) -> MessageT:
        """The message that `to_plain` encoded.

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
        # The tag is inserted as the first key, so the message is encoded in one pass.
        return opening + (b"}" if body == b"{}" else b"," + body[1:])

    def check(self, message: MessageT) -> None:
        """Refuse numbers that are not finite: JSON would decode them as null.

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
    """Fields that may hold a float. Messages have no floats inside containers."""
    hints = get_type_hints(kind)
    return tuple(name for name, hint in hints.items() if hint is float or float in get_args(hint))


@cache
def restore_annotations(kind: type) -> None:
    """Restore the annotations of a compiled class, and of all dataclasses and named tuples in its
    fields, once in a process.

    mypyc keeps only the class of an annotation: `tuple[Segment, ...]` becomes `tuple`, `float |
    None` becomes `type`. msgspec needs the full annotations, so this function reads them from the
    source file beside the compiled module.

    Raises:
        ImportError: the source file of a compiled module is missing.
    """
    _restore(kind, set())


def _restore(kind: type, done: set[type]) -> None:
    done.add(kind)
    found = _source_annotations(sys.modules[kind.__module__]).get(kind.__qualname__)
    if found is not None:
        kind.__annotations__ = found
    for hint in get_type_hints(kind).values():
        for named in _records(hint):
            if named not in done:
                _restore(named, done)


def _records(hint: Any) -> list[type]:
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return [hint]
    return [named for part in get_args(hint) for named in _records(part)]


@cache
def _source_annotations(module: ModuleType) -> dict[str, dict[str, str]]:
    """Annotations in a module's source, by class; empty for a module that is not compiled."""
    path = module.__file__ or ""
    if path.endswith(".py"):
        return {}
    source = Path(path).with_name(f"{module.__name__.rpartition('.')[2]}.py")
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ImportError(
            f"the source file of {path} is missing ({error}): install PlexRL again"
        ) from error
    return {
        kind.name: {
            line.target.id: ast.unparse(line.annotation)
            for line in kind.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
    }
