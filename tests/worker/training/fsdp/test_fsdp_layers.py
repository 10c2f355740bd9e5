"""A model too large to be gathered at once is gathered layer by layer: the same bits."""

from pathlib import Path

import pytest
import torch.multiprocessing as mp

from plexrl.model.parallelism import Parallelism
from tests.worker.training.cases import LLAMA, QWEN2, Case
from tests.worker.training.fsdp import fsdp_layer_ranks as ranks


@pytest.mark.parametrize(
    "case",
    [
        Case(backend="fsdp", layout=Parallelism(dp=2), model=QWEN2),
        pytest.param(
            Case(
                backend="fsdp",
                layout=Parallelism(dp=2, tp=2),
                model=LLAMA,
                options=(("compute_dtype", "bfloat16"),),
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda case: case.name,
)
def test_layer_by_layer_trains_to_the_same_bits(case: Case, tmp_path: Path) -> None:
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        ranks.train_both_ways,
        args=(case, str(tmp_path)),
        nprocs=case.layout.world_size,
        start_method="forkserver",
    )
    assert (tmp_path / "store").exists()
