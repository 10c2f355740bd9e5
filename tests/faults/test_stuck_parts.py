"""Parts and workers that are stopped for a while, or for ever, with the real limits: no job loses a
step, and what is stopped for longer than the limit is replaced."""

import random
import time
from contextlib import suppress

import psutil
import pytest

from plexrl.process.children.pulse import STUCK_S
from tests.cluster.tools import has_ended
from tests.faults.live import LiveCluster, wait_until
from tests.faults.test_faults import PARTS, assert_same, begin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SHORT_S = 20.0
LONG_S = 90.0
FOR_EVER = float("inf")


def stop(process: psutil.Process, seconds: float) -> None:
    """SIGSTOP, and SIGCONT after so long if it is still there."""
    process.suspend()
    if seconds == FOR_EVER:
        return
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):
        process.resume()


@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S, FOR_EVER])
@pytest.mark.parametrize("module", PARTS)
def test_stopped_part(
    cluster: LiveCluster,
    chance: random.Random,
    undisturbed: dict[str, str],
    module: str,
    seconds: float,
) -> None:
    begin(cluster, chance)
    process = cluster.part(module)
    stop(process, seconds)
    if seconds < STUCK_S:
        assert not has_ended(process), "it was replaced"
    else:
        wait_until(lambda: has_ended(process), "it was not replaced", 3 * STUCK_S)
    assert_same(cluster.weights(), undisturbed)


@pytest.mark.parametrize("seconds", [SHORT_S, LONG_S, FOR_EVER])
def test_stopped_worker_whose_other_rank_waits_in_a_collective(
    cluster: LiveCluster, chance: random.Random, undisturbed: dict[str, str], seconds: float
) -> None:
    begin(cluster, chance)
    process = cluster.worker(chance.randrange(16))
    stop(process, seconds)
    if seconds > STUCK_S:
        wait_until(lambda: has_ended(process), "it was not replaced", 3 * STUCK_S)
    assert_same(cluster.weights(), undisturbed)
