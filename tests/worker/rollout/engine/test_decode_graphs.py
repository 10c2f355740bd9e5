"""Decode steps padded to few shapes, and replayed.

The captures run the work again instead of replaying a graph; `tests/gpu/test_gpu_engines.py` has
graphs.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from plexrl.model.memory import kv_cache
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Engine, Generation
from plexrl.worker.rollout.engine.forward import decode_graphs
from plexrl.worker.rollout.engine.forward.decode_shapes import (
    GroupShape,
    PaddedStep,
    padded_blocks,
    padded_rows,
    shape_of,
)
from plexrl.worker.rollout.engine.step_batch import StepBatch, Work, build_batch, order_work
from tests.statemanager.emulated_gpu import EmulatedGraphs

MODEL = build_model(tiny_qwen2("0123456789abcdefghi", seed=2))
BLOCK_TOKENS = 4
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19]]


def draw(capture: Any, prompts: list[list[int]], **sampling: Any) -> Generation:
    made = Generation(
        name="g",
        prompts=prompts,
        samples_per_prompt=3,
        sampling=SamplingParams(ignore_eos=True, seed=1, max_tokens=40, **sampling),
        emit=None,
        weights_seq=0,
    )
    engine = Engine(
        MODEL,
        slots=16,
        sequence_tokens_max=64,
        kv_bytes_max=200 * 2 * 2 * 2 * 16 * 4 * 4,
        block_tokens=BLOCK_TOKENS,
        capture=capture,
    )
    engine.submit(made)
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        if steps == 20:
            engine.drop_cache()
    return made


@given(count=st.integers(1, 5000))
def test_padding_is_bounded_and_padded_sizes_need_none(count: int) -> None:
    assert count <= padded_rows(count) < 2 * count
    assert count <= padded_blocks(count) <= 1.5 * count
    assert padded_rows(padded_rows(count)) == padded_rows(count) <= padded_rows(count + 1)
    assert padded_blocks(padded_blocks(count)) == padded_blocks(count) <= padded_blocks(count + 1)


def test_few_sizes_serve_many() -> None:
    assert len({padded_rows(rows) for rows in range(1, 257)}) == 9
    assert [n for n in range(1, 34) if padded_blocks(n) == n] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def step(starts: list[int], lengths: list[int] | None = None) -> StepBatch:
    """A step of rows that have computed `starts` tokens. Each row has blocks of its own."""
    rows = len(starts)
    new = np.array(lengths or [1] * rows)
    work = Work(slots=np.arange(rows), starts=np.array(starts), lengths=new)
    work, cuts = order_work(work, BLOCK_TOKENS)
    return build_batch(
        work,
        cuts,
        tokens=np.arange(rows * 4096, dtype=np.int32).reshape(rows, -1) % 100,
        tables=1 + np.arange(rows * 1024).reshape(rows, -1),
        known=np.array(starts) + new,
        block_tokens=BLOCK_TOKENS,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def test_steps_with_prompts_have_no_shape() -> None:
    assert shape_of(step([5, 9, 0], [1, 1, 7])) is None
    assert shape_of(step([0], [7])) is None
    assert shape_of(step([5, 9, 30])) == (GroupShape(rows=4, blocks=8),)


def test_groups_with_other_contexts_keep_their_own_shape() -> None:
    assert shape_of(step([5, 9, 4000, 4001])) == (
        GroupShape(rows=2, blocks=3),
        GroupShape(rows=2, blocks=1024),
    )


@given(sizes=st.lists(st.lists(st.integers(0, 40), min_size=5, max_size=8), min_size=2, max_size=4))
def test_padded_steps_hold_the_step_and_harmless_padding(sizes: list[list[int]]) -> None:
    """One padded step is filled with several steps, one after another."""
    shape = (GroupShape(rows=8, blocks=12),)
    padded = PaddedStep(shape, BLOCK_TOKENS, device=torch.device("cpu"), dtype=torch.float32)
    # It runs before it is filled. Rows that see nothing are NaN on some devices.
    assert (padded.batch.groups[0].mask_NQL == 0).any(-1).all()
    for starts in sizes:
        batch, rows = step(starts), len(starts)
        padded.fill(batch)
        [found], [wanted] = padded.batch.groups, batch.groups
        assert torch.equal(padded.batch.token_T[:rows], batch.token_T)
        assert torch.equal(padded.batch.position_T[:rows], batch.position_T)
        assert torch.equal(padded.batch.kv_index_T[:rows], batch.kv_index_T)
        table, mask = found.table_NW.view(8, 12), found.mask_NQL
        width = wanted.blocks * BLOCK_TOKENS
        assert torch.equal(table[:rows, : wanted.blocks], wanted.table_NW.view(rows, -1))
        assert torch.equal(mask[:rows, :, :width], wanted.mask_NQL)
        # Padding writes to, and sees, the block for padding only.
        assert not padded.batch.kv_index_T[rows:].any()
        assert not table[rows:].any()
        assert not table[:, wanted.blocks :].any()
        assert torch.isneginf(mask[:rows, :, width:]).all()
        assert (mask[rows:, 0, 0] == 0).all()
        assert torch.isneginf(mask[rows:, 0, 1:]).all()
        real = padded.real(torch.arange(8.0)[:, None], batch)
        assert real[:, 0].tolist() == list(range(rows))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_replayed_steps_draw_what_steps_without_graphs_draw(temperature: float) -> None:
    """Rows end one by one, contexts grow, and the cache is dropped in between."""
    prompts = [*PROMPTS, list(range(3, 21))]
    recorder = EmulatedGraphs()
    found = draw(recorder, prompts, temperature=temperature)
    wanted = draw(None, prompts, temperature=temperature)
    assert recorder.replayed > 20 > recorder.captured > 2
    assert [row.tolist() for row in found.tokens] == [row.tolist() for row in wanted.tokens]
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_shape_is_captured_when_it_occurs_again_and_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = EmulatedGraphs()
    graphs = decode_graphs.DecodeGraphs(_logits, recorder)
    monkeypatch.setattr(decode_graphs, "GRAPHS_MAX", 2)
    pool = _Pool()
    small, middle, large = ([5] * rows for rows in (1, 2, 4))
    for starts in (small, middle, large):
        graphs(step(starts), pool)  # type: ignore[arg-type]
    assert recorder.captured == 0
    counts = []
    for starts in (small, middle, small, large, small, middle, middle):
        found = graphs(step(starts), pool)  # type: ignore[arg-type]
        assert torch.equal(found, _logits(step(starts), pool))
        counts.append((recorder.captured, recorder.replayed))
    # The middle one was dropped for the large one, and occurred once after that without a graph.
    assert counts == [(1, 1), (2, 2), (2, 3), (3, 4), (3, 5), (3, 5), (4, 6)]


def test_shapes_that_take_turns_are_not_captured_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = EmulatedGraphs()
    graphs = decode_graphs.DecodeGraphs(_logits, recorder)
    monkeypatch.setattr(decode_graphs, "GRAPHS_MAX", 2)
    rounds = 20
    for _ in range(rounds):
        for rows in (1, 2, 4):
            graphs(step([5] * rows), _Pool())  # type: ignore[arg-type]
    assert recorder.captured <= 3 * rounds / 2


def test_logits_of_dropped_graphs_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def forward(batch: StepBatch, pool: object) -> torch.Tensor:
        found = _logits(batch, pool)
        made.append(weakref.ref(found))
        return found

    graphs = decode_graphs.DecodeGraphs(forward, EmulatedGraphs())
    monkeypatch.setattr(decode_graphs, "GRAPHS_MAX", 2)
    for rows in (1, 2, 4, 8, 16):
        for _ in range(3):
            graphs(step([5] * rows), _Pool())  # type: ignore[arg-type]
    assert sum(each() is not None for each in made) == 2


def test_long_contexts_run_without_a_graph() -> None:
    recorder = EmulatedGraphs()
    graphs = decode_graphs.DecodeGraphs(_logits, recorder)
    pool = _Pool()
    pool.position_bytes = kv_cache.GATHERED_BYTES_MAX // 64
    for _ in range(3):
        graphs(step([62]), pool)  # type: ignore[arg-type]
    assert recorder.captured == 1
    for _ in range(3):
        graphs(step([64]), pool)  # type: ignore[arg-type]
    assert recorder.captured == 1


def test_a_model_that_cannot_be_captured_runs_step_by_step() -> None:
    def refuse(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = decode_graphs.DecodeGraphs(_logits, refuse)
    for _ in range(3):
        found = graphs(step([5, 6, 7]), _Pool())  # type: ignore[arg-type]
        assert torch.equal(found, _logits(step([5, 6, 7]), _Pool()))


class _Pool:
    """What `DecodeGraphs` reads of a pool."""

    block_tokens = BLOCK_TOKENS
    position_bytes = 1
    dtype = torch.float32
    device = torch.device("cpu")


def _logits(batch: StepBatch, pool: object) -> torch.Tensor:
    """Something that depends on the tokens only."""
    del pool
    return batch.token_T[:, None] + torch.arange(7.0)
