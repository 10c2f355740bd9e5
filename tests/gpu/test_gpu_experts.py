"""Grouped experts on a real GPU, by the kernel for bfloat16 and by what torch does in float32."""

import pytest
import torch

from plexrl.worker.state.device import GpuDevice
from tests.worker.training.megatron.test_experts import check_against_one_by_one
from tests.worker.training.megatron.tolerances import TOLERANCES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("counts", [[5, 3, 9], [0, 5, 0, 0, 1], [2]], ids=str)
def test_grouped_experts_compute_what_each_computes_alone(
    device: GpuDevice, counts: list[int], dtype: torch.dtype
) -> None:
    check_against_one_by_one(counts, dtype, device.torch_device)
