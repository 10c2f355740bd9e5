"""What runs beside another deployment's workers leaves them the CPU."""

import os
import threading

import pytest

from plexrl.worker.state.host.low_priority import NICE, LowPriorityThread


def priority() -> int:
    """The nice value of the calling thread."""
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_work_and_the_threads_that_it_starts_have_a_low_priority() -> None:
    found: list[int] = []

    def work() -> int:
        helper = threading.Thread(target=lambda: found.append(priority()))
        helper.start()
        helper.join()
        return priority()

    own = priority()
    assert LowPriorityThread().run(work) == min(19, own + NICE)
    assert found == [min(19, own + NICE)]
    assert priority() == own


def test_what_fails_there_raises_here() -> None:
    with pytest.raises(ZeroDivisionError):
        LowPriorityThread().run(lambda: 1 // 0)
