"""The annotations of compiled records, which msgspec reads them by.

Of an annotation mypyc keeps only the class: `tuple[Segment, ...]` becomes `tuple`, `float | None`
becomes `type`. The source, which lies beside what was compiled of it, has it whole.
"""

import ast
import sys
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints


def whole_annotations(kind: type) -> None:
    """Give `kind`, and every dataclass that its fields name, the annotations of its source.

    Raises:
        ImportError: a compiled module without its source.
    """
    _complete(kind, set())


def _complete(kind: type, done: set[type]) -> None:
    done.add(kind)
    found = _of_source(sys.modules[kind.__module__]).get(kind.__qualname__)
    if found is not None:
        kind.__annotations__ = found
    for hint in get_type_hints(kind).values():
        for named in _dataclasses(hint):
            if named not in done:
                _complete(named, done)


def _dataclasses(hint: Any) -> list[type]:
    if isinstance(hint, type) and is_dataclass(hint):
        return [hint]
    return [named for part in get_args(hint) for named in _dataclasses(part)]


@cache
def _of_source(module: ModuleType) -> dict[str, dict[str, str]]:
    """By the name of its class; empty for a module that is not compiled."""
    path = module.__file__ or ""
    if path.endswith(".py"):
        return {}
    source = Path(path).with_name(f"{module.__name__.rpartition('.')[2]}.py")
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ImportError(f"{path} needs its source beside it: install PlexRL anew") from error
    return {
        kind.name: {
            line.target.id: ast.unparse(line.annotation)
            for line in kind.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for kind in tree.body
        if isinstance(kind, ast.ClassDef)
    }
