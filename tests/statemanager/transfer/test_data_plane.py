"""No thread uses memory after the call for which it does."""

import threading
from collections.abc import Callable

import pytest

from plexrl.errors import CorruptStateError
from plexrl.statemanager.bytes.data_plane import PIECE_BYTES, DataPlane
from plexrl.statemanager.device.memory import ByteRun


def spread(plane: DataPlane, task: Callable[[int], None]) -> None:
    plane.spread(task, [0, 1])


def pipeline(plane: DataPlane, task: Callable[[int], None]) -> None:
    plane.pipeline([lambda: task(0), lambda: task(1)])


def copy(plane: DataPlane, task: Callable[[int], None]) -> None:
    # The calling thread and another one each take a share.
    numbers = iter(range(2))
    plane.copy([ByteRun(0, 0, 2 * PIECE_BYTES)], lambda _: task(next(numbers)))


@pytest.mark.parametrize("call", [spread, pipeline, copy])
def test_after_a_failure_no_task_runs_any_more(
    call: Callable[[DataPlane, Callable[[int], None]], None],
) -> None:
    both, late = threading.Event(), threading.Event()
    ended: list[int] = []

    def task(number: int) -> None:
        if number == 0:
            assert both.wait(60)
            threading.Timer(0.2, late.set).start()
            raise CorruptStateError("a block is damaged")
        both.set()
        assert late.wait(60)
        ended.append(number)

    plane = DataPlane(data_threads=2, queue_depth=2)
    try:
        with pytest.raises(CorruptStateError):
            call(plane, task)
        assert ended == [1]
    finally:
        plane.close()
