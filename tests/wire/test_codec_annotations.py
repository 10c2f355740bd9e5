"""Annotations of compiled records are read from their source."""

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from plexrl.wire.codec import restore_annotations

SOURCE = """
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    seconds: float

@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    steps: tuple[Step, ...] = ()
    until: float | None = None
"""
PLAIN = {"steps": [{"seconds": 2.5}], "until": 4.0}


@pytest.fixture
def module(tmp_path: Path) -> Iterator[ModuleType]:
    """Its annotations are as mypyc leaves them, and its file is called as a compiled one."""
    path = tmp_path / "planned.py"
    path.write_text(SOURCE)
    spec = spec_from_file_location("plans.planned", path)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules["plans.planned"] = made
    spec.loader.exec_module(made)
    made.__file__ = str(tmp_path / "planned.cpython-311-x86_64-linux-gnu.so")
    made.Plan.__annotations__ = {"steps": tuple, "until": type}
    yield made
    del sys.modules["plans.planned"]


def test_records_within_records_are_read_as_their_source_says(module: ModuleType) -> None:
    restore_annotations(module.Plan)
    read = msgspec.convert(PLAIN, module.Plan)
    assert read == module.Plan(steps=(module.Step(seconds=2.5),), until=4.0)


def test_a_compiled_module_without_its_source_is_an_error(module: ModuleType) -> None:
    assert module.__file__ is not None
    Path(module.__file__).with_name("planned.py").unlink()
    with pytest.raises(ImportError, match=r"the source file of .* is missing"):
        restore_annotations(module.Plan)


def test_what_is_not_compiled_stays_as_it_is(module: ModuleType, tmp_path: Path) -> None:
    module.__file__ = str(tmp_path / "planned.py")
    restore_annotations(module.Step)
    assert module.Step.__annotations__ == {"seconds": float}
