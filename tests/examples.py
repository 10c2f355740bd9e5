"""How many random cases the longest tests try."""

import os


def examples(quick: int) -> int:
    """`quick` cases in `make test`, and several times as many in `make test-all`."""
    return quick * int(os.environ.get("PLEXRL_EXAMPLES", "1"))
