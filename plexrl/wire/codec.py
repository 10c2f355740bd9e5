"""Encodes messages as JSON, tagged with the class name.

The journal, replay and the links between processes use the same encoding. So any JSON tool can read
a recorded history, and a core can replay it.
"""

import ast
import functools
import math
import operator
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from pathlib import Path
from types import ModuleType
from typing import (
    Any,
    ClassVar,
    Generic,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from plexrl.errors import InvalidRequestError

MessageT = TypeVar("MessageT", bound=msgspec.Struct)


JsonObject = dict[str, Any]
"""A JSON object before its fields are typed: what a decoder gives, and an upgrade changes."""


class Codec(Generic[MessageT]):
    """Encodes and decodes a fixed set of frozen structs, tagged by their class name under the key
    `"type"`."""

    def __init__(
        self,
        *kinds: type[MessageT],
        upgrade: Callable[[JsonObject], None] = lambda _: None,
        earlier: re.Pattern[bytes] | None = None,
    ) -> None:
        """`upgrade` changes a message of an earlier version to what the present types say; it sees
        the lines that match `earlier`."""
        self._upgrade, self._earlier = upgrade, earlier
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(functools.reduce(operator.or_, kinds))

    def encode(self, message: MessageT) -> bytes:
        """`message` as one line of JSON. Raises as `check`."""
        self.check(message)
        return self._encoder.encode(message)

    def check(self, message: MessageT) -> None:
        """Refuse numbers that are not finite: JSON would decode them as null.

        Raises:
            InvalidRequestError: a field is infinite or not a number.
        """
        found = _not_finite(message)
        if found is not None:
            raise InvalidRequestError(
                f"{found[0]} of {type(message).__name__} is {found[1]}: give a finite number"
            )

    def decode(self, line: bytes | str) -> MessageT:
        """The message in `line`.

        Raises:
            msgspec.ValidationError: an unknown tag, a missing field or a value of a wrong type.
            msgspec.DecodeError: malformed JSON.
        """
        body = line.encode() if isinstance(line, str) else line
        if self._earlier is not None and self._earlier.search(body):
            plain = msgspec.json.decode(body, type=JsonObject)
            self._upgrade(plain)
            return msgspec.convert(plain, self._kinds[str(plain["type"])])
        decoded: MessageT = self._decoder.decode(body)
        return decoded


def _not_finite(record: object) -> tuple[str, float] | None:
    """Name and value of a number of a message, or of a record in its fields, that is not finite."""
    floats, records = _number_fields(cast("Hashable", type(record)))
    for name in floats:
        value = getattr(record, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not math.isfinite(number):
                return name, number
    for name in records:
        found = _not_finite(getattr(record, name))
        if found is not None:
            return found
    return None


@functools.cache
def _number_fields(kind: Hashable) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Fields that may hold floats, and those that may hold a record; sequences of records are
    not looked into."""
    if not _is_record(kind):
        return (), ()
    floats, records = [], []
    for name, hint in get_type_hints(kind).items():
        parts = (hint, *get_args(hint))
        if float in parts or tuple[float, float] in parts:
            floats.append(name)
        elif get_origin(hint) is not ClassVar and any(map(_is_record, parts)):
            records.append(name)
    return tuple(floats), tuple(records)


def _is_record(hint: Any) -> bool:
    return isinstance(hint, type) and (is_dataclass(hint) or issubclass(hint, msgspec.Struct))


@functools.cache
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


@functools.cache
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
