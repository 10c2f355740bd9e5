"""A GPU and a StateManager for the tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.switch import GIB, running_daemon
from plexrl.statemanager.config import StateManagerConfig
from plexrl.worker.state.device import GpuDevice
from tests.statemanager.device_rigs import real_driver


@pytest.fixture
def device(tmp_path: Path) -> Iterator[GpuDevice]:
    driver = real_driver()
    torch.cuda.set_device(0)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group(GpuDevice.collectives, store=store, rank=0, world_size=1)
    yield GpuDevice(driver.uuids()[0], driver)
    if "megatron.core.parallel_state" in sys.modules:
        # Its groups are those of the process group that ends here.
        sys.modules["megatron.core.parallel_state"].destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture
def node(device: GpuDevice) -> Iterator[StateManagerConfig]:
    assert device.free_bytes(), "tests without a GPU are skipped before a daemon starts"
    with running_daemon(GIB) as config:
        yield config
