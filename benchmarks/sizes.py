"""Sizes of benchmarks: the usual size, or with `--quick` the smallest that runs."""

import sys
from typing import TypeVar

Size = TypeVar("Size")

QUICK = "--quick" in sys.argv
"""Whether the benchmark is only a smoke test, with meaningless figures."""


def sized(usual: Size, *, quick: Size) -> Size:
    """`usual`, or `quick` if the command line says `--quick`."""
    return quick if QUICK else usual
