"""The rollout engine against `transformers`, and against itself in a crowd."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl.errors import BatchShapeError
from plexrl.model.spec import tiny_qwen2
from plexrl.wire.operations import SamplingParams
from plexrl.worker.models import build_model
from plexrl.worker.rollout.engine.engine import Engine
from plexrl.worker.rollout.generation import Generation
from plexrl.worker.rollout.sampling import RowSampling, allowed, draw
from plexrl.worker.rollout.stops import TextDecoder

SPEC = tiny_qwen2("0123456789abcdefghi", seed=2)
MODEL = build_model(SPEC)
TEXT = TextDecoder(SPEC)
PROMPTS = [[3, 4, 5, 6], [7], [8, 9, 10, 11, 12, 13], [14, 15]]


def generate(
    prompts: list[list[int]], *, n: int = 1, slots: int = 64, **sampling: object
) -> Generation:
    engine = Engine(MODEL, slots=slots, sequence_tokens_max=48)
    engine.use_text(TEXT)
    made = generation("g", prompts, n, **sampling)
    engine.submit(made)
    while engine.has_work:
        engine.step()
    return made


def generation(name: str, prompts: list[list[int]], n: int, **sampling: object) -> Generation:
    params = SamplingParams(**{"ignore_eos": True, "seed": 1, **sampling})  # type: ignore[arg-type]
    return Generation(
        name=name,
        prompts=prompts,
        samples_per_prompt=n,
        sampling=params,
        emit=None,
        weights_seq=0,
    )


def text_of(tokens: Sequence[int]) -> str:
    TEXT.prepare()
    return TEXT(tokens)


def test_greedy_tokens_are_those_of_transformers() -> None:
    found = generate(PROMPTS, temperature=0.0, max_tokens=10)
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        wanted = MODEL.generate(  # type: ignore[operator]
            torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None
        )
        assert tokens.tolist() == wanted[0, len(prompt) :].tolist()


def test_the_smallest_temperatures_are_greedy() -> None:
    wanted = generate(PROMPTS, max_tokens=12, temperature=0.0)
    for temperature in (1e-12, 1e-38, 1e-44, 5e-324):
        found = generate(PROMPTS, max_tokens=12, temperature=temperature)
        assert [row.tolist() for row in found.tokens] == [row.tolist() for row in wanted.tokens]


def test_logprobs_are_those_of_a_plain_forward_whatever_the_temperature() -> None:
    found = generate(PROMPTS, temperature=0.7, max_tokens=10)
    for prompt, tokens, logprobs in zip(PROMPTS, found.tokens, found.logprobs, strict=True):
        row = torch.tensor([[*prompt, *tokens.tolist()]])
        with torch.no_grad():
            whole = MODEL(input_ids=row).logits.log_softmax(-1)[0, :-1]
        wanted = whole.gather(-1, row[0, 1:, None])[len(prompt) - 1 :, 0]
        assert np.allclose(logprobs, wanted.numpy(), atol=1e-4)


def test_more_samples_than_slots_all_finish_and_equal_those_of_a_wide_batch() -> None:
    wide = generate(PROMPTS, n=6, slots=64, max_tokens=7)
    narrow = generate(PROMPTS, n=6, slots=5, max_tokens=7)
    assert [t.tolist() for t in narrow.tokens] == [t.tolist() for t in wide.tokens]
    assert narrow.finish == [1] * 24


def test_a_sample_is_the_same_alone_and_joining_a_crowd_late() -> None:
    alone = generate([PROMPTS[2]], n=3, max_tokens=8)
    engine = Engine(MODEL, slots=64, sequence_tokens_max=48)
    engine.submit(generation("crowd", PROMPTS, 8, seed=9, max_tokens=20))
    for _ in range(5):
        engine.step()
    late = generation("late", [PROMPTS[2]], 3, max_tokens=8)
    engine.submit(late)
    while engine.has_work:
        engine.step()
    assert [t.tolist() for t in late.tokens] == [t.tolist() for t in alone.tokens]


def test_an_abort_returns_what_there_is() -> None:
    engine = Engine(MODEL, slots=2, sequence_tokens_max=48)
    made = generation("g", PROMPTS, 1, max_tokens=30)
    engine.submit(made)
    for _ in range(4):
        engine.step()
    engine.abort("g")
    assert [g.name for g in engine.step()] == ["g"]
    assert not engine.has_work
    assert made.finish == [2, 2, 2, 2]
    assert [len(t) for t in made.tokens] == [4, 4, 0, 0]


def test_stopped_rows_end_and_the_others_go_on_as_if_alone() -> None:
    whole = generate(PROMPTS, n=2, max_tokens=12)
    engine = Engine(MODEL, slots=5, sequence_tokens_max=48)
    made = generation("g", PROMPTS, 2, max_tokens=12)
    engine.submit(made)
    engine.abort("g", {0, 7})
    for _ in range(4):
        engine.step()
    assert [(row, tokens) for _, row, tokens, runs, _ in engine.lengths() if runs] == [
        *((1, 8), (2, 5), (3, 5)),
        *((4, 10), (5, 10)),
    ]
    engine.abort("g", {3, 99})
    while engine.has_work:
        engine.step()
        engine.check_invariants()
    drawn = [0, 12, 12, 4, 12, 12, 12, 0]
    for row, (tokens, count) in enumerate(zip(made.tokens, drawn, strict=True)):
        assert tokens.tolist() == whole.tokens[row].tolist()[:count]
        assert made.finish[row] == (1 if count == 12 else 2)


def test_prompts_with_their_own_settings_draw_what_calls_of_their_own_draw() -> None:
    made = generation("g", PROMPTS, 2, max_tokens=12)
    made.prompt_sampling = {
        "max_tokens": np.array([3, 9, 1, 20]),
        "first_sample": np.array([40, 0, 7, 100]),
        "drawn_tokens": np.array([0, 0, 5, 2]),
    }
    engine = Engine(MODEL, slots=64, sequence_tokens_max=48)
    engine.submit(made)
    while engine.has_work:
        engine.step()
    for at, prompt in enumerate(PROMPTS):
        own = {name: int(values[at]) for name, values in made.prompt_sampling.items()}
        alone = generate([prompt], n=2, **own)
        for row in range(2):
            assert made.tokens[2 * at + row].tolist() == alone.tokens[row].tolist()


def test_decode_steps_are_measured_with_their_load() -> None:
    engine = Engine(MODEL, slots=64, sequence_tokens_max=48)
    engine.submit(generation("g", PROMPTS, 2, max_tokens=40))
    while engine.has_work:
        engine.step()
    first, second = engine.meter.latest
    assert (first.number, second.number) == (1, 2)
    assert first.running == second.running == 8
    # After the prompts' pass: 16 steps with one token more each.
    assert first.kv_tokens == sum(2 * (len(p) + 1) for p in PROMPTS) + 8 * 7.5
    assert second.kv_tokens == first.kv_tokens + 8 * 16
    assert first.seconds > 0


def test_a_row_ends_with_its_stop_token_or_sequence() -> None:
    free = generate([PROMPTS[0]], max_tokens=12).tokens[0].tolist()
    stopped = generate([PROMPTS[0]], max_tokens=12, stop_token_ids=(free[4],))
    first = free.index(free[4])
    assert stopped.tokens[0].tolist() == free[: first + 1]
    assert stopped.finish == [0]
    pair = generate([PROMPTS[0]], max_tokens=12, stop_sequences=((free[2], free[3]),))
    assert pair.tokens[0].tolist()[-2:] == free[2:4]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_stop_is_found_across_the_border_of_a_continued_row(length: int) -> None:
    free = generate([PROMPTS[0]], max_tokens=12).tokens[0].tolist()
    stop = tuple(free[4 - length : 5])
    kept = next(at for at in range(12) if tuple(free[: at + 1][-len(stop) :]) == stop) + 1
    for before in range(1, kept):
        longer = [*PROMPTS[0], *free[:before]]
        both: list[dict[str, Any]] = [
            {"stop_sequences": (stop,)},
            {"stop_strings": (text_of(stop),)},
        ]
        for sampling in both:
            rest = generate([longer], max_tokens=12 - before, drawn_tokens=before, **sampling)
            assert rest.tokens[0].tolist() == free[before:kept], (before, sampling)
            assert rest.finish == [0]


def test_a_text_that_the_prompt_begins_ends_no_row() -> None:
    free = generate([PROMPTS[0]], max_tokens=12).tokens[0].tolist()
    stop = text_of([PROMPTS[0][-1], free[0]])
    if stop in text_of(free):
        pytest.skip("the row draws it too")
    assert generate([PROMPTS[0]], max_tokens=12, stop_strings=(stop,)).tokens[0].tolist() == free


def test_the_models_end_token_ends_a_row() -> None:
    found = generate(PROMPTS, n=32, max_tokens=40, ignore_eos=False, temperature=2.0)
    ended = [t.tolist() for t, f in zip(found.tokens, found.finish, strict=True) if f == 0]
    assert ended
    assert all(row[-1] == 2 and 2 not in row[:-1] for row in ended)


def test_sequences_stop_at_the_deployments_bound() -> None:
    found = generate([[3] * 45], max_tokens=40)
    assert len(found.tokens[0]) == 3
    with pytest.raises(BatchShapeError, match="prompt 0 has 48 tokens"):
        generate([[3] * 48])


def test_draws_follow_the_softmax() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = 20_000
    sampling = RowSampling(
        temperature=torch.ones(rows),
        top_p=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        stream=torch.arange(rows) * 7919,
    )
    tokens = draw(
        probabilities.log().expand(rows, 4), sampling, torch.zeros(rows, dtype=torch.int64)
    )
    counts = torch.bincount(tokens, minlength=4).double()
    expected = probabilities.double() * rows
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 16.3, "beyond the 99.9 % quantile of three degrees of freedom"


@given(
    st.lists(st.floats(-5, 5), min_size=2, max_size=8),
    st.integers(0, 9),
    st.floats(0.0, 1.0),
)
@settings(deadline=None)
def test_the_allowed_tokens_are_the_likeliest(
    scores: list[float], top_k: int, top_p: float
) -> None:
    tensor = torch.tensor([scores])
    found = allowed(tensor, torch.tensor([top_k]), torch.tensor([top_p]))[0].tolist()
    order = sorted(range(len(scores)), key=lambda i: (-float(tensor[0, i]), i))
    kept = order[:top_k] if top_k else order
    weights = [float(torch.exp(tensor[0, i] - tensor[0].max())) for i in kept]
    before = 0.0
    wanted: set[int] = set()
    for index, weight in zip(kept, weights, strict=True):
        if not wanted or top_p >= 1.0 or before / sum(weights) < top_p - 1e-6:
            wanted.add(index)
        before += weight
    exact = {index for index, is_kept in enumerate(found) if is_kept}
    # At the very edge of p the sums round differently; there one token more or less is right.
    assert len(exact ^ wanted) <= 1
    assert order[0] in exact
    assert exact <= set(kept)


def test_a_partial_sample_continues_as_if_it_had_not_been_cut() -> None:
    whole = generate(PROMPTS, n=2, max_tokens=12)
    for row, (tokens, logprobs) in enumerate(zip(whole.tokens, whole.logprobs, strict=True)):
        begun = [*PROMPTS[row // 2], *tokens[:5].tolist()]
        rest = generate([begun], max_tokens=7, first_sample=row, drawn_tokens=5)
        assert rest.tokens[0].tolist() == tokens[5:].tolist()
        assert np.allclose(rest.logprobs[0], logprobs[5:], atol=1e-5)


def test_calls_with_one_seed_and_separate_numbers_draw_what_one_call_draws() -> None:
    whole = generate(PROMPTS, n=2, max_tokens=6)
    for row, tokens in enumerate(whole.tokens):
        alone = generate([PROMPTS[row // 2]], max_tokens=6, first_sample=row)
        assert alone.tokens[0].tolist() == tokens.tolist()
