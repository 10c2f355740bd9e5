"""Marks of tests that have DeepSpeed compile its CPUAdam, which takes minutes the first time."""

import shutil
from collections.abc import Callable
from typing import ParamSpec

import pytest

from plexrl.worker.training.deepspeed.cpu_adam import TOOLS

P = ParamSpec("P")

COMPILING = (
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not all(any(map(shutil.which, commands)) for commands in TOOLS.values()),
        reason=f"DeepSpeed's CPUAdam needs {' and '.join(TOOLS)} on the path",
    ),
)


def compiles(test: Callable[P, None]) -> Callable[P, None]:
    """A test with these marks."""
    for mark in COMPILING:
        test = mark(test)
    return test
