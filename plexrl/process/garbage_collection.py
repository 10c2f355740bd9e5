"""How often Python looks for cycles of references, where much lives long and next to nothing makes
cycles: looked for at the usual pace, they would take a quarter of the time.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (200_000, 50, 1000)
"""Objects made before the young, middle and old generations are walked."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect rarely inside, and as before afterwards: for a computation that ends."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def spare_living() -> None:
    """Collect rarely from now on, and never look at what there is by now: for a service whose state
    has just been made. A full walk of a large one would hold every answer up for 0.2 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
