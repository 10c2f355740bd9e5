"""One engine on two gloo processes against the same engine in one."""

import multiprocessing
import os
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import ModelSpec
from plexrl.worker.models import build_model, named_parameters
from plexrl.worker.models.shards import box_of
from plexrl.worker.rollout.engine import Engine
from plexrl.worker.rollout.engine.tensor_parallel import is_lost_rank_error
from tests.worker.rollout.engine import engine_ranks as ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks left what they found."""
    made = tmp_path_factory.mktemp("ranks")
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        ranks.run,
        args=(2, str(made / "store"), str(made)),
        nprocs=2,
        start_method="forkserver",
    )
    return made


def test_two_ranks_draw_what_one_draws(folder: Path) -> None:
    found = torch.load(folder / "found.pt", weights_only=False)
    wanted = ranks.alone()
    for name, one in wanted.items():
        tokens, logprobs, finish, segments = found[name]
        assert [row.tolist() for row in tokens] == [row.tolist() for row in one.tokens]
        for row, own in zip(logprobs, one.logprobs, strict=True):
            assert np.allclose(row, own, atol=1e-4)
        assert finish == one.finish
        assert segments == one.mixed_segments()
    assert len(wanted["one"].mixed_segments()) == 12, "the update came in the middle"


def test_both_ranks_have_the_same_counts_and_half_of_the_weights(folder: Path) -> None:
    of: list[Any] = [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    # Each rank has a clock of its own.
    stats = [replace(one["stats"], prefill_s=0.0) for one in of]
    assert stats[0] == stats[1]
    whole = sum(4 * parameter.numel() for _, parameter in named_parameters(build_model(ranks.OLD)))
    for one in of:
        assert one["gathered"] == ["0", "1"]
        assert one["arena_bytes"] < 0.52 * whole, "norms are all that is on both"


def test_ranks_replay_graphs_only_while_all_of_them_can_capture(tmp_path: Path) -> None:
    """One with a graph would pad what is summed, and one without would not."""
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        ranks.run_captured,
        args=(2, str(tmp_path / "store"), str(tmp_path)),
        nprocs=2,
        start_method="forkserver",
    )
    model = build_model(ranks.OLD)
    engine = Engine(model, slots=8, sequence_tokens_max=ranks.SEQUENCE_TOKENS)
    wanted = ranks.generation("one", max_tokens=40)
    engine.submit(wanted)
    while engine.has_work:
        engine.step()
    found = torch.load(tmp_path / "tokens.pt", weights_only=False)
    assert [row.tolist() for row in found] == [row.tolist() for row in wanted.tokens]
    (captured, replayed), (others, replayed_there) = [
        torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)
    ]
    assert (captured, others) == (3, 2)
    assert replayed == replayed_there > 2


@pytest.mark.parametrize("model", [ranks.WINDOWED, ranks.SINKS], ids=lambda m: m.architecture)
def test_two_ranks_of_a_model_with_windows_draw_what_one_draws_with_and_without_graphs(
    tmp_path: Path, model: ModelSpec
) -> None:
    mp.start_processes(  # type: ignore[attr-defined, no-untyped-call]
        ranks.run_windowed,
        args=(2, str(tmp_path / "store"), str(tmp_path), model),
        nprocs=2,
        start_method="forkserver",
    )
    engine = Engine(build_model(model), slots=8, sequence_tokens_max=ranks.SEQUENCE_TOKENS)
    wanted = ranks.generation("one", max_tokens=20)
    engine.submit(wanted)
    while engine.has_work:
        engine.step()
    found = torch.load(tmp_path / "windowed.pt")
    assert found == [row.tolist() for row in wanted.tokens]


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 9))
def test_boxes_make_up_the_tensor_once(count: int, extent: int, width: int) -> None:
    for name, shape in {
        "model.embed_tokens.weight": (extent, width),
        "model.layers.0.self_attn.q_proj.weight": (count * extent, width),
        "model.layers.0.self_attn.k_proj.bias": (count * extent,),
        "model.layers.0.mlp.down_proj.weight": (width, count * extent),
    }.items():
        covered = np.zeros(shape, dtype=int)
        for rank in range(count):
            box = box_of(name, shape, rank, count)
            assert covered[box.index].shape == box.shape
            covered[box.index] += 1
        assert (covered == 1).all()
    norm = "model.layers.0.input_layernorm.weight"
    assert box_of(norm, (width,), count - 1, count).shape == (width,)


def test_what_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"k_proj.weight has 32 rows, which 3 tensor-"):
        box_of("model.layers.0.self_attn.k_proj.weight", (32, 64), 1, 3)


def lose_a_rank(rank: int, meeting: str, told: Connection) -> None:
    """A rank of two; the second one ends without a word."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os._exit(9)
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        own = RuntimeError("another shape was expected")
        told.send((is_lost_rank_error(error), is_lost_rank_error(own)))
    os._exit(0)


def test_a_collective_that_lost_a_rank_is_distinguished_from_an_own_fault(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    both = [
        context.Process(target=lose_a_rank, args=(rank, str(tmp_path / "meet"), theirs))
        for rank in range(2)
    ]
    for process in both:
        process.start()
    theirs.close()
    assert ours.recv() == (True, False)
    for process in both:
        process.join()
