"""How many random cases the tests try."""

import math
import os


def examples(usual: int) -> int:
    """`usual` cases where a test is run by itself, half as many in `make test`, and eight times as
    many in `make test-all`."""
    return math.ceil(usual * float(os.environ.get("PLEXRL_EXAMPLES", "1")))
