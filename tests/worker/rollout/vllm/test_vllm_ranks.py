"""vLLM divided over tensor-parallel ranks, each a process with an engine of its own."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from plexrl.model.parallelism import Parallelism
from tests.worker.rollout.vllm import vllm_ranks
from tests.worker.rollout.vllm.backends import (
    MARKS,
    deployment,
    generate,
    largest_error,
    rows_of,
    trained,
)
from tests.worker.rollout.vllm.conftest import Make

pytestmark = MARKS


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_ranks_draw_what_one_draws_and_take_updates_in_place(
    make: Make, tmp_path: Path, family: str
) -> None:
    spec = deployment(family, workers=2, parallelism=Parallelism(tp=2))
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        vllm_ranks.run,
        args=(2, spec.to_json(), family, str(tmp_path)),
        nprocs=2,
        start_method="spawn",
    )
    leader, follower = (
        torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2)
    )
    first, *updated, after_load = leader["rows"]
    wanted = generate(make(family), 0, n=3)
    for one, other in zip(rows_of(first, "tokens"), rows_of(wanted, "tokens"), strict=True):
        assert np.array_equal(one, other)
    for seed, result in zip(vllm_ranks.SEEDS, updated, strict=True):
        assert largest_error(result, trained(family, seed)) < 1e-4
    for name in ("tokens", "logprobs"):
        assert np.array_equal(after_load.arrays[name], updated[-1].arrays[name])
    whole = make(family)
    for found in (leader, follower):
        assert found["held"] == 0
        assert found["copied"] == 0
        assert found["stats"].tp == 2
        assert found["stats"].block_bytes == whole.stats().block_bytes // 2
        assert "not the tensor that updates write to" in found["refusal"]
    total = sum(piece.nbytes for piece in whole.slices())
    assert total < leader["arena_bytes"] + follower["arena_bytes"] < 1.1 * total, (
        "norms are on both"
    )
