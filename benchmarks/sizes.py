"""How much a benchmark measures: what its figures need, or with `--quick` as little as runs."""

import sys
from typing import TypeVar

Size = TypeVar("Size")

QUICK = "--quick" in sys.argv
"""Whether the benchmark only has to run: its figures then mean nothing."""


def sized(usual: Size, *, quick: Size) -> Size:
    """`usual`, or `quick` if the command line says `--quick`."""
    return quick if QUICK else usual
