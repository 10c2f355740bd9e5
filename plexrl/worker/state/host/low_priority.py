"""A thread of low CPU priority, for work beside another deployment that has the GPUs.

The scheduler of Linux keeps a priority (nice value) for each thread, and a thread inherits that of
the thread that starts it. So the threads that torch starts for its operators, a team for each
thread that calls it, have the low priority too. Those of other callers keep theirs: without
privileges a priority that was lowered cannot be raised again.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

T = TypeVar("T")

NICE: Final = 10
"""Such a thread gets a tenth of a core that another one of the usual priority wants whole."""


class LowPriorityThread:
    """One thread, which is started when it is first used."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "low-priority", initializer=_lower_priority)

    def run(self, work: Callable[[], T]) -> T:
        """Result of `work`, which the thread carries out meanwhile; raises what it raises."""
        return self._threads.submit(work).result()


def _lower_priority() -> None:
    here = threading.get_native_id()
    nice = os.getpriority(os.PRIO_PROCESS, here)
    os.setpriority(os.PRIO_PROCESS, here, min(19, nice + NICE))
