"""Two processes that take turns on a real GPU. Skipped, visibly, where there is none."""

import shutil
import tempfile
from pathlib import Path

import pytest

from benchmarks.gpu.switch import (
    GIB,
    SPARE_BYTES,
    start_daemon,
    state_bytes_max,
    take_turns,
)
from tests.statemanager.device_rigs import real_driver

pytestmark = pytest.mark.gpu

SWITCHES = 100
HOST_BYTES_MAX = 16 * GIB


def test_a_hundred_switches_leave_no_memory_behind() -> None:
    """States of 8 GiB each, where host memory allows."""
    driver = real_driver()
    free_before, total = driver.memory_info()
    nbytes = min(total // 4, HOST_BYTES_MAX // 2, state_bytes_max()) >> 21 << 21
    directory = Path(tempfile.mkdtemp(prefix="plexrl-gpu-"))
    daemon, node = start_daemon(directory, 2 * nbytes + SPARE_BYTES)
    try:
        turns = take_turns(node, "turn", nbytes, SWITCHES, driver)
        free = [turn[3] for turn in turns]
        # One state is on the device after every switch; contexts take some too, but always as much.
        assert max(free) - min(free) <= 64 << 20
        assert free[-1] >= free[0] - (4 << 20)
    finally:
        with daemon:
            daemon.terminate()
        shutil.rmtree(directory)
        shutil.rmtree(node.host_dir, ignore_errors=True)
    assert daemon.returncode == 0
    assert free_before - driver.memory_info()[0] <= 64 << 20
