"""vLLM on a real GPU, in memory that the StateManager lends; skipped where it is not installed."""

import numpy as np
import pytest

from plexrl.statemanager.daemon.config import StateManagerConfig
from plexrl.wire.operations import OperationKind
from plexrl.worker.state.device import GpuDevice
from tests.statemanager.device.test_emulated_workers import Rank
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
