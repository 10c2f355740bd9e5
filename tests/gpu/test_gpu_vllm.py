"""vLLM on a real GPU, in memory that the StateManager lends; skipped where it is not installed."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from plexrl.statemanager.config import StateManagerConfig
from plexrl.wire.operations import OperationKind
from plexrl.worker.state.device import GpuDevice
from tests.gpu import tensor_ranks
from tests.statemanager.device.test_emulated_workers import Rank
from tests.statemanager.device_rigs import real_driver
from tests.worker.rollout.vllm.backends import NEEDS_VLLM, deployment

pytestmark = [pytest.mark.gpu, NEEDS_VLLM, pytest.mark.filterwarnings("ignore")]


def test_vllm_draws_the_same_after_an_offload(node: StateManagerConfig, device: GpuDevice) -> None:
    """Each load compares vLLM with `transformers`."""
    rank = Rank(deployment(dtype="bfloat16"), node, device)
    rank.move(OperationKind.LOAD, 0)
    drawn = [rank.generate()]
    assert rank.backend.engine.cache_bytes_held > 0  # type: ignore[attr-defined]
    moved = rank.move(OperationKind.OFFLOAD, 0)
    assert moved["memory_after"]["arena_bytes"] == 0
    assert rank.backend.engine.cache_bytes_held == 0  # type: ignore[attr-defined]
    rank.move(OperationKind.LOAD, 0)
    drawn.append(rank.generate())
    assert np.array_equal(drawn[0], drawn[1])
    rank.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank")
def test_two_ranks_draw_what_one_draws(
    node: StateManagerConfig, device: GpuDevice, tmp_path: Path
) -> None:
    spec = deployment()
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        tensor_ranks.run,
        args=(real_driver().uuids()[:2], node, str(tmp_path), spec.to_json()),
        nprocs=2,
        start_method="spawn",
    )
    rank = Rank(spec, node, device)
    rank.move(OperationKind.LOAD, 0)
    wanted = rank.generate()
    rank.close()
    for found in np.load(tmp_path / "drawn.npy"):
        assert np.allclose(found, wanted, atol=1e-3)
