"""The block cache under an engine: budget, preemption, chunks of prompts and shared prefixes."""

import pytest

from plexrl.errors import InvalidRequestError
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine import Engine, EngineStats, Generation

MODEL = build_model(tiny_qwen2("0123456789abcdefghi", seed=2))
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 4
"""Keys and values, layers, heads, head size, tokens, bytes of a number."""
PROMPTS = [[3, 4, 5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17], [18, 19]]


def generation(name: str, prompts: list[list[int]], n: int = 1, **sampling: object) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, **sampling})  # type: ignore[arg-type]
    return Generation(
        name=name,
        prompts=prompts,
        samples_per_prompt=n,
        sampling=params,
        emit=None,
        weights_seq=0,
    )


def run(
    made: Generation, *, blocks: int = 400, slots: int = 16, step_tokens_max: int = 500
) -> EngineStats:
    engine = Engine(
        MODEL,
        slots=slots,
        sequence_tokens_max=40,
        kv_bytes_max=blocks * BLOCK_BYTES,
        block_tokens=4,
        step_tokens_max=step_tokens_max,
    )
    engine.submit(made)
    most = 0
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        most = max(most, engine.stats().blocks_held)
    assert most <= blocks == engine.stats().blocks
    assert engine.stats().kv_bytes_max == blocks * BLOCK_BYTES
    return engine.stats()


def tokens(made: Generation) -> list[list[int]]:
    return [row.tolist() for row in made.tokens]


def test_short_of_blocks_the_newest_wait_again_and_draw_the_same() -> None:
    roomy = generation("g", PROMPTS, 4, max_tokens=30)
    plenty = run(roomy)
    tight = generation("g", PROMPTS, 4, max_tokens=30)
    short = run(tight, blocks=14)
    assert plenty.preemptions == plenty.tokens_recomputed == 0
    assert short.preemptions > 0
    assert short.tokens_recomputed > 0
    assert tokens(tight) == tokens(roomy)
    assert tight.finish == [1] * 16


def test_the_oldest_sample_never_waits_again() -> None:
    engine = Engine(
        MODEL,
        slots=16,
        sequence_tokens_max=40,
        kv_bytes_max=12 * BLOCK_BYTES,
        block_tokens=4,
    )
    first = generation("first", [PROMPTS[0]], max_tokens=30)
    engine.submit(first)
    engine.submit(generation("rest", PROMPTS, 3, max_tokens=30))
    for step in range(30):
        ended = engine.step()
        assert (first in ended) == (step == 29)
    assert engine.stats().preemptions > 0


def test_a_budget_below_one_sequence_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"holds 9 blocks of 4 tokens; .* needs 10 "):
        run(generation("g", PROMPTS), blocks=9)
    run(generation("g", PROMPTS, max_tokens=39), blocks=10)


def test_prompts_in_chunks_are_prompts_in_one_piece() -> None:
    whole = generation("g", [list(range(3, 20)) * 2, *PROMPTS], max_tokens=5)
    parts = generation("g", [list(range(3, 20)) * 2, *PROMPTS], max_tokens=5)
    at_once = run(whole)
    in_chunks = run(parts, slots=4, step_tokens_max=7)
    assert tokens(parts) == tokens(whole)
    assert in_chunks.steps > at_once.steps


def test_a_long_prompt_does_not_hold_up_those_that_draw() -> None:
    engine = Engine(MODEL, slots=4, sequence_tokens_max=40, block_tokens=4, step_tokens_max=6)
    early = generation("early", [[3, 4]], max_tokens=12)
    engine.submit(early)
    engine.step()
    engine.submit(generation("long", [[5] * 30], max_tokens=2))
    for _ in range(3):
        engine.step()
    assert engine.stats().tokens_drawn == 4, "early drew in each step; long is still a prompt"


def test_samples_of_a_prompt_compute_and_store_it_once() -> None:
    prompt = [list(range(3, 17))]
    engine = Engine(MODEL, slots=8, sequence_tokens_max=40, block_tokens=4)
    engine.submit(generation("g", prompt, 8, max_tokens=4))
    engine.step()
    engine.check_invariants()
    assert engine.stats().tokens_computed == 14
    assert engine.stats().blocks_held == 4
    engine.step()
    engine.check_invariants()
    # Three whole blocks stay shared; the last, half full, is each sample's own from now on.
    assert engine.stats().blocks_held == 3 + 8


def test_a_later_request_finds_the_beginning_of_its_prompt() -> None:
    engine = Engine(MODEL, slots=4, sequence_tokens_max=40, block_tokens=4)
    first = generation("first", [list(range(3, 16))], max_tokens=6, temperature=0.0)
    engine.submit(first)
    while engine.has_work:
        engine.step()
    # The next turn of a conversation: the prompt, the reply to it, and new text.
    turn = [*range(3, 16), *first.tokens[0].tolist(), 4, 5]
    second = generation("second", [turn], max_tokens=6)
    engine.submit(second)
    before = engine.stats().tokens_computed
    engine.step()
    assert engine.stats().prefix_tokens_reused == 16
    assert engine.stats().tokens_computed - before == len(turn) - 16
    while engine.has_work:
        engine.step()
    fresh = generation("g", [turn], max_tokens=6)
    run(fresh)
    assert tokens(second) == tokens(fresh)


def test_memory_is_freed_and_running_samples_continue_unchanged() -> None:
    undisturbed = generation("g", PROMPTS, 2, max_tokens=12)
    run(undisturbed)
    engine = Engine(MODEL, slots=8, sequence_tokens_max=40, block_tokens=4)
    made = generation("g", PROMPTS, 2, max_tokens=12)
    engine.submit(made)
    for _ in range(4):
        engine.step()
    engine.drop_cache()
    stats = engine.stats()
    assert (stats.blocks_held, stats.blocks_kept, stats.running, stats.waiting) == (0, 0, 0, 8)
    while engine.has_work:
        engine.step()
    assert tokens(made) == tokens(undisturbed)
    assert engine.stats().preemptions == 0
